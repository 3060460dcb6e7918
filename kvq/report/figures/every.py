"""Every figure that the records of a results folder allow.

Pareto frontiers, variants of a method, needles found, and the figures of the diagnostic tasks; each as PDF and PNG, its
numbers as CSV.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from kvq.errors import RecordError, printable
from kvq.report import command
from kvq.report.command import made_of, noted
from kvq.report.comparisons import read_records
from kvq.report.figures import cost, distribution, norms, over_models, perplexity, texts
from kvq.report.figures import error as errors
from kvq.report.figures import loss as losses
from kvq.report.figures.drawing import Drawing, Noted, drawn, write_drawings
from kvq.report.figures.texts import heat_map, needle_grid
from kvq.report.labels import label, model_name, named, protocol_departures
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Row, Table, Tables, is_of_texts
from kvq.results import Broken, Record, Store, run_key
from kvq.results.presets import PROTOCOL, part_of

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
            grid = made_of(table.rows, make, _run_of_row, "heat map of needles", noted(skipped))
            if grid is not None:
                yield from drawn(table.slug, grid, heat_map, f"Needles found: {titled(table)}")
        if not is_of_texts(table) or table.rows[0].record.task == "drift":  # otherwise no loss over a text's own tokens
            losses_of = functools.partial(_losses, table)
            yield from made_of(table.rows, losses_of, _run_of_row, "loss figures", noted(skipped)) or ()


def _run_of_row(row: Row) -> str:
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


_KNOWN_STATES = ("random_states", "model_states")

Maker = Callable[[Sequence[Record], Store], Iterable[Drawing]]


def diagnostic_drawings(records: Iterable[Record], store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """Every figure of the diagnostic tasks that records allow.

    `skipped` takes the reasons of runs whose samples cannot be read; None raises them.

    Raises:
        RecordError: samples that are missing, where `skipped` is None.
    """
    done = [record for record in records if record.status == "done"]
    for task in CHARTS:
        make: Maker = functools.partial(_charts_of, task)
        own = sorted((r for r in done if r.task == task), key=lambda r: (r.model, r.dataset, label(r), r.bits, r.key))
        for group in _grouped(own, _protocol).values():
            for made in _sound(group, make, store, f"figures of task={task}", skipped):
                first = group[0]
                stem = f"{made.stem}-{first.model}-{first.dataset}-{_protocol(first)[:6]}"
                yield replace(made, stem=file_name(stem))
    for group in _grouped(done, _shift_group).values():
        yield from _sound(group, _shifts, store, "shifts", skipped)
    yield from _sound(done, _stand_ins, store, "stand-ins", skipped)
    yield from _sound(done, _dispersions, store, "dispersion", skipped)


def _sound(group: Sequence[Record], make: Maker, store: Store, what: str, skipped: list[str] | None) -> list[Drawing]:
    """Drawings of the records that allow them."""
    return made_of(group, lambda sound: list(make(sound, store)), run_of, what, noted(skipped)) or []


def run_of(record: Record) -> str:
    """How a message names a run that cannot be drawn."""
    return f"run {record.key[:12]}"


def file_name(stem: str) -> str:
    """A figure's name as a file's: no separator of folders, no leading dot, whatever a record holds."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", stem).lstrip(".")
    # The end of a stem tells protocols apart.
    return name if len(name) <= 200 else f"{name[:120]}_{name[-79:]}"


def _grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return groups


def _shift_group(record: Record) -> str:
    return run_key({name: record.config.get(name) for name in ("task", "model", "seed")})


