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
from typing import TYPE_CHECKING

import pandas as pd

from kvq.errors import printable
from kvq.report import command
from kvq.report.command import made_of, noted
from kvq.report.comparisons import read_records
from kvq.report.figures import loss as losses
from kvq.report.figures import perplexity
from kvq.report.figures.cost import search_figure, search_table, searches
from kvq.report.figures.diagnostics import diagnostic_drawings, embedding_drawings, file_name, run_of
from kvq.report.figures.drawing import Drawing, Noted, drawn, write_drawings
from kvq.report.figures.texts import heat_map, needle_grid
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Row, Table, Tables, is_of_texts
from kvq.results import Broken, Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def titled(table: Table) -> str:
    """A figure's title: model and text, and below them the protocol."""
    where = table.title.removesuffix(f" ({table.words})").partition(": ")[2]
    return "\n".join(filter(None, [where, table.about]))


# By name: words, numbers of a table (None: none), the figure, the fewest lines.
_OF_A_TABLE: tuple[tuple[str, str, Callable[[Table], pd.DataFrame | None], Callable[..., Figure], int], ...] = (
    ("pareto", "Loss and bits", losses.pareto_table, losses.pareto_figure, 2),
    ("engines", "Engines' formats beside papers' methods", losses.engines_table, losses.engines_figure, 0),
    ("agreement", "Engine and preset", perplexity.agreement_table, perplexity.agreement_figure, 0),
    ("positions", "Loss by position", perplexity.positions_table, perplexity.positions_figure, 0),
    ("drift", "Distance by tokens written", perplexity.parts_table, perplexity.parts_figure, 0),
    ("turns", "Loss by turn", perplexity.turns_table, perplexity.turns_figure, 0),
)
_TOO_FEW = "dispersion and Δperplexity: {} models with records; a rank correlation needs 3"


def table_drawings(tables: Tables, store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """What tables show as figures. Needles: a heat map. Perplexity: loss against bits, and methods' variants.

    `skipped` takes the reasons of tables whose samples cannot be read; None raises them.

    Raises:
        RecordError: samples that are missing, where `skipped` is None.
    """
    for table in tables.tables:
        if any(row.record.task == "niah" and row.record.status == "done" for row in table.rows):
            make = functools.partial(needle_grid, store=store)
            grid = made_of(table.rows, make, _name, "heat map of needles", noted(skipped))
            if grid is not None:
                yield from drawn(table.slug, grid, heat_map, f"Needles found: {titled(table)}")
        if not is_of_texts(table) or _has_parts(table):  # otherwise no loss over a text's own tokens
            losses_of = functools.partial(_losses, table)
            yield from made_of(table.rows, losses_of, _name, "loss figures", noted(skipped)) or ()


def _has_parts(table: Table) -> bool:
    return table.rows[0].record.task == "drift"


def _name(row: Row) -> str:
    return run_of(row.record)


def _losses(whole: Table, rows: list[Row]) -> list[Drawing]:
    table, where = replace(whole, rows=tuple(rows)), titled(whole)
    found = []
    for stem, words, make, draw, fewest in _OF_A_TABLE:
        numbers = make(table)
        if numbers is not None and len(numbers) >= fewest:
            found.append(Drawing(file_name(f"{stem}-{table.slug}"), numbers, draw, (f"{words}: {where}",)))
    for stem, groups, draw, words in (
        ("measured", losses.families(table), losses.family_figure, " over measured bits"),
        ("variants", losses.variants(table), losses.variants_figure, ""),
    ):
        for name, numbers in groups:
            title = f"Variants of {name}{words}: {where}"
            found.append(Drawing(file_name(f"{stem}-{name}-{table.slug}"), numbers, draw, (title,)))
    return found


def search_drawings(store: Store) -> Iterator[Drawing]:
    """A figure for searches that differ in sampler and seed alone, of two objectives or more."""
    for name, found in searches(store).items():
        objectives = found[0]["settings"]["objectives"]
        numbers = search_table(found)
        if len(objectives) > 1 and not numbers.dropna(subset=objectives).empty:
            title = f"Searches: {' '.join(found[0]['fixed'])}"
            yield Drawing(f"search-{name}", numbers, search_figure, (",".join(objectives), title))


More = Callable[[list[Record]], Iterable[Drawing]]
"""Makes further drawings of records."""


def _drawings(
    store: Store, scanned: tuple[list[Record], list[Broken]], skipped: list[str], more: More | None
) -> Iterator[Drawing]:
    """All figures."""
    yield from embedding_drawings(scanned[0], store, skipped)
    yield from table_drawings(build_tables(store, scanned=scanned), store, skipped)
    yield from diagnostic_drawings(scanned[0], store, skipped)
    yield from search_drawings(store)
    if more is not None:
        what = "published numbers beside it"
        yield from made_of(scanned[0], lambda records: list(more(records)), run_of, what, noted(skipped)) or ()


def main(arguments: Sequence[str] | None = None, more: More | None = None) -> int:
    """Run the command and return its exit status; what cannot be drawn is named, the rest is drawn.

    `more`: makes further drawings of the records.
    """
    out = "folder for the figures (default: figures/ in the results folder)"
    parser = command.parser_of("kvq.papers.figures", __doc__, out)
    return command.run(parser.parse_args(arguments), functools.partial(_draw, more=more))


def _draw(given: argparse.Namespace, more: More | None) -> int:
    store, out = Store(given.results), given.out or given.results / "figures"
    skipped: list[str] = []
    records, broken = scanned = read_records(store)
    command.say_skipped(broken)
    if not records:
        raise command.no_records(store)
    drawings = Noted(_drawings(store, scanned, skipped, more))
    paths = write_drawings(drawings, out, skipped)
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
