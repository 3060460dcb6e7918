"""Tables as Markdown, CSV, LaTeX that fits a page, and on a terminal; their files, the same bytes each time."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from csv import DictWriter
from dataclasses import replace
from pathlib import Path

import yaml
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from kvq.errors import RecordError, printable, reason_of
from kvq.report.command import no_records, write_files
from kvq.report.tables import layout
from kvq.report.tables.build import build_tables
from kvq.report.tables.notes import shortest_notes
from kvq.results import Store

PACKAGES = ("array", "booktabs", "longtable", "pdflscape", "textcomp")
PREAMBLE = "% needs " + "".join(f"\\usepackage{{{name}}}" for name in PACKAGES)
_MINUS = re.compile(r"(?<![0-9A-Za-z.])-(?=[0-9])")
INDEX = "index.md"
_BEGIN = """\
# Tables

Made from the records by `make tables`, which writes each as CSV and LaTeX too; changes here are
overwritten. The papers' tables, measured beside published, are in [experiments](experiments/index.md);
figures in [figures](../figures/index.md)."""
# The names `write_tables` gives: nothing else in the folder is ever removed.
_OURS = re.compile(r"\]\(([A-Za-z0-9._-]+\.md)#([A-Za-z0-9._-]+-[0-9a-f]{8})\)")
_LATEX = str.maketrans(yaml.safe_load((Path(__file__).parents[1] / "latex.yaml").read_text(encoding="utf-8")))
# Letters that pdflatex knows in any encoding of fonts. What is neither here nor above is named by its number, so that
# a name in another script compiles.
_UNKNOWN = re.compile(r"[^\x00-\x7fÀ-ÏÑ-ÖØ-Ýß-ïñ-öø-ýÿ]")
# An underscore between letters or digits starts no emphasis, and names stay readable as they are.
_MARKDOWN = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# Columns that a narrow terminal leaves out first (then from the right); how many always stay; blanks behind a column.
_KEPT, _BETWEEN = 5, 2
CSV_METRICS: list[str] = layout.LISTED["csv"]
MARK = "▶"  # before the first word that differs


def landscape(sheet: layout.Sheet) -> str:
    """A sheet as LaTeX: a `longtable` on pages turned sideways; columns of text have twice the width of numbers."""
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
        lines.append(" & ".join(_latex_cell(sheet, row, column) for column in range(len(cells))) + " \\\\")
    lines += ["\\end{longtable}", "\\raggedright", *(f"{escape_latex(note)}\\par" for note in sheet.notes)]
    return "\n".join([*lines, "\\end{landscape}"]) + "\n"


def _latex_cell(sheet: layout.Sheet, row: int, column: int) -> str:
    """A cell of a sheet as LaTeX: escaped, with a minus sign before numbers, bold where the sheet says so."""
    text = escape_latex(sheet.rows[row][column])
    text = _breakable(text) if column in sheet.left else _MINUS.sub("$-$", text)
    text = f"{{}}{text}" if text.startswith("[") else text  # behind a line's end it would be a length
    return rf"\textbf{{{text}}}" if (row, column) in sheet.bold else text


def _breakable(text: str) -> str:
    """Escaped text in which a line may end behind an underscore and a slash."""
    return text.replace("\\_", "\\_\\allowbreak{}").replace("/", "/\\allowbreak{}")


def pages(sections: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Markdown files of sections that each name their page: the sections of a page stand in their order."""
    found: dict[str, list[str]] = defaultdict(list)
    for page, section in sections:
        found[page].append(section)
    return {f"{page}.md": "\n".join([f"# {escape_markdown(page)}\n", *own]) for page, own in found.items()}


def heading(anchor: str, title: str) -> str:
    """A section's heading, which a link finds by `anchor`; `title` is escaped."""
    return f'## <a id="{anchor}"></a>{title}'


