"""Tables as Markdown, CSV and LaTeX that fits a page, and their files: replaced whole, the same bytes each time."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from csv import DictWriter
from pathlib import Path

import yaml

from kvq.errors import RecordError, printable, reason_of
from kvq.report.command import no_records, write_files
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import LISTED, Sheet, Table, Tables, is_of_diagnostics, is_of_items, is_of_texts
from kvq.results import Record, Store

PACKAGES = ("array", "booktabs", "longtable", "pdflscape", "textcomp")
PREAMBLE = "% needs " + "".join(f"\\usepackage{{{name}}}" for name in PACKAGES)
_MINUS = re.compile(r"(?<![0-9A-Za-z.])-(?=[0-9])")


def landscape(sheet: Sheet) -> str:
    """A `longtable` on pages turned sideways: columns of text have twice the width of numbers."""
    left = [column in sheet.left for column in range(len(sheet.header))]
    whole = len(left) + sum(left)
    form = "".join(
        f">{{\\{'raggedright' if text else 'raggedleft'}\\arraybackslash}}"
        f"p{{\\dimexpr {1 + text}\\linewidth/{whole}-2\\tabcolsep\\relax}}"
        for text in left
    )
    header = " & ".join(_breakable(escape_latex(title)) for title in sheet.header)
    label = f"\\label{{{sheet.label}}}" if sheet.label else ""
    lines = [f"% {one_line(comment)}" for comment in sheet.comments]
    lines += [
        "\\begin{landscape}",
        "\\scriptsize\\setlength{\\tabcolsep}{3pt}\\setlength{\\LTcapwidth}{\\linewidth}",
        f"\\begin{{longtable}}{{{form}}}",
    ]
    lines += [f"\\caption{{{escape_latex(sheet.title)}}}{label}\\\\"]
    lines += [f"\\toprule {header} \\\\ \\midrule \\{place}" for place in ("endfirsthead", "endhead")]
    lines += ["\\bottomrule \\endfoot"]
    for row, cells in enumerate(sheet.rows):
        lines.append(" & ".join(_cell(sheet, row, column) for column in range(len(cells))) + " \\\\")
    lines += ["\\end{longtable}", "\\raggedright", *(f"{escape_latex(note)}\\par" for note in sheet.notes)]
    return "\n".join([*lines, "\\end{landscape}"]) + "\n"


def _cell(sheet: Sheet, row: int, column: int) -> str:
    text = escape_latex(sheet.rows[row][column])
    text = _breakable(text) if column in sheet.left else _MINUS.sub("$-$", text)
    text = f"{{}}{text}" if text.startswith("[") else text  # behind a line's end it would be a length
    return rf"\textbf{{{text}}}" if (row, column) in sheet.bold else text


def _breakable(text: str) -> str:
    """Escaped text in which a line may end behind an underscore and a slash."""
    return text.replace("\\_", "\\_\\allowbreak{}").replace("/", "/\\allowbreak{}")


CSV_METRICS: list[str] = LISTED["csv"]


def markdown(table: Table) -> str:
    """The table as GitHub Markdown, its protocol above and its notes below."""
    lines = [f"# {escape_markdown(table.title)}", ""]
    lines += [f"- {escape_markdown(line)}" for line in table.protocol]
    lines += ["", *markdown_rows(table.sheet)]
    lines += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_rows(sheet: Sheet) -> list[str]:
    """Lines of a sheet's header and rows."""
    rows = [list(map(escape_markdown, row)) for row in sheet.rows]
    for row, column in sheet.bold:
        rows[row][column] = f"**{rows[row][column]}**"
    numbers = set(range(len(sheet.header))).difference(sheet.left)
    return markdown_table(list(map(escape_markdown, sheet.header)), rows, numbers)


def csv(table: Table) -> str:
    """One line per run: names, status, marks and every number in full; no metric, no text in its place."""
    named = {name for row in table.rows for name in row.record.metrics}
    metrics = (*CSV_METRICS, *sorted(name for name in named if name.startswith(("preset_", "agreement_"))))
    if is_of_items(table) or is_of_diagnostics(table) or is_of_texts(table):
        metrics = tuple(sorted({name for row in table.rows for name in row.record.metrics}))
    rows = [
        {
            "method": row.name,
            "bits": row.record.bits,
            "status": row.record.status,
            "reason": one_line(row.record.reason or ""),
            "baseline": row.baseline,
            "within_noise": row.within_noise,
            "best": row.best,
            "stale": row.stale,
            **({"p_holm": row.p_value} if is_of_items(table) else {}),
            **{name: row.record.metrics.get(name) for name in metrics if name != "within_noise"},
            **({"bits_above_limit": row.above_limit} if table.limit else {}),
            "dtype": row.record.provenance.dtype,
            "key": row.record.key,
        }
        for row in table.rows
    ]
    return csv_of(rows)