def _shifts(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    """A figure of a model whose calibrated methods were tested on another text."""
    first = group[0]
    scoring = part_of(first.config, "task").get("scoring")
    protocol = ", scoring ".join(filter(None, [model_name(first.model), scoring and str(scoring)]))
    stem = file_name(f"calibration-shift-{first.model}-{_shift_group(first)[:6]}")
    title = f"Calibrated on another text (hollow): {protocol}"
    return drawn(stem, perplexity.shift_table(group, store), perplexity.shift_figure, title)


def _stand_ins(group: Sequence[Record], _: Store) -> Iterable[Drawing]:
    title = "Losses on a real model and on the embedded ones: one mark per method and bits"
    return drawn("stand-ins", over_models.stand_in_table(group), over_models.stand_in_figure, title)


def _dispersions(group: Sequence[Record], _: Store) -> Iterable[Drawing]:
    table = over_models.dispersion_table(group)
    if not table.empty:
        yield Drawing("dispersion-pairs", table, None)
        yield Drawing("dispersion-spearman", over_models.dispersion_correlations(table), None)
        for stem, title, numbers in over_models.scatters(table):
            yield Drawing(file_name(stem), numbers, over_models.scatter_figure, (title,))


def _protocol(record: Record) -> str:
    """A hash of the settings that the runs of a figure share.

    Known states are compared with another method at the run's own bits, which their fingerprint names.
    """
    parts = {name: record.config.get(name) for name in PROTOCOL}
    if record.task in _KNOWN_STATES:
        parts["dataset"] = {**(parts["dataset"] or {}), "fingerprint": record.dataset}
    return run_key(parts)


class Chart(BaseModel):
    """A figure of the runs of a task, as `charts.yaml` declares it and says what the fields mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    figure: str
    table: str | None = None
    of: Literal["runs", "all", "first", "each"] = "runs"
    column: str | None = None
    also: str | None = None

    @property
    def draw(self) -> Callable[..., Figure]:
        """Makes the figure of its numbers and the title."""
        module, name = self.figure.split(".")
        found: Callable[..., Figure] = getattr(_MODULES[module], f"{name}_figure")
        return found

    def numbers(self, runs: Any, store: Store) -> pd.DataFrame:
        """Its numbers, of the runs or the run that it is of; empty without its column."""
        module, name = (self.table or self.figure).split(".")
        found: pd.DataFrame = getattr(_MODULES[module], f"{name}_table")(runs, store)
        return found if self.column is None or self.column in found else pd.DataFrame()


_MODULES = {each.__name__.rpartition(".")[2]: each for each in (cost, distribution, errors, norms, perplexity, texts)}
CHARTS = TypeAdapter(dict[str, dict[str, Chart]]).validate_python(
    yaml.safe_load((Path(__file__).parent / "charts.yaml").read_text(encoding="utf-8"))
)
"""The figures of each task, by the names of their files."""


def _where(record: Record) -> str:
    words = ", ".join(protocol_departures(record))
    return f"{model_name(record.model)}, {record.dataset}{f' ({words})' if words else ''}"


# What stands in a title for a run.
_WORDS: dict[str, Callable[[Record], object]] = {
    "run": named,
    "where": _where,
    "model": lambda record: model_name(record.model),
    "machine": lambda record: record.config.get("machine"),
    "states": lambda record: errors.states_of(record.config["task"]),
    "block": lambda r: ", ".join([f"{model_name(r.model)}, {r.dataset}", *errors.compared_with(r.config["task"])]),
    "sinks": lambda record: "with" if record.config["task"].get("sink_outliers") else "without",
}


def _charts_of(task: str, group: Sequence[Record], store: Store) -> Iterator[Drawing]:
    """The figures of runs of one task and protocol; none of empty numbers."""
    runs = [record for record in group if record.baseline_key is not None]
    wanted: dict[str, Sequence[Any]] = {"runs": [runs], "all": [group], "first": group[:1], "each": runs}
    known: dict[tuple[str | int | None, ...], pd.DataFrame] = {}  # several figures may show the same numbers
    for stem, chart in CHARTS.get(task, {}).items():
        for place, own in enumerate(wanted[chart.of]):
            numbers = (chart.table or chart.figure, chart.column, chart.of, place)
            if numbers not in known:
                known[numbers] = chart.numbers(own, store)
            record, table = own if isinstance(own, Record) else group[0], known[numbers]
            if table.empty:
                continue
            words = {name: say(record) for name, say in _WORDS.items() if f"{{{name}}}" in stem + chart.title}
            words["layer"] = table["layer"].min() if "layer" in table else None
            more: list[str | pd.DataFrame] = [] if chart.column is None else [chart.column]
            more += [] if chart.also is None else [errors.rows_of(record, store, chart.also)]
            arguments = (*more, chart.title.format_map(words))
            yield Drawing(stem.format_map(words), table, chart.draw, arguments)


def embedding_drawings(records: Iterable[Record], store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """t-SNE of the tokens that `task=distribution` kept, a figure for every model with two corpora or more.

    `skipped` takes the reasons of runs that it cannot be made of; None raises them.

    Raises:
        RecordError: samples that are missing.
    """
    done = (record for record in records if record.task == "distribution" and record.status == "done")
    groups = _grouped(done, lambda r: run_key({"model": r.config.get("model"), "task": r.config.get("task")}))
    for name, group in groups.items():
        if len({r.dataset for r in group}) < 2:
            continue
        vectors = functools.partial(distribution.kept_vectors, store=store)
        kept = made_of(group, vectors, run_of, "embedding", noted(skipped))
        if kept is not None and not kept.empty:
            title = f"Tokens of {model_name(group[0].model)}, layer {kept['layer'].iloc[0]}, one head"
            stem = file_name(f"distribution-tsne-{group[0].model}-{name[:6]}")
            yield Drawing(stem, kept, distribution.embedding_figure, (title,), distribution.embedding_table)


def run_figures(record: Record, store: Store) -> list[tuple[str, Figure]]:
    """Figures of a run that is done, each with a name, for W&B; none where its samples cannot be read."""
    if record.status != "done":
        return []
    title = f"{named(record)}: {model_name(record.model)}, {record.dataset}"
    try:
        if record.task == "ppl":
            table, draw, name = perplexity.windows_table(record, store), perplexity.windows_figure, "windows"
        elif record.task == "niah":
            table, draw, name = needle_grid([Row(record, label(record), record.bits)], store), heat_map, "needles"
        else:
            made = _charts_of(record.task, [record], store)
            # Names without the run's label, so that W&B shows the same figure of several runs side by side.
            figures = [(drawing.stem.removesuffix(f"-{named(record)}"), drawing.figure()) for drawing in made]
            return [(name, figure) for name, figure in figures if figure is not None]
        return [] if table.empty else [(name, draw(table, title))]
    except (RecordError, KeyError):
        return []


def search_drawings(store: Store) -> Iterator[Drawing]:
    """A figure for searches that differ only in sampler and seed, of two objectives or more."""
    for name, found in cost.searches(store).items():
        objectives = found[0]["settings"]["objectives"]
        numbers = cost.search_table(found)
        if len(objectives) > 1 and not numbers.dropna(subset=objectives).empty:
            words = (",".join(objectives), cost.search_title(found[0]))
            yield Drawing(f"search-{name}", numbers, cost.search_figure, words)


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
