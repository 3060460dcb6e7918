"""Tables on a terminal: colours and rules there, plain text in a pipe or a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from kvq.errors import printable
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Sheet, Table, Texts, is_of_diagnostics, measured
from kvq.report.tables.notes import shortest_notes
from kvq.results import Record, Store

# Columns that a narrow terminal leaves out first (then from the right); how many first columns always stay, and the
# blanks behind a column.
_LEFT_OUT = ("p99", "Δppl", "Meas.", "Top-1%", "KL")
_KEPT, _BETWEEN = 5, 2
# Characters of a prompt's end; what stands before the first word that differs.
_SHOWN_PROMPT = 160
MARK = "▶"


def _plain(text: str, style: str = "") -> RichText:
    """Text of a record: no markup of rich and no control character of it reaches the terminal."""
    return RichText(printable(text), style=style)


def print_tables(
    store: Store,
    console: Console,
    *,
    keys: Collection[str] | None = None,
    stale: Callable[[Record], bool] | None = None,
) -> None:
    """Print the tables of a store, or of the runs `keys` and their full-precision runs, with their shortest notes."""
    tables = build_tables(store, keys=keys, stale=stale).tables
    for table in tables:
        print_table(table, console, shortest_notes(table))
    if any(len(table.notes) > len(shortest_notes(table)) for table in tables):
        console.print(
            _plain(f"All notes: kvq report --print --results {store.root}", "dim"), soft_wrap=not console.is_terminal
        )


def print_table(table: Table, console: Console, notes: Sequence[str] | None = None) -> None:
    """Print one table with these notes (None: all of its own)."""
    sheet = table.sheet if notes is None else replace(table.sheet, notes=notes)
    if is_of_diagnostics(table) and not table.is_of_memory:
        # A row for each metric and a column for each run: diagnostics have many metrics and few runs.
        rows = [[column.title, *map(column.cell, table.rows)] for column in measured(table)]
        header = ["Metric", *(f"{row.name} {row.bits}" for row in table.rows)]
        sheet = Sheet(table.title, header, rows, {0}, notes=sheet.notes)
    elif console.is_terminal:
        sheet = fitting(sheet, console.width)
    print_sheet(sheet, console)
    if table.texts is not None:
        _print_texts(table.texts, console)


def print_sheet(sheet: Sheet, console: Console) -> None:
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
            padded = [
                text + blank if place in sheet.left else blank + text
                for place, (text, blank) in enumerate(zip(line, blanks, strict=True))
            ]
            console.file.write("  ".join(padded).rstrip() + "\n")
    for note in sheet.notes:
        console.print(_plain(note, style="dim"), soft_wrap=not console.is_terminal)


def _print_texts(texts: Texts, console: Console) -> None:
    """The end of the prompt and every continuation, with a mark where it leaves full precision's."""
    end = texts.prompt[-_SHOWN_PROMPT:]
    console.print(_plain(f"\nPrompt: {'…' if len(end) < len(texts.prompt) else ''}{end}", style="dim"))
    for found in texts.continuations:
        said = f" ({found.said})" if found.said else ""
        console.print(_plain(f"\n{found.name}{said}:", style="italic"))
        mark = MARK if found.differs else ""
        console.print(RichText.assemble(found.same, (mark + found.differs, "bold"), found.rest))


def fitting(sheet: Sheet, width: int) -> Sheet:
    """The columns that fit a terminal `width` wide; the first `_KEPT` are always among them."""
    names, places = sheet.short, list(range(len(sheet.short)))
    sizes = [max(map(cell_len, column)) + _BETWEEN for column in zip(names, *sheet.rows, strict=True)]
    first = [names.index(name) for name in _LEFT_OUT if name in names]
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