def markdown(table: layout.Table) -> str:
    """The table as a section of GitHub Markdown, its protocol above and its notes below."""
    lines = [heading(table.slug, escape_markdown(table.title)), ""]
    lines += [f"- {escape_markdown(line)}" for line in table.protocol]
    lines += ["", *markdown_rows(table.sheet)]
    lines += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_rows(sheet: layout.Sheet) -> list[str]:
    """Lines of a sheet's header and rows."""
    rows = [list(map(escape_markdown, row)) for row in sheet.rows]
    for row, column in sheet.bold:
        rows[row][column] = f"**{rows[row][column]}**"
    numbers = set(range(len(sheet.header))).difference(sheet.left)
    return markdown_table(list(map(escape_markdown, sheet.header)), rows, numbers)


def csv(table: layout.Table) -> str:
    """One line per run: names, status, marks and every number in full; no metric, no text in its place."""
    named = {name for row in table.rows for name in row.record.metrics}
    metrics = (*CSV_METRICS, *sorted(name for name in named if name.startswith(("preset_", "agreement_"))))
    if layout.is_of_items(table) or layout.is_of_diagnostics(table) or layout.is_of_texts(table):
        metrics = tuple(sorted(named))
    rows = [
        {"method": row.name, "bits": row.record.bits, "status": row.record.status}
        | {"reason": one_line(row.record.reason or "")}
        | {name: getattr(row, name) for name in ("baseline", "within_noise", "best", "stale")}
        | ({"p_holm": row.p_value} if layout.is_of_items(table) else {})
        | {name: row.record.metrics.get(name) for name in metrics if name != "within_noise"}
        | {"dtype": row.record.provenance.dtype, "key": row.record.key}
        for row in table.rows
    ]
    return csv_of(rows)


def latex(table: layout.Table) -> str:
    """The table for a paper, with booktabs: its caption names the protocol's runs, its notes stand below."""
    return f"{PREAMBLE}\n{landscape(table.sheet)}"


def index(tables: layout.Tables) -> str:
    """A page that links every table, by task, and names every file that is not a record."""
    lines = [_BEGIN]
    for task, found in itertools.groupby(tables.tables, key=lambda table: table.title.partition(":")[0]):
        rows = []
        for table in found:
            name = escape_markdown(table.title.partition(": ")[2] or table.title)
            states = Counter(row.record.status for row in table.rows)
            counts = [f"{count} {state}" for state, count in sorted(states.items())] or ["no runs"]
            counts += [f"{stale} stale"] if (stale := sum(row.stale for row in table.rows)) else []
            rows.append([f"[{name}]({table.page}.md#{table.slug})", ", ".join(counts)])
        lines += ["", f"## {escape_markdown(task)}", "", *markdown_table(["table", "runs"], rows)]
    if tables.broken:
        lines += ["", "## Skipped, because they are not records", ""]
        lines += [f"- {escape_markdown(f'{broken.path.name}: {broken.reason}')}" for broken in tables.broken]
    return "\n".join(lines) + "\n"


def write_tables(store: Store, out_dir: str | os.PathLike[str], *, tables: layout.Tables | None = None) -> list[Path]:
    """Write tables as CSV, LaTeX, pages of Markdown and an index.md; remove files that only the index before lists."""
    tables = build_tables(store) if tables is None else tables
    if not tables.tables:
        raise no_records(store)
    folder = Path(out_dir)
    files = {INDEX: index(tables)} | pages((table.page, markdown(table)) for table in tables.tables)
    for table in tables.tables:
        files |= {f"{table.slug}.csv": csv(table), f"{table.slug}.tex": latex(table)}
    try:
        former = (folder / INDEX).read_text(encoding="utf-8", errors="replace") if (folder / INDEX).exists() else ""
        paths = write_files("tables", folder, files)
        for page, slug in _OURS.findall(former):
            for name in {page, f"{slug}.csv", f"{slug}.tex"} - files.keys():
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"tables: cannot write under '{folder}': {reason_of(error)}") from error
    return paths


def one_line(text: str) -> str:
    """`text` on one line, without control characters."""
    return printable(" ".join(text.split()))


