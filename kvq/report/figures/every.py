"""Every figure that the records of a results folder allow.

Pareto frontiers, variants of a method, needles found, and the figures of the diagnostic tasks; each as PDF and PNG, its
numbers as CSV.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.errors import printable
from kvq.report import command
from kvq.report.comparisons import by_bits
from kvq.report.figures import loss as losses
from kvq.report.figures.agreement import agreement_figure, agreement_table
from kvq.report.figures.diagnostics import diagnostic_drawings, embedding_drawings, file_name
from kvq.report.figures.drawing import Drawing, cores, write_drawings
from kvq.report.figures.index import Noted
from kvq.report.figures.needles import table_of_panels
from kvq.report.figures.positions import positions_figure, positions_table
from kvq.report.figures.style import style
from kvq.report.isolated import made_of, noted
from kvq.report.judged import read_records
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Row, Table, Tables
from kvq.results import Broken, Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OUTCOMES = ("hit", "wrong_needle", "bit_mixing", "other")


def needle_grid(rows: Sequence[Row], store: Store) -> pd.DataFrame:
    """Outcomes of every run by length (tokens) and depth: one line per cell, shares of its items."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        if row.record.status != "done":
            continue
        samples = [sample for sample in store.samples_of(row.record) if "skipped" not in sample]
        cells = sorted({(sample["length"], sample["depth"]) for sample in samples})
        for length, depth in cells:
            here = [sample["outcome"] for sample in samples if (sample["length"], sample["depth"]) == (length, depth)]
            shares = {outcome: here.count(outcome) / len(here) for outcome in _OUTCOMES}
            lines.append(
                {"method": row.name, "bits": row.bits, "length": length, "depth": depth, "items": len(here)} | shares
            )
    return pd.DataFrame(lines, columns=["method", "bits", "length", "depth", "items", *_OUTCOMES])


def heat_map(grid: pd.DataFrame, title: str) -> Figure:
    """A row of panels per method, a column per width: the share of needles found, depth (top: start) by length."""
    methods, widths = list(dict.fromkeys(grid["method"])), sorted(dict.fromkeys(grid["bits"]), key=by_bits)
    panels = {
        (str(method), str(bits)): cells.pivot(index="depth", columns="length", values="hit")
        for (method, bits), cells in grid.groupby(["method", "bits"], sort=False)
    }
    if len(methods) > 1 and "fp16" in methods:  # it has one number for all widths
        methods.remove("fp16")
        found = float(grid[grid["method"] == "fp16"]["hit"].mean())
        title = f"{title}\nfull precision finds {100 * found:.1f}%"
        widths = [bits for bits in widths if any((method, bits) in panels for method in methods)]
    with style():
        return table_of_panels(panels, methods, widths, title)


def titled(table: Table) -> str:
    """A figure's title: model and text, and below them the protocol."""
    where = table.title.removesuffix(f" ({table.words})").partition(": ")[2]
    return "\n".join(filter(None, [where, table.about]))


_TOO_FEW = "dispersion and Δperplexity: {} models with records; a rank correlation needs 3"


