"""Which of the metrics that runs have the page shows, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvq.results import Record
from kvq.results.metrics import METRICS, Metric, metric_of

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
