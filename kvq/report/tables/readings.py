"""What a cell reads: a metric of a record, a number that follows from others, a statistic of all its records."""

from __future__ import annotations

import csv
import fnmatch
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import scipy  # `scipy.stats` loads when it is first asked for

from kvq.errors import RecordError, reason_of
from kvq.results import Record
from kvq.results.statistics import spearman

FILE = "paper_results.csv"
_PARTS = "mean over parts of "
_FOLLOWING: dict[str, Callable[[float], float | None]] = {
    "milliseconds of ": lambda seconds: 1000 * seconds,
    "overhead in percent of ": lambda ratio: 100 * (ratio - 1),
    "percent of ": lambda share: 100 * share,
    "factor of ": lambda share: 1 / (1 - share) if share < 1 else None,
}
Known = Mapping[str, Record]
"""Records by key, among them those of full precision."""


class Published(NamedTuple):
    """One number of a paper. `avg_bits` as printed; `note`: ours; begins with "approximate" where its paper is."""

    paper: str
    table: str
    model: str
    method: str
    avg_bits: str
    setting: str
    dataset: str
    metric: str
    value: float
    note: str


def reference_path() -> Path:
    """Path of the published figures: results/reference in a checkout, in the package when installed from a wheel."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "reference" / FILE
    return inside if inside.is_file() else package.parent / "results" / "reference" / FILE


class Reference:
    """The published figures by paper and table."""

    def __init__(self, rows: Sequence[Published]) -> None:
        self.tables: dict[tuple[str, str], list[Published]] = defaultdict(list)
        self._by_labels: dict[Any, defaultdict[tuple[str, ...], list[Published]]] = {}
        for row in rows:
            self.tables[row.paper, row.table].append(row)

    def find(self, paper: str, table: str | None, labels: Mapping[str, str]) -> Published | None:
        """The one number with these labels, whatever its labels on other axes; None where the table has none."""
        key = (paper, table or "", tuple(labels))
        if key not in self._by_labels:
            rows = self._by_labels[key] = defaultdict(list)
            for row in self.tables.get(key[:2], []):
                rows[tuple(getattr(row, axis) for axis in labels)].append(row)
        found = self._by_labels[key].get(tuple(labels.values()), [])
        if len(found) > 1:
            raise RecordError(f"{paper}, {table}: {len(found)} published figures have the labels {dict(labels)}")
        return found[0] if found else None


def read_reference(path: Path | None = None) -> Reference:
    """The published figures of a CSV file (None: that of `reference_path`). Raises: RecordError: it cannot be read."""
    path = path or reference_path()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = [[line[name] for name in Published._fields] for line in csv.DictReader(file)]
        return Reference([Published._make((*about, float(value), note)) for *about, value, note in lines])
    except (OSError, KeyError, ValueError) as error:
        raise RecordError(f"published figures: cannot read '{path}': {reason_of(error)}") from error


def read_metric(record: Record, metric: str) -> float | None:
    """A metric of a record, or one that follows from others (`*`: where just one fits); None: it has none."""
    metrics = record.metrics
    if "*" in metric:
        found = fnmatch.filter(metrics, metric.rpartition(" of ")[2])
        metric = metric.replace(metric.rpartition(" of ")[2], found[0]) if len(found) == 1 else metric
    if not metric:
        return next((metrics[name] for name in ("score", "accuracy", "perplexity") if name in metrics), None)
    if metric in metrics:
        return metrics[metric]
    if (share := metrics.get(metric.removeprefix("items with "))) is not None and "items" in metrics:
        return share * metrics["items"]
    if metric == "delta_perplexity_percent" and {"perplexity", "delta_perplexity"} <= metrics.keys():
        return 100 * metrics["delta_perplexity"] / (metrics["perplexity"] - metrics["delta_perplexity"])
    for prefix, compute in _FOLLOWING.items():
        if (value := metrics.get(metric.removeprefix(prefix))) is not None:
            return compute(value)
    if metric.startswith(_PARTS):
        parts = [value for name, value in metrics.items() if name.startswith(f"{metric.removeprefix(_PARTS)}[")]
        return statistics.fmean(parts) if parts else None
    return None


def read_statistic(records: Sequence[Record], metric: str, known: Known) -> tuple[bool, float | None]:
    """Whether a metric's name is a statistic over a cell's records, and its value (None: they do not give it).

    - `median of M`; `models above X of M`, `models below X of M`: how many
    - `mean reduction in percent of M`: mean over models of how much less a model's first run has than its second
    - `change of M`: the mean difference to full precision
    - `spearman of M and N`, `p of spearman of M and N`: over models, each metric of any run of a model
    - `fisher p of M`: Fisher's exact test of all items with M against those of full precision, two-sided
    """
    for pattern, compute in _STATISTICS:
        if found := re.fullmatch(pattern, metric):
            try:
                return True, compute(records, known, *found.groups())
            except _MissingError:
                return True, None
    return False, None


class _MissingError(Exception):
    """A record that a statistic needs has no such metric."""


def _values(records: Sequence[Record | None], metric: str) -> list[float]:
    """A metric of every record. Raises: _MissingError: there is no record, or one lacks it."""
    found = [None if record is None else read_metric(record, metric) for record in records]
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        raise _MissingError
    return known


def _by_model(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each model, in the order in which models come first."""
    models: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        models[record.model].append(record)
    return list(models.values())


