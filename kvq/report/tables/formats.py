"""Tables as Markdown, CSV and LaTeX that fits a page, and their files: replaced whole, the same bytes each time."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from csv import DictWriter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml

from kvq.errors import RecordError, printable
from kvq.report.command import no_records, write_files
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import (
    LISTED,
    Cell,
    Table,
    Tables,
    columns_of,
    is_of_diagnostics,
    is_of_items,
    is_of_texts,
)
from kvq.results import Record, Store
from kvq.results.files import cause

PACKAGES = ("booktabs", "graphicx", "textcomp")
PREAMBLE = "% needs " + "".join(f"\\usepackage{{{name}}}" for name in PACKAGES)
# Estimated widths, in characters of \small. A page of one column has about 85; shrunk to it, 160 can still be read.
_WIDEST = 160
_BETWEEN = 2
# A name longer than this makes a table smaller, not a table of several parts.
_NAME = 45
# Lines of a table that fit a page with its caption and notes; notes in \footnotesize have about 110 characters a line.
_LONGEST, _NOTE = 44, 110
# More lines of notes than this follow the table, where they break across pages.
_MOST_NOTES = 14
# Longest line of a column's title, where it can be broken.
_TITLE = 12
_MINUS = re.compile(r"(?<![0-9A-Za-z.])-(?=[0-9])")


@dataclass(frozen=True)
class Sheet:
    """A table as text that is not escaped.

    Attributes:
        title: what it shows.
        header: titles of columns.
        rows: cells.
        labels: how many columns at the left name the row; they stand in every part of a table that is too wide.
        left: columns aligned left (None: those that name the row); the others are numbers.
        label: for `\\ref`; empty: none.
        bold: (row, column) of cells set in bold.
        notes: lines below the table.
        comments: lines that stand only in the file, such as commands.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int
    left: frozenset[int] | None = None
    label: str = ""
    bold: frozenset[tuple[int, int]] = frozenset()
    notes: Sequence[str] = ()
    comments: Sequence[str] = ()

    def is_left(self, column: int) -> bool:
        """Whether a column is aligned left."""
        return column < self.labels if self.left is None else column in self.left


def floats(sheet: Sheet) -> str:
    """One `table` per part: what is too wide is split by columns, what is too long by rows between methods."""
    columns, rows = _across(sheet), _down(sheet)
    parts = [(these, some) for some in rows for these in columns]
    lines = [f"% {one_line(comment)}" for comment in sheet.comments]
    for index, (these, some) in enumerate(parts):
        lines += _float(sheet, these, some, f" ({index + 1} of {len(parts)})" if len(parts) > 1 else "", index == 0)
    if sheet.notes and _noted(sheet) > _MOST_NOTES:
        lines += ["{\\footnotesize\\raggedright", *_notes(sheet), "}"]
    return "\n".join(lines) + "\n"


def _notes(sheet: Sheet) -> Iterator[str]:
    yield from (f"{escape_latex(note)}\\par" for note in sheet.notes)


