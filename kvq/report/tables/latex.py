"""LaTeX tables with booktabs that fit a page: wide and long tables are split. They compile with pdflatex."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvq.report.escapes import escape_latex, one_line

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
        caption: what it shows.
        label: for `\\ref`; empty: none.
        header: titles of columns.
        rows: cells.
        labels: how many columns at the left name the row; they stand in every part of a table that is too wide.
        left: columns aligned left; the others are numbers.
        bold: (row, column) of cells set in bold.
        notes: lines below the table.
        comments: lines that stand in the file alone, such as commands.
    """

    caption: str
    label: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int
    left: frozenset[int]
    bold: frozenset[tuple[int, int]] = frozenset()
    notes: Sequence[str] = ()
    comments: Sequence[str] = ()


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
    form = "".join("l" if column in sheet.left else "r" for column in columns)
    yield from ("\\begin{table}", "\\centering", "\\small", "\\setlength{\\tabcolsep}{4pt}")
    yield f"\\caption{{{escape_latex(sheet.caption)}{part}}}"
    if first and sheet.label:
        yield f"\\label{{{sheet.label}}}"
    # Shrunk to the width of the line where it is wider.
    yield "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%"
    yield from (f"\\begin{{tabular}}{{@{{}}{form}@{{}}}}", "\\toprule")
    yield " & ".join(_stacked(sheet.header[column], column in sheet.left) for column in columns) + " \\\\"
    yield "\\midrule"
    before: Sequence[str] | None = None
    for row in rows:
        cells = sheet.rows[row]
        if before is not None and sheet.labels and cells[0] != before[0] and _grouped(sheet):
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
    if column not in sheet.left:
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


def _grouped(sheet: Sheet) -> bool:
    """Whether rows of one name follow each other, so that space between names helps."""
    return len({row[0] for row in sheet.rows}) < len(sheet.rows)


def _down(sheet: Sheet) -> list[range]:
    """Rows of each part: whole names, unless one name alone is longer than a page."""
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