def _mean_reduction(records: Sequence[Record], _: Known, metric: str) -> float:
    """Mean over models of how many percent less a model's first run has of a metric than its second."""
    pairs = [_values(runs, metric) for runs in _by_model(records)]
    if any(len(pair) != 2 or pair[1] == 0 for pair in pairs):
        raise _MissingError
    return statistics.fmean(100 * (1 - first / second) for first, second in pairs)


def _mean_change(records: Sequence[Record], known: Known, metric: str) -> float:
    """Mean difference of a metric between runs and their full precision."""
    pairs = [_values([record, known.get(record.baseline_key or "")], metric) for record in records]
    return statistics.fmean(ours - full for ours, full in pairs)


def _spearman(records: Sequence[Record], _: Known, probability: str | None, *metrics: str) -> float | None:
    """Spearman's rho over models of two metrics, each of a model's first run that has it; its p where that is asked."""

    def first(runs: list[Record], metric: str) -> float:
        return _values([run for run in runs if read_metric(run, metric) is not None][:1], metric)[0]

    correlation = spearman(*([first(runs, metric) for runs in _by_model(records)] for metric in metrics))
    return correlation.p if probability else correlation.rho


def _fisher(records: Sequence[Record], known: Known, metric: str) -> float:
    """p of Fisher's exact test of the items with a metric in all runs against those of their full precision."""
    counts = []
    groups: list[Sequence[Record | None]] = [records, [known.get(record.baseline_key or "") for record in records]]
    for group in groups:
        hits, items = sum(_values(group, f"items with {metric}")), sum(_values(group, "items"))
        counts.append([round(hits), round(items - hits)])
    return float(scipy.stats.fisher_exact(counts).pvalue)


_STATISTICS: tuple[tuple[str, Callable[..., float | None]], ...] = (
    (r"median of (.+)", lambda records, _, metric: statistics.median(_values(records, metric))),
    (r"models above ([\d.]+) of (.+)", lambda found, _, x, name: sum(v > float(x) for v in _values(found, name))),
    (r"models below ([\d.]+) of (.+)", lambda found, _, x, name: sum(v < float(x) for v in _values(found, name))),
    (r"mean reduction in percent of (.+)", _mean_reduction),
    (r"change of (.+)", _mean_change),
    (r"(p of )?spearman of (.+) and (.+)", _spearman),
    (r"fisher p of (.+)", _fisher),
)
