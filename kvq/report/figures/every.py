"""`python -m kvq.report.figures.every`: every figure that records allow, by modules here and of plugins.

What fails is skipped.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.figures.every")

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from kvq.config import plugins
from kvq.errors import printable
from kvq.report import command
from kvq.report.comparisons import read_records
from kvq.report.figures import distribution, error, loss, over_models
from kvq.report.figures.drawing import KINDS, Drawing, Kind, write_drawings
from kvq.report.labels import label, model_name, named
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Table
from kvq.results import Record, Store, is_stale, run_key
from kvq.results.presets import PROTOCOL, departures_of

MODULES = (loss, over_models, error, distribution)
WORDS: dict[str, Callable[[Record], object]] = {
    "run": named,
    "where": lambda record: (
        f"{model_name(record.model)}, {record.dataset}"
        + (f" ({', '.join(words)})" if (words := departures_of(record).protocol) else "")
    ),
    "model": lambda record: model_name(record.model),
    "machine": lambda record: record.config.get("machine"),
    "states": lambda record: error.name_states(record.config["task"]),
    "block": lambda r: ", ".join([f"{model_name(r.model)}, {r.dataset}", *error.name_rival(r.config["task"])]),
}


def kinds() -> list[Kind]:
    """Every kind of figure, those of plugins too."""
    plugins.import_modules("figures")
    return KINDS


def stems() -> tuple[str, ...]:
    """How the names of figures' files begin: one text for each kind, those of plugins too."""
    return tuple(kind.name for kind in kinds())


def drawings(
    records: Iterable[Record], store: Store, tables: Sequence[Table] = (), skipped: list[str] | None = None
) -> Iterator[Drawing]:
    """Every figure of records and tables of runs; `skipped` takes those that cannot be made (None: raised)."""
    done = [record for record in records if record.status == "done" and not is_stale(record)]
    groups: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(done, key=lambda r: (r.model, r.dataset, label(r), r.bits, r.key)):
        groups[record.task][_hash_protocol(record)].append(record)
    for kind in kinds():
        if kind.of == "table":
            made: Iterable[Iterator[Drawing]] = (_draw_table(kind, table, store) for table in tables)
        elif kind.of == "records":
            made = [_make_drawings(kind, done, store, "", {})]
        else:
            ends = {key: f"-{first.model}-{first.dataset}-{key[:6]}" for key, (first, *_) in groups[kind.task].items()}
            made = (_draw_group(kind, group, store, ends[key]) for key, group in groups[kind.task].items())
        for drawn in made:
            try:
                yield from drawn
            except Exception as error:  # of settings or samples that no run has
                if skipped is None:
                    raise
                skipped.append(f"figure {kind.name}: {command.line(error)}")


def _draw_table(kind: Kind, table: Table, store: Store) -> Iterator[Drawing]:
    """The figures of a kind from a table: of its task's done rows, or of all rows where the kind names no task."""
    where = table.title.removesuffix(f" ({table.words})").partition(": ")[2]
    words = {"where": "\n".join(filter(None, [where, table.about]))}
    rows = tuple(row for row in table.rows if not row.stale)
    if kind.task:
        rows = tuple(row for row in rows if (row.record.task, row.record.status) == (kind.task, "done"))
    if rows:
        end = f"-{table.slug.removeprefix(f'{kind.stem}-')}"
        yield from _make_drawings(kind, replace(table, rows=rows), store, end, words)


def _draw_group(kind: Kind, group: Sequence[Record], store: Store, end: str) -> Iterator[Drawing]:
    """The figures of runs of one task and protocol."""
    runs = [record for record in group if record.baseline_key is not None]
    if kind.of in ("first", "each"):
        for record in group[:1] if kind.of == "first" else runs:
            yield from _make_drawings(kind, record, store, end, _fill_words(kind, record))
    elif chosen := group if kind.of == "all" else runs:
        yield from _make_drawings(kind, list(chosen), store, end, _fill_words(kind, group[0]))


def _make_drawings(kind: Kind, of: Any, store: Store, end: str, words: Mapping[str, object]) -> Iterator[Drawing]:
    """The drawings of the numbers of a table, runs or a run; none of empty ones."""
    numbers = kind.numbers(of, store)
    parts = numbers if isinstance(numbers, Mapping) else {("", ""): numbers}
    for (name, what), table in parts.items():
        if table is not None and not table.empty:
            here = {**words, "name": name, "what": what, "layer": table["layer"].min() if "layer" in table else None}
            yield Drawing(file_name(kind.stem.format_map(here) + end), kind.title.format_map(here), table, kind)


def _fill_words(kind: Kind, record: Record) -> dict[str, object]:
    """What stands for a run in the name and the title of a figure."""
    return {name: say(record) for name, say in WORDS.items() if f"{{{name}}}" in kind.stem + kind.title}


def _hash_protocol(record: Record) -> str:
    """A hash of the settings that the runs of a figure share; known states are named by their fingerprint."""
    parts = {name: record.config.get(name) for name in PROTOCOL}
    if record.task in ("random_states", "model_states"):
        parts["dataset"] = {**(parts["dataset"] or {}), "fingerprint": record.dataset}
    return run_key(parts)


def file_name(stem: str) -> str:
    """A figure's name as a file's: no separator of folders, no leading dot, whatever a record holds."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", stem).lstrip(".")
    # The end of a stem tells protocols apart.
    return name if len(name) <= 200 else f"{name[:120]}_{name[-79:]}"


def run_figures(record: Record, store: Store) -> list[tuple[str, Figure]]:
    """Figures of a run that is done, each with a name, for W&B."""
    if record.status != "done":
        return []
    # Names without the run's label, so that W&B shows the same figure of several runs side by side.
    own = [kind for kind in kinds() if kind.task == record.task and kind.of != "table"]
    made = ((kind, one) for kind in own for one in _draw_group(kind, [record], store, ""))
    return [(kind.stem.removesuffix("-{run}"), one.figure()) for kind, one in made]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; what cannot be drawn is named, the rest is drawn."""
    out = "folder for the figures (default: figures/ in the results folder)"
    return command.run(command.parser_of("kvq.report.figures.every", __doc__, out).parse_args(arguments), _run_command)


def _run_command(given: argparse.Namespace) -> int:
    """Draw every figure of a results folder and name what cannot be drawn; 1 where there is some; `given`: options."""
    store, skipped = Store(given.results), list[str]()
    records, broken = scanned = read_records(store)
    command.say_skipped(broken)
    if not records:
        raise command.no_records(store)
    made = drawings(records, store, build_tables(store, scanned=scanned).tables, skipped)
    for path in write_drawings(made, given.out or given.results / "figures", skipped):
        print(path)
    for reason in skipped:
        print(printable(f"skipped: {reason}"), file=sys.stderr)
    return 1 if skipped else 0
