"""Tables on a terminal: colours and rules there, plain text in a pipe or a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from kvq.errors import printable
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import Sheet
from kvq.report.tables.layout import Cell, Column, Table, Texts, columns_of, is_of_diagnostics, measured
from kvq.results import Record, Store

# Characters a line in a file or pipe, where rich would take 80.
PLAIN_WIDTH = 100
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
    """Print the tables of a store, or of the runs `keys` and their full-precision runs; fits 80 columns.

    Raises:
        RecordError: the folder of the store cannot be listed.
    """
    for table in build_tables(store, keys=keys, stale=stale).tables:
        print_table(table, console)


def print_table(table: Table, console: Console) -> None:
    """Print one table with its notes; where there is no terminal, a note is one line."""
    drawn = _empty(console)
    left_out: list[str] = []
    if is_of_diagnostics(table) and not table.is_of_memory:
        _fill_sideways(drawn, table)
    else:
        columns = fitting(table, console.width)
        shown = {column.title for column in columns}
        left_out = [column.title for column in columns_of(table) if column.title not in shown]
        _fill(drawn, table, columns)
    _print(table.title, drawn, table.notes, console, left_out)
    if table.texts is not None:
        _print_texts(table.texts, console)


def _print(title: str, drawn: RichTable, notes: Sequence[str], console: Console, left_out: Sequence[str] = ()) -> None:
    console.print(_plain(title, style="italic"), soft_wrap=True)
    console.print(drawn)
    if left_out:
        console.print(_plain(f"Not shown at this width: {', '.join(left_out)}.", style="dim"))
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


def _empty(console: Console) -> RichTable:
    """A table without columns, plain and as wide as a line of a file where there is no terminal."""
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    rules = box.SIMPLE_HEAD if console.is_terminal else None
    return RichTable(box=rules, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _fill(drawn: RichTable, table: Table, columns: Sequence[Column]) -> None:
    for column in columns:
        numeric = column.numeric
        justify: Literal["left", "right"] = "right" if numeric else "left"
        drawn.add_column(_plain(column.short), justify=justify, overflow="fold", no_wrap=numeric)
    for row in table.lines:
        drawn.add_row(*(_text(column.cell(row)) for column in columns))


def fitting(table: Table, width: int) -> tuple[Column, ...]:
    """The columns that fit a terminal `width` wide; method, bits and the task's own number are always among them."""
    columns = list(columns_of(table))
    sizes = {
        column.short: max(cell_len(text) for text in (column.short, *(column.cell(row).text for row in table.lines)))
        for column in columns
    }
    first = [column for name in _LEFT_OUT for column in columns if column.short == name]
    for column in [*first, *reversed([column for column in columns[_KEPT:] if column not in first])]:
        if sum(sizes[kept.short] + _BETWEEN for kept in columns) <= width:
            break
        columns.remove(column)
    return tuple(columns)


def _fill_sideways(drawn: RichTable, table: Table) -> None:
    """A row for each metric and a column for each run: diagnostics have many metrics and few runs."""
    drawn.add_column("Metric", overflow="fold")
    for row in table.rows:
        drawn.add_column(_plain(f"{row.name}\n{row.bits}"), justify="right")
    for column in measured(table):
        drawn.add_row(_plain(column.title), *(_text(column.cell(row)) for row in table.rows))


def print_grid(grid: Sheet, console: Console) -> None:
    """Print a table of an experiment with its notes."""
    drawn = _empty(console)
    for index, name in enumerate(grid.header):
        drawn.add_column(_plain(name), justify="left" if grid.is_left(index) else "right", overflow="fold")
    for row in grid.rows:
        drawn.add_row(*(_plain(cell) for cell in row))
    _print(grid.title, drawn, grid.notes, console)


def _text(cell: Cell) -> RichText:
    return _plain(cell.text, style="bold" if cell.bold else "")
