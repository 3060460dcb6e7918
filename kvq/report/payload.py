"""The page's data: what rows and points show, and every record, whose text never becomes markup, script or a link."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from kvq.config import plugins
from kvq.report.labels import by_bits, colour_of, model_name
from kvq.report.tables.formats import one_line
from kvq.report.tables.layout import Row, Tables
from kvq.results import Record
from kvq.results.metrics import METRICS, Metric, metric_of

ARXIV = re.compile(r"\d{4}\.\d{4,5}\Z")
# Inside a script element these could end it or begin another; in JSON their escapes mean the same.
_MARKUP = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def script_json(value: Any) -> Markup:
    """`value` as JSON that is safe between `<script type="application/json">` and its end, in ASCII."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_MARKUP))


def shown(text: str, longest: int = 300) -> str:
    """`text` on one line without control characters or marks that change the direction of writing, cut to `longest`."""
    line = one_line(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


# Limits of what the page has of a record, in characters of JSON and in metrics; the page names what it leaves out.
LONGEST_PART = 32 * 1024
MOST_METRICS = 200
_OF_A_RUN = ("started", "wall_seconds", "peak_memory_bytes")
_APART = {"key", "metrics", "config", "provenance"}
"""Fields of a record that the page has of a run itself, or part by part."""


class Pool:
    """Values that many records share, each kept once, by the order in which they came."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """Add a JSON value and return its index; one longer than `LONGEST_PART` becomes a sentence that says so."""
        text = json.dumps(value, sort_keys=True)
        if len(text) > LONGEST_PART:
            value = f"left out: {len(text) / 1024:.0f} KiB; the record has it"
            text = json.dumps(value)
        if text not in self._places:
            self._places[text] = len(self.values)
            self.values.append(value)
        return self._places[text]

    def add_parts(self, value: Mapping[str, Any]) -> dict[str, int]:
        """Add the parts of a mapping and return their indices by name."""
        return {shown(str(name)): self.add(part) for name, part in value.items()}


def payload(tables: Tables, main: str | None = None) -> dict[str, Any]:
    """Everything the page's script reads.

    `runs` have what rows show; `pool` the parts of their records, which `record` of a run names by place.
    Protocols of the model `main` are `main`.
    """
    rows = [(place, row) for place, table in enumerate(tables.tables) for row in table.rows]
    records = [row.record for _, row in rows]
    known, pool = papers(), Pool()
    tasks: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        tasks[record.task].append(record)
    metrics = describe(records)
    kept = set(list(metrics)[:MOST_METRICS])
    return {
        "tasks": [
            {"name": shown(task), "runs": len(found), "columns": [name for name in columns(found) if name in kept]}
            for task, found in sorted(tasks.items(), key=lambda item: (-len(item[1]), item[0]))
        ],
        "metrics": {
            name: {**metric._asdict(), "title": shown(metric.title, 80), "short": shown(metric.short, 40)}
            for name, metric in metrics.items()
            if name in kept
        },
        "methods": _methods(records, known),
        "protocols": [
            {
                "slug": table.slug,
                "main": any(model_name(row.record.model) == main for row in table.rows),
                "title": shown(table.title),
                "words": shown(table.words),
                "lines": [shown(line, 2000) for line in table.protocol],
            }
            for table in tables.tables
        ],
        "runs": [_run(place, row, pool, metrics) for place, row in rows],
        "pool": pool.values,
    }


def _methods(records: Sequence[Record], known: Mapping[str, Paper]) -> dict[str, Any]:
    """Methods with their colours and papers; those of most runs first."""
    counts = Counter(record.method for record in records)
    found = {}
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        paper = known.get(name, Paper())
        label = paper.label or name
        found[shown(name)] = {
            "label": shown(label),
            "colour": colour_of(name),
            "arxiv": paper.arxiv,
            "link": f"https://arxiv.org/abs/{paper.arxiv}" if paper.arxiv else None,
            "paper": shown(f"arXiv {paper.arxiv}" if paper.arxiv else "no paper"),
        }
    return found


def _run(place: int, row: Row, pool: Pool, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    record = row.record
    names = shown_metrics(record, metrics)[:MOST_METRICS]
    bits = by_bits(record.bits)[0]
    run = {
        "key": record.key,
        "status": record.status,
        "reason": shown(record.reason or "", 1000),
        "task": shown(record.task),
        "model": shown(model_name(record.model)),
        "dataset": shown(record.dataset),
        "method": shown(record.method),
        "name": shown(row.name),
        "bits": shown(row.bits),
        "order": None if bits == float("inf") else bits,
        "protocol": place,
        "baseline": row.baseline,
        "best": row.best,
        "noise": row.within_noise,
        "variant": row.variant,
        "unquantized": row.unquantized,
        "stale": row.stale,
        "started": record.provenance.started.isoformat().replace("+00:00", "Z"),
        "names": pool.add(names),
        "values": [record.metrics[name] for name in names],
        "record": _whole(record, pool),
    }
    if row.p_value is not None:
        run["p"] = row.p_value
    return run


def _whole(record: Record, pool: Pool) -> dict[str, Any]:
    """The parts of a record that `_run` leaves out, by their indices in the pool."""
    provenance = record.provenance.model_dump(mode="json", exclude_unset=True)  # as it stands in the file
    return {
        "config": pool.add_parts(record.config),
        "provenance": pool.add_parts({name: part for name, part in provenance.items() if name not in _OF_A_RUN}),
        "own": {name: provenance[name] for name in _OF_A_RUN},
        "fields": pool.add_parts(record.model_dump(mode="json", exclude=_APART, exclude_unset=True)),
        "left_out": max(len(record.metrics) - MOST_METRICS, 0),
    }


_MOST_COLUMNS = 8
SIZES = [metric.name for metric in METRICS.values() if metric.role == "size"]
QUALITY = [metric.name for metric in METRICS.values() if metric.role == "quality"]


def describe(records: Iterable[Record]) -> dict[str, Metric]:
    """Every metric of the records by name: sizes and quality first, in their order, the others with their unit.

    The unit is that of the first record; `shown_metrics` leaves out what others give in another.
    """
    units: dict[str, str | None] = {}
    for record in records:
        for name in record.metrics:
            units[name] = units.get(name) or record.units.get(name)
    first = [name for name in (*SIZES, *QUALITY) if name in units]
    return {name: metric_of(name, units[name]) for name in (*first, *sorted(units.keys() - set(first)))}


def shown_metrics(record: Record, metrics: Mapping[str, Metric]) -> list[str]:
    """Names of a record's metrics that are in the unit under which the page shows them."""
    return [name for name in record.metrics if record.units.get(name, metrics[name].unit) == metrics[name].unit]


def columns(records: Iterable[Record]) -> list[str]:
    """Metrics that a table of one task shows: quality where the task measures it, else the first that it measured."""
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    quality = [name for name in QUALITY if name in names]
    rest = [name for name in names if name not in SIZES and not name.endswith("_se")]
    return (quality or rest)[:_MOST_COLUMNS]


class Paper(NamedTuple):
    """The name a method has in tables and the arXiv number of its paper (nothing else becomes a link), if known."""

    label: str | None = None
    arxiv: str | None = None


def papers() -> dict[str, Paper]:
    """Method -> its paper. A preset (`oscar/cr_only`) has its own label and the paper of what it is a preset of."""
    found: dict[str, Paper] = {}
    methods = (choice for choice in plugins.all_choices() if choice.group == "method")
    for choice in sorted(methods, key=lambda choice: choice.name.count("/")):
        given, base = choice.read(), found.get(choice.name.partition("/")[0], Paper())
        label, number = given.get("label"), given.get("arxiv", base.arxiv)
        found[choice.name] = Paper(
            label if isinstance(label, str) else base.label,
            number if isinstance(number, str) and ARXIV.match(number) else None,
        )
    return found