def plain_cell(value: object) -> object:
    """A value of a CSV's cell; text that a spreadsheet would take for a formula begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote these
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if len(text) > 1 and text.lstrip()[:1] in ("=", "@", "+", "-") else text


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


def _plain(text: str, style: str = "") -> RichText:
    """Text of a record for rich: no markup and no control character of it reaches the terminal."""
    return RichText(printable(text), style=style)


def print_tables(store: Store, console: Console, *, keys: Collection[str] | None = None) -> None:
    """Print the tables of a store, or of the runs `keys` and their full-precision runs, with their shortest notes."""
    tables = build_tables(store, keys=keys).tables
    for table in tables:
        print_table(table, console, shortest_notes(table))
    if any(len(table.notes) > len(shortest_notes(table)) for table in tables):
        said = _plain(f"All notes: kvq report --print --results {store.root}", "dim")
        console.print(said, soft_wrap=not console.is_terminal)


def print_table(table: layout.Table, console: Console, notes: Sequence[str] | None = None) -> None:
    """Print one table with these notes (None: all of its own), then the texts that its runs wrote."""
    sheet = table.sheet if notes is None else replace(table.sheet, notes=notes)
    if layout.is_of_diagnostics(table) and not table.is_of_memory:
        # A row for each metric and a column for each run: diagnostics have many metrics and few runs.
        rows = [[column.title, *map(column.cell, table.rows)] for column in layout.measured(table)]
        header = ["Metric", *(f"{row.name} {row.bits}" for row in table.rows)]
        sheet = layout.Sheet(table.title, header, rows, {0}, notes=sheet.notes)
    elif console.is_terminal:
        sheet = _fit_columns(sheet, console.width)
    print_sheet(sheet, console)
    if table.texts is None:
        return
    end = table.texts.prompt[-160:]  # characters of a prompt's end
    console.print(_plain(f"\nPrompt: {'…' if len(end) < len(table.texts.prompt) else ''}{end}", style="dim"))
    for found in table.texts.continuations:
        said = f" ({found.shared})" if found.shared else ""
        console.print(_plain(f"\n{found.name}{said}:", style="italic"))
        mark = MARK if found.differs else ""
        console.print(RichText.assemble(found.same, (mark + found.differs, "bold"), found.rest))


def print_sheet(sheet: layout.Sheet, console: Console) -> None:
    """Print a table with its notes; in a pipe or file as plain lines of any width, a note on one line."""
    console.print(_plain(sheet.title, style="italic"), soft_wrap=True)
    header = sheet.short or sheet.header
    if console.is_terminal:
        drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for place, name in enumerate(header):
            drawn.add_column(_plain(name), justify="left" if place in sheet.left else "right", overflow="fold")
        for r, row in enumerate(sheet.rows):
            drawn.add_row(*(_plain(text, "bold" if (r, c) in sheet.bold else "") for c, text in enumerate(row)))
        console.print(drawn)
    else:
        lines = [list(map(printable, row)) for row in (header, *sheet.rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            blanks = [" " * (width - cell_len(text)) for width, text in zip(widths, line, strict=True)]
            cells = enumerate(zip(line, blanks, strict=True))
            padded = [text + blank if place in sheet.left else blank + text for place, (text, blank) in cells]
            console.file.write("  ".join(padded).rstrip() + "\n")
    for note in sheet.notes:
        console.print(_plain(note, style="dim"), soft_wrap=not console.is_terminal)


def _fit_columns(sheet: layout.Sheet, width: int) -> layout.Sheet:
    """The sheet with the columns that fit a terminal `width` characters wide; the first `_KEPT` always stay."""
    names, places = sheet.short, list(range(len(sheet.short)))
    sizes = [max(map(cell_len, column)) + _BETWEEN for column in zip(names, *sheet.rows, strict=True)]
    first = [names.index(name) for name in ("p99", "Δppl", "Meas.", "Top-1%", "KL") if name in names]
    for place in [*first, *reversed([place for place in places[_KEPT:] if place not in first])]:
        if sum(sizes[kept] for kept in places) <= width:
            break
        places.remove(place)
    out = [title for place, title in enumerate(sheet.header) if place not in places]
    return replace(
        sheet,
        short=[names[place] for place in places],
        rows=[[row[place] for place in places] for row in sheet.rows],
        left=[place for place, kept in enumerate(places) if kept in sheet.left],
        bold={(row, places.index(column)) for row, column in sheet.bold if column in places},
        notes=[*([f"Not shown at this width: {', '.join(out)}."] if out else []), *sheet.notes],
    )
