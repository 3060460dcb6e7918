"""Tables on a terminal: colours and rules there, plain text in a pipe or a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from kvq.errors import printable
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import Sheet
from kvq.report.tables.layout import Cell, Table, Texts, is_of_diagnostics, measured
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
    """Print the tables of a store, or of the runs `keys` and their full-precision runs, with their shortest notes.

    Raises:
        RecordError: the folder of the store cannot be listed.
    """
    tables = build_tables(store, keys=keys, stale=stale).tables
    for table in tables:
        print_table(table, console, shortest_notes(table))
    if any(len(table.notes) > len(shortest_notes(table)) for table in tables):
        console.print(
            _plain(f"All notes: kvq report --print --results {store.root}", "dim"), soft_wrap=not console.is_terminal
        )


def print_table(table: Table, console: Console, notes: Sequence[str] | None = None) -> None:
    """Print one table with these notes (None: all of its own)."""
    notes = table.notes if notes is None else notes
    if is_of_diagnostics(table) and not table.is_of_memory:
        # A row for each metric and a column for each run: diagnostics have many metrics and few runs.
        rows = [[Cell(column.title), *(column.cell(row) for row in table.rows)] for column in measured(table)]
        header = ["Metric", *(f"{row.name} {row.bits}" for row in table.rows)]
        _print(table.title, header, rows, {0}, notes, console)
    else:
        places = fitting(table, console.width) if console.is_terminal else list(range(len(table.columns)))
        shown = [table.columns[place] for place in places]
        if out := [column.title for column in table.columns if column not in shown]:
            notes = [f"Not shown at this width: {', '.join(out)}.", *notes]
        left = {place for place, column in enumerate(shown) if not column.numeric}
        rows = [[cells[place] for place in places] for cells in table.cells]
        _print(table.title, [column.short for column in shown], rows, left, notes, console)
    if table.texts is not None:
        _print_texts(table.texts, console)


def print_grid(grid: Sheet, console: Console) -> None:
    """Print a table of an experiment with its notes."""
    left = {place for place in range(len(grid.header)) if grid.is_left(place)}
    _print(grid.title, grid.header, [list(map(Cell, row)) for row in grid.rows], left, grid.notes, console)


def _print(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    left: Collection[int],
    notes: Sequence[str],
    console: Console,
) -> None:
    """Print a table; in a pipe or file as plain lines of any width, a note on one line."""
    console.print(_plain(title, style="italic"), soft_wrap=True)
    if console.is_terminal:
        drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for place, name in enumerate(header):
            drawn.add_column(_plain(name), justify="left" if place in left else "right", overflow="fold")
        for row in rows:
            drawn.add_row(*(_plain(cell.text, "bold" if cell.bold else "") for cell in row))
        console.print(drawn)
    else:
        lines = [list(map(printable, header)), *([printable(cell.text) for cell in row] for row in rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            blanks = [" " * (width - cell_len(text)) for width, text in zip(widths, line, strict=True)]
            padded = [
                text + blank if place in left else blank + text
                for place, (text, blank) in enumerate(zip(line, blanks, strict=True))
            ]
            console.file.write("  ".join(padded).rstrip() + "\n")
    for note in notes:
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


def fitting(table: Table, width: int) -> list[int]:
    """Places of the columns that fit a terminal `width` wide; the first `_KEPT` are always among them."""
    columns, places = table.columns, list(range(len(table.columns)))
    sizes = [
        max(cell_len(text) for text in (column.short, *(cells[place].text for cells in table.cells))) + _BETWEEN
        for place, column in enumerate(columns)
    ]
    first = [place for name in _LEFT_OUT for place in places if columns[place].short == name]
    for place in [*first, *reversed([place for place in places[_KEPT:] if place not in first])]:
        if sum(sizes[kept] for kept in places) <= width:
            break
        places.remove(place)
    return places
