"""What a cell reads: a metric of one record, a number that follows from others, or a statistic of all its records.

A name says which: `perplexity`, `milliseconds of decode_b1_t*`, `mean over parts of rouge_l` (each subset counts once),
`median of delta_perplexity_percent`.
"""

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

from kvq.errors import RecordError
from kvq.results import Record
from kvq.results.files import cause
from kvq.results.statistics import spearman

FILE = "paper_results.csv"
AXES = ("model", "method", "setting", "dataset", "metric")
_COLUMNS = ("paper", "table", "model", "method", "avg_bits", "setting", "dataset", "metric", "value", "note")


class Published(NamedTuple):
    """One number of a paper. `avg_bits` as printed; `note`: what we know of the number that its paper does not say."""

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

    @property
    def is_approximate(self) -> bool:
        """Whether its paper gives it as approximate, which its note begins with."""
        return self.note.startswith("approximate")


def reference_path() -> Path:
    """The file: in a checkout under results/reference, inside the package when installed from a wheel."""
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
        """The one number with these labels, whatever its labels on other axes; None where the table has none.

        Raises:
            RecordError: several figures have them.
        """
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
    """Every published figure.

    Raises:
        RecordError: the file is missing, lacks a column, or a value is no number; names the line.
    """
    path = path or reference_path()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = set(_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise RecordError(f"{path.name}: lacks the columns {', '.join(sorted(missing))}")
            rows = [_row(line, reader.line_num, path) for line in reader]
    except OSError as error:
        raise RecordError(f"published figures: cannot read '{path}': {cause(error)}") from error
    return Reference(rows)


def _row(line: Mapping[str, str], number: int, path: Path) -> Published:
    try:
        value = float(line["value"])
    except ValueError:
        raise RecordError(f"{path.name}, line {number}: value {line['value']!r} is no number") from None
    text = {name: line[name] for name in _COLUMNS if name != "value"}
    return Published(value=value, **text)


MAIN_METRICS = ("score", "accuracy", "perplexity")
_PARTS = "mean over parts of "
Known = Mapping[str, Record]
"""Records by key, among them those of full precision."""


def read_metric(record: Record, metric: str) -> float | None:
    """A metric of a record, or one that follows from others; None where the run has none.

    A `*` stands for a batch or a context: the metric is read where just one fits.
    """
    metrics = record.metrics
    if "*" in metric:
        found = fnmatch.filter(metrics, metric.rpartition(" of ")[2])
        metric = metric.replace(metric.rpartition(" of ")[2], found[0]) if len(found) == 1 else metric
    if not metric:
        return next((metrics[name] for name in MAIN_METRICS if name in metrics), None)
    if metric in metrics:
        return metrics[metric]
    if (share := metrics.get(metric.removeprefix("items with "))) is not None and "items" in metrics:
        return share * metrics["items"]
    if metric == "delta_perplexity_percent" and {"perplexity", "delta_perplexity"} <= metrics.keys():
        return 100 * metrics["delta_perplexity"] / (metrics["perplexity"] - metrics["delta_perplexity"])
    if (seconds := metrics.get(metric.removeprefix("milliseconds of "))) is not None:
        return 1000 * seconds
    if (ratio := metrics.get(metric.removeprefix("overhead in percent of "))) is not None:
        return 100 * (ratio - 1)
    if (share := metrics.get(metric.removeprefix("percent of "))) is not None:
        return 100 * share
    if (share := metrics.get(metric.removeprefix("factor of "))) is not None and share < 1:
        return 1 / (1 - share)
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
    for pattern, of in _STATISTICS:
        if found := re.fullmatch(pattern, metric):
            return True, of(records, known, *found.groups())
    return False, None


def _values(records: Sequence[Record], metric: str) -> list[float] | None:
    found = [read_metric(record, metric) for record in records]
    known = [value for value in found if value is not None]
    return known if known and len(known) == len(found) else None


def _by_model(records: Sequence[Record]) -> list[list[Record]]:
    models: dict[str, list[Record]] = {}
    for record in records:
        models.setdefault(record.model, []).append(record)
    return list(models.values())


def _median(records: Sequence[Record], _: Known, metric: str) -> float | None:
    values = _values(records, metric)
    return None if values is None else statistics.median(values)


def _models(records: Sequence[Record], _: Known, side: str, bound: str, metric: str) -> float | None:
    values = _values(records, metric)
    if values is None:
        return None
    return float(sum(value > float(bound) if side == "above" else value < float(bound) for value in values))


def _reduction(records: Sequence[Record], _: Known, metric: str) -> float | None:
    pairs = [_values(runs, metric) for runs in _by_model(records)]
    if any(pair is None or len(pair) != 2 or pair[1] == 0 for pair in pairs):
        return None
    return statistics.fmean(100 * (1 - pair[0] / pair[1]) for pair in pairs if pair is not None)


def _change(records: Sequence[Record], known: Known, metric: str) -> float | None:
    pairs = [(record, known.get(record.baseline_key or "")) for record in records]
    values = [_values([record, full], metric) for record, full in pairs if full is not None]
    if len(values) < len(pairs) or any(value is None for value in values):
        return None
    return statistics.fmean(value[0] - value[1] for value in values if value is not None)


def _spearman(records: Sequence[Record], _: Known, probability: str | None, x: str, y: str) -> float | None:
    points = []
    for runs in _by_model(records):
        found = [next((v for run in runs if (v := read_metric(run, metric)) is not None), None) for metric in (x, y)]
        if None in found:
            return None
        points.append(found)
    correlation = spearman(*([float(value or 0) for value in column] for column in zip(*points, strict=True)))
    return correlation.p if probability else correlation.rho


def _fisher(records: Sequence[Record], known: Known, metric: str) -> float | None:
    full = [known.get(record.baseline_key or "") for record in records]
    groups = [records, [record for record in full if record is not None]]
    counts = []
    for group in groups:
        hits, items = _values(group, f"items with {metric}"), _values(group, "items")
        if hits is None or items is None or len(group) < len(records):
            return None
        counts.append([round(sum(hits)), round(sum(items) - sum(hits))])
    return float(scipy.stats.fisher_exact(counts).pvalue)


_STATISTICS: tuple[tuple[str, Callable[..., float | None]], ...] = (
    (r"median of (.+)", _median),
    (r"models (above|below) ([\d.]+) of (.+)", _models),
    (r"mean reduction in percent of (.+)", _reduction),
    (r"change of (.+)", _change),
    (r"(p of )?spearman of (.+) and (.+)", _spearman),
    (r"fisher p of (.+)", _fisher),
)