def table_drawings(tables: Tables, store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """What tables show as figures. Needles: a heat map. Perplexity: loss against bits, and methods' variants.

    `skipped` takes the reasons of tables whose samples cannot be read; None raises them.

    Raises:
        RecordError: samples that are missing, where `skipped` is None.
    """
    for table in tables.tables:
        grid = _grid(table, store, skipped) if _is_of_needles(table) else None
        if grid is not None and not grid.empty:
            yield Drawing(table.slug, grid, heat_map, (f"Needles found: {titled(table)}",))
        yield from made_of(table.rows, _made_losses(table), _name, "loss figures", noted(skipped)) or ()


def _grid(table: Table, store: Store, skipped: list[str] | None) -> pd.DataFrame | None:
    return made_of(
        table.rows, functools.partial(needle_grid, store=store), _name, "heat map of needles", noted(skipped)
    )


def _made_losses(table: Table) -> Callable[[list[Row]], list[Drawing]]:
    return lambda rows: list(_losses(replace(table, rows=tuple(rows))))


def _name(row: Row) -> str:
    return _run(row.record)


def _run(record: Record) -> str:
    return f"run {record.key[:12]}"


def _losses(table: Table) -> Iterator[Drawing]:
    numbers = losses.pareto_table(table)
    if len(numbers) > 1:
        title = f"Loss and bits: {titled(table)}"
        yield Drawing(file_name(f"pareto-{table.slug}"), numbers, losses.pareto_figure, (title,))
    if (engines := losses.engines_table(table)) is not None:
        title = f"Engines' formats beside papers' methods: {titled(table)}"
        yield Drawing(file_name(f"engines-{table.slug}"), engines, losses.engines_figure, (title,))
    if (beside := agreement_table(table)) is not None:
        title = f"Engine and preset: {titled(table)}"
        yield Drawing(file_name(f"agreement-{table.slug}"), beside, agreement_figure, (title,))
    if (places := positions_table(table)) is not None:
        title = f"Loss by position: {titled(table)}"
        yield Drawing(file_name(f"positions-{table.slug}"), places, positions_figure, (title,))
    for name, numbers in losses.families(table):
        title = f"Variants of {name} over measured bits: {titled(table)}"
        yield Drawing(file_name(f"measured-{name}-{table.slug}"), numbers, losses.family_figure, (title,))
    for name, bars in losses.variants(table):
        title = f"Variants of {name}: {titled(table)}"
        yield Drawing(file_name(f"variants-{name}-{table.slug}"), bars, losses.variants_figure, (title,))


def _is_of_needles(table: Table) -> bool:
    return any(row.record.task == "niah" and row.record.status == "done" for row in table.rows)


More = Callable[[list[Record]], Iterable[Drawing]]
"""Makes further drawings of records."""


def _drawings(
    store: Store, scanned: tuple[list[Record], list[Broken]], skipped: list[str], more: More | None
) -> Iterator[Drawing]:
    """All figures; t-SNE first, because it takes longest and runs in another process while tables are made."""
    yield from embedding_drawings(scanned[0], store, skipped)
    yield from table_drawings(build_tables(store, scanned=scanned), store, skipped)
    yield from diagnostic_drawings(scanned[0], store, skipped)
    if more is not None:
        what = "published numbers beside it"
        yield from made_of(scanned[0], lambda records: list(more(records)), _run, what, noted(skipped)) or ()


def main(arguments: Sequence[str] | None = None, more: More | None = None) -> int:
    """Run the command and return its exit status; what cannot be drawn is named, the rest is drawn.

    `more`: makes further drawings of the records.
    """
    out = "folder for the figures (default: figures/ in the results folder)"
    parser = command.parser_of("kvq.papers.figures", __doc__, out)
    parser.add_argument(
        "--jobs", type=int, default=1 if arguments else cores(), help="processes that draw (default: one for each core)"
    )
    return command.run(parser.parse_args(arguments), functools.partial(_draw, more=more))


def _draw(given: argparse.Namespace, more: More | None) -> int:
    store, out = Store(given.results), given.out or given.results / "figures"
    skipped: list[str] = []
    records, broken = scanned = read_records(store)
    command.say_skipped(broken)
    if not records:
        raise command.no_records(store)
    drawings = Noted(_drawings(store, scanned, skipped, more))
    paths = write_drawings(drawings, out, given.jobs, skipped)
    paths.append(drawings.write(out))
    for path in paths:
        print(path)
    for path in paths:
        if path.name == "dispersion-spearman.csv":
            found = pd.read_csv(path)
            known = found[found["rho"].notna()]
            print(known.to_string(index=False) if len(known) else _TOO_FEW.format(found["n"].max()))
    for reason in skipped:
        print(printable(f"skipped: {reason}"), file=sys.stderr)
    return 1 if skipped else 0