def latex(table: Table) -> str:
    """The table for a paper, with booktabs: its caption names the protocol's runs, its notes stand below."""
    return f"{PREAMBLE}\n{landscape(table.sheet)}"


def index(tables: Tables) -> str:
    """A page that links every table, by task, and names every file that is not a record."""
    lines = [_BEGIN]
    for task, found in itertools.groupby(tables.tables, key=lambda table: table.title.partition(":")[0]):
        rows = []
        for table in found:
            name = escape_markdown(table.title.partition(": ")[2] or table.title)
            rows.append([f"[{name}]({table.slug}.md)", _counts(table)])
        lines += ["", f"## {escape_markdown(task)}", "", *markdown_table(["table", "runs"], rows)]
    if tables.broken:
        lines += ["", "## Skipped, because they are not records", ""]
        lines += [f"- {escape_markdown(f'{broken.path.name}: {broken.reason}')}" for broken in tables.broken]
    return "\n".join(lines) + "\n"


def _counts(table: Table) -> str:
    states = [row.record.status for row in table.rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))) or "no runs"
    stale = sum(row.stale for row in table.rows)
    return f"{counts}, {stale} stale" if stale else counts


INDEX = "index.md"
_BEGIN = """\
# Tables

Made from the records by `make tables`, which writes each as CSV and LaTeX too; changes here are
overwritten. The papers' tables, measured beside published, are in [experiments](experiments/index.md);
figures in [figures](../figures/index.md)."""
_FORMATS = {"md": markdown, "csv": csv, "tex": latex}
# The names `write_tables` gives: nothing else in the folder is ever removed.
_OURS = re.compile(r"\]\(([A-Za-z0-9._-]+-[0-9a-f]{8})\.md\)")


def write_tables(
    store: Store,
    out_dir: str | os.PathLike[str],
    *,
    stale: Callable[[Record], bool] | None = None,
    tables: Tables | None = None,
) -> list[Path]:
    """Write every table of a store as Markdown, CSV and LaTeX, with an index.md, and return their paths.

    Tables that an earlier index.md lists and that no longer exist are removed.

    Args:
        store: where the records are.
        out_dir: the folder.
        stale: as in `build_tables`.
        tables: those of the store, where they are built already.
    """
    tables = build_tables(store, stale=stale) if tables is None else tables
    if not tables.tables:
        raise no_records(store)
    folder = Path(out_dir)
    files = {INDEX: index(tables)}
    for table in tables.tables:
        files |= {f"{table.slug}.{kind}": write(table) for kind, write in _FORMATS.items()}
    try:
        former = (folder / INDEX).read_text(encoding="utf-8", errors="replace") if (folder / INDEX).exists() else ""
        paths = write_files("tables", folder, files)
        for slug, kind in itertools.product(set(_OURS.findall(former)), _FORMATS):
            if f"{slug}.{kind}" not in files:
                (folder / f"{slug}.{kind}").unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"tables: cannot write under '{folder}': {reason_of(error)}") from error
    return paths


_LATEX = str.maketrans(yaml.safe_load((Path(__file__).parents[1] / "latex.yaml").read_text(encoding="utf-8")))
# Letters that pdflatex knows in any encoding of fonts. What is neither here nor above is named by its number, so that
# a name in another script compiles.
_UNKNOWN = re.compile(r"[^\x00-\x7fÀ-ÏÑ-ÖØ-Ýß-ïñ-öø-ýÿ]")
# An underscore between letters or digits starts no emphasis, and names stay readable as they are.
_MARKDOWN = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def one_line(text: str) -> str:
    """`text` on one line, without control characters."""
    return printable(" ".join(text.split()))


def plain_cell(value: object) -> object:
    """A value of a CSV's cell; text that a spreadsheet would take for a formula begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    text = value if "\r" not in value else value.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote these
    formula = len(text) > 1 and text.lstrip()[:1] in ("=", "@", "+", "-") and not _is_number(text)
    return f"'{text}" if formula else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def csv_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of the same columns as CSV: a header, `None` an empty field, floats in full, no formulas."""
    if not rows:
        return ""
    file = io.StringIO()
    writer = DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writerow({name: plain_cell(name) for name in rows[0]})
    writer.writerows({name: plain_cell(value) for name, value in row.items()} for row in rows)
    return file.getvalue()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Lines of a Markdown table of cells that are escaped; `numbers`: the columns that are aligned right."""
    aligned = ["---:" if place in numbers else ":---" for place in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, aligned, *rows)]


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, also in a table's cell."""
    html = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", html)


def escape_latex(text: str) -> str:
    """Text that LaTeX shows as it is; signs used by the tables become their commands."""
    # Two hyphens make a dash of another length.
    escaped = one_line(text).translate(_LATEX).replace("--", "-{}-").replace("--", "-{}-")
    return _UNKNOWN.sub(lambda found: rf"\texttt{{U+{ord(found[0]):04X}}}", escaped)
