"""Which of the metrics that runs have the page shows, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

from kvq.results import Record
from kvq.results.metrics import METRICS, Metric, metric_of

_MOST_COLUMNS = 8
SIZES = [metric.name for metric in METRICS.values() if metric.role == "size"]
QUALITY = [metric.name for metric in METRICS.values() if metric.role == "quality"]


def describe(records: Iterable[Record]) -> dict[str, Metric]:
    """Every metric of the records by name: sizes and quality first, in their order, the others with their unit."""
    units: dict[str, str] = {}
    for record in records:
        for name in record.metrics:
            units.setdefault(name, record.units.get(name, "1"))
    first = [name for name in (*SIZES, *QUALITY) if name in units]
    return {name: metric_of(name, units[name]) for name in (*first, *sorted(units.keys() - set(first)))}


def columns(records: Iterable[Record]) -> list[str]:
    """Metrics that a table of one task shows: quality where the task measures it, else the first that it measured."""
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    quality = [name for name in QUALITY if name in names]
    rest = [name for name in names if name not in SIZES and not name.endswith("_se")]
    return (quality or rest)[:_MOST_COLUMNS]