def _noted(sheet: Sheet) -> int:
    """Estimated number of printed lines of the notes."""
    return sum(1 + len(note) // _NOTE for note in sheet.notes)


def _float(sheet: Sheet, columns: Sequence[int], rows: range, part: str, first: bool) -> Iterator[str]:
    form = "".join("l" if sheet.is_left(column) else "r" for column in columns)
    yield from ("\\begin{table}", "\\centering", "\\small", "\\setlength{\\tabcolsep}{4pt}")
    yield f"\\caption{{{escape_latex(sheet.title)}{part}}}"
    if first and sheet.label:
        yield f"\\label{{{sheet.label}}}"
    # Shrunk to the width of the line where it is wider.
    yield "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%"
    yield from (f"\\begin{{tabular}}{{@{{}}{form}@{{}}}}", "\\toprule")
    yield " & ".join(_stacked(sheet.header[column], sheet.is_left(column)) for column in columns) + " \\\\"
    yield "\\midrule"
    # Whether rows of one name follow each other, so that space between names helps.
    grouped = len({row[0] for row in sheet.rows}) < len(sheet.rows)
    before: Sequence[str] | None = None
    for row in rows:
        cells = sheet.rows[row]
        if before is not None and sheet.labels and cells[0] != before[0] and grouped:
            yield "\\addlinespace"
        yield " & ".join(_cell(sheet, row, column) for column in columns) + " \\\\"
        before = cells
    yield from ("\\bottomrule", "\\end{tabular}}")
    if first and 0 < _noted(sheet) <= _MOST_NOTES:
        yield "\\par\\smallskip\\begin{minipage}{\\linewidth}\\footnotesize\\raggedright"
        yield from _notes(sheet)
        yield "\\end{minipage}"
    yield "\\end{table}"


def _cell(sheet: Sheet, row: int, column: int) -> str:
    text = escape_latex(sheet.rows[row][column])
    if not sheet.is_left(column):
        text = _MINUS.sub("$-$", text)
    return rf"\textbf{{{text}}}" if (row, column) in sheet.bold else text


def _stacked(title: str, left: bool) -> str:
    """A column's title, broken into lines."""
    lines = [escape_latex(line) for line in _lines(title)]
    if len(lines) < 2:
        return "".join(lines)
    return f"\\shortstack[{'l' if left else 'r'}]{{" + "\\\\".join(lines) + "}"


def _lines(title: str) -> list[str]:
    """Lines of a title: broken between axes, at spaces, and after underscores of a long name."""
    parts = [part for part in title.split(", ") if part]
    spaced = [part if len(part) <= _TITLE else part.replace("_", "_\0") for part in parts]
    found = [line for part in spaced for line in _wrapped(part)]
    return found or [title]


def _wrapped(part: str) -> list[str]:
    lines: list[str] = []
    for word in part.split(" "):
        for index, piece in enumerate(word.split("\0")):
            joint = "" if index else " "
            if lines and len(lines[-1]) + len(joint) + len(piece) <= _TITLE:
                lines[-1] += joint + piece
            else:
                lines.append(piece)
    return lines


def _across(sheet: Sheet) -> list[list[int]]:
    """Columns of each part: those that name the row, and the others in as few parts as fit, of about one size."""
    widths = [
        max(map(len, [*_lines(sheet.header[column]), *(row[column] for row in sheet.rows)])) + _BETWEEN
        for column in range(len(sheet.header))
    ]
    names, others = list(range(sheet.labels)), list(range(sheet.labels, len(sheet.header)))
    room = _WIDEST - min(sum(widths[: sheet.labels]), _NAME)
    count = max(1, math.ceil(sum(widths[column] for column in others) / max(room, 1)))
    while count < len(others):
        parts = [others[len(others) * part // count : len(others) * (part + 1) // count] for part in range(count)]
        if all(sum(widths[column] for column in part) <= room for part in parts):
            return [[*names, *part] for part in parts]
        count += 1
    return [[*names, column] for column in others] or [names]


def _down(sheet: Sheet) -> list[range]:
    """Rows of each part of a table: names are kept whole, unless the rows of one name are longer than a page."""
    longest = _LONGEST - (_noted(sheet) if _noted(sheet) <= _MOST_NOTES else 0)
    parts: list[range] = []
    start = end = 0
    for _, found in groupby(range(len(sheet.rows)), key=lambda row: sheet.rows[row][0] if sheet.labels else row):
        stop = end + len(list(found))
        if stop - start > longest and end > start:
            parts.append(range(start, end))
            start = end
        end = stop
    return [*parts, range(start, end)]


CSV_METRICS: list[str] = LISTED["csv"]


def markdown(table: Table) -> str:
    """The table as GitHub Markdown, its protocol above and its notes below."""

    def shown(cell: Cell) -> str:
        text = escape_markdown(cell.text)
        return f"**{text}**" if cell.bold else text

    columns = columns_of(table)
    lines = [f"# {escape_markdown(table.title)}", ""]
    lines += [f"- {escape_markdown(line)}" for line in table.protocol]
    rows = [[shown(column.cell(row)) for column in columns] for row in table.lines]
    numbers = {place for place, column in enumerate(columns) if column.numeric}
    lines += ["", *markdown_table([escape_markdown(column.title) for column in columns], rows, numbers)]
    lines += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"


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
    columns = columns_of(table)
    cells = [[column.cell(row) for column in columns] for row in table.lines]
    sheet = Sheet(
        title=table.title,
        label=f"tab:{table.slug}",
        header=[column.title for column in columns],
        rows=[[cell.text for cell in row] for row in cells],
        labels=2,
        left=frozenset(index for index, column in enumerate(columns) if not column.numeric),
        bold=frozenset((r, c) for r, row in enumerate(cells) for c, cell in enumerate(row) if cell.bold),
        notes=table.notes,
    )
    return f"{PREAMBLE}\n{floats(sheet)}"


def index(tables: Tables) -> str:
    """A page that links every table, by task, and names every file that is not a record."""
    lines = [
        "# Tables",
        "",
        "Made from the records by `make tables`; changes here are overwritten. The papers' tables,",
    ]
    lines += ["measured beside published, are in [experiments](experiments/index.md); figures in"]
    lines += ["[figures](../figures/index.md)."]
    for task, found in groupby(tables.tables, key=lambda table: table.title.partition(":")[0]):
        rows = []
        for table in found:
            name = escape_markdown(table.title.partition(": ")[2] or table.title)
            others = f"[CSV]({table.slug}.csv), [LaTeX]({table.slug}.tex)"
            rows.append([f"[{name}]({table.slug}.md)", _counts(table), others])
        lines += ["", f"## {escape_markdown(task)}", "", *markdown_table(["table", "runs", "files"], rows)]
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

    Raises:
        RecordError: the store has no records, or the folder cannot be written.
    """
    tables = build_tables(store, stale=stale) if tables is None else tables
    if not tables.tables:
        raise no_records(store)
    folder = Path(out_dir)
    files = {INDEX: index(tables)}
    for table in tables.tables:
        files |= {f"{table.slug}.{kind}": write(table) for kind, write in _FORMATS.items()}
    try:
        former = _listed(folder / INDEX) - {table.slug for table in tables.tables}
        paths = write_files("tables", folder, files)
        for slug in former:
            for kind in _FORMATS:
                (folder / f"{slug}.{kind}").unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"tables: cannot write under '{folder}': {cause(error)}") from error
    return paths


def _listed(index: Path) -> set[str]:
    try:
        return set(_OURS.findall(index.read_text(encoding="utf-8", errors="replace")))
    except FileNotFoundError:
        return set()


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
