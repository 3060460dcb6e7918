"""The cells of an experiment's table: measured number, published number and difference, from records only."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvq.config.run import LayoutConfig
from kvq.report.comparisons import is_noise
from kvq.report.labels import is_on_test_text
from kvq.report.tables.build import is_unquantized
from kvq.report.tables.readings import Published, Reference, read_metric, read_statistic
from kvq.results import Record, is_stale, run_key
from kvq.results.metrics import metric_of
from kvq.results.statistics import ALPHA

NO_METRIC = "the run has no metric"
"""How the reason of a cell begins that its runs, though done, give no number."""


class CellRun(NamedTuple):
    """A run that a cell asks for. `signature` is None where no record can answer; `waits`: what it needs first."""

    command: str
    signature: str | None = None
    waits: str | None = None


@dataclass(frozen=True)
class Asked:
    """A cell: its labels by axis, the metric that is read (empty: the task's own), its runs, or why it has none."""

    labels: Mapping[str, str]
    metric: str
    runs: tuple[CellRun, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Experiment:
    """A table of a paper as it is asked for; `stand_ins`: model -> cells of a small run of the same shape.

    `runs` counts distinct runs in full, `baselines` those of full precision besides; `waiting`: missing choice -> runs.
    """

    name: str
    layout: LayoutConfig
    cells: tuple[Asked, ...]
    runs: int
    baselines: int
    stand_ins: Mapping[str, tuple[Asked, ...]]
    waiting: Mapping[str, int]


@dataclass(frozen=True)
class Shown:
    """A cell with its numbers in the table's units; `reason`: why there is no value; `machine`: of its times."""

    asked: Asked
    published: Published | None
    value: float | None = None
    error: float | None = None
    bits: float | None = None
    effective_bits: float | None = None
    within_noise: bool = False
    unquantized: bool = False
    stale: bool = False
    on_test_text: bool = False
    reason: str | None = None
    missing: tuple[str, ...] = ()
    machine: str = ""

    @property
    def difference(self) -> float | None:
        """Measured minus published."""
        return None if self.value is None or self.published is None else self.value - self.published.value


def signature(config: Mapping[str, Any], model: str, dataset: str) -> str:
    """A hash of a run's `canonical` settings, with names in place of fingerprints, without its machine."""
    parts = {name: part for name, part in config.items() if name != "machine"}
    method = parts.get("method")
    if isinstance(method, Mapping) and "calibration" in method:
        parts["method"] = {**method, "calibration": _named(method["calibration"])}
    for name, given in (("model", model), ("dataset", dataset)):
        parts[name] = [given, _named(config.get(name))]
    return run_key(parts)


def _named(part: Any) -> Any:
    """A part of a run's settings without its fingerprint."""
    return {name: item for name, item in part.items() if name != "fingerprint"} if isinstance(part, Mapping) else part


class Address(NamedTuple):
    """Where a record is found: its signature, and for a time the machine that it was measured on (else empty)."""

    signature: str
    machine: str = ""


class Answers(dict[Address, Record]):
    """Records by address."""

    @functools.cached_property
    def by_key(self) -> dict[str, Record]:
        """The records by key."""
        return {record.key: record for record in self.values()}

    @functools.cached_property
    def machines(self) -> dict[str, set[str]]:
        """Machines on which times of a signature were measured."""
        found: dict[str, set[str]] = defaultdict(set)
        for place in filter(operator.attrgetter("machine"), self):
            found[place.signature].add(place.machine)
        return found

    def find(self, run: CellRun, machine: str) -> Record | None:
        """The record of a run: a time measured on `machine`, or a record that depends on no machine."""
        signature = run.signature or ""
        return self.get(Address(signature, machine)) or self.get(Address(signature))


def address(record: Record) -> Address:
    """The address of a record in `Answers`: its signature, and of a time the machine that measured it."""
    return Address(signature(record.config, record.model, record.dataset), str(record.config.get("machine") or ""))


def by_signature(records: Iterable[Record]) -> Answers:
    """Records by address; of several at one address, the youngest that is done."""
    wanted = sorted(records, key=lambda record: (record.status == "done", record.provenance.started))
    return Answers((address(record), record) for record in wanted)


def _machines_of(cells: Iterable[Asked], records: Answers) -> list[str]:
    """Names of the machines whose recorded times answer some run of the cells; one empty name where there is none."""
    signatures = {run.signature for cell in cells for run in cell.runs if run.signature in records.machines}
    return sorted({machine for name in signatures for machine in records.machines[str(name)]}) or [""]


def shown_cells(experiment: Experiment, records: Answers, reference: Reference) -> list[Shown]:
    """The cells that print something, for each machine: a paper's, `layout.own`, all if nothing is published."""
    cells, layout = [], experiment.layout
    for machine, asked in itertools.product(_machines_of(experiment.cells, records), experiment.cells):
        published = reference.find(layout.paper or "", layout.table, asked.labels)
        if published is not None or layout.table is None or set(layout.own) & set(asked.labels.values()):
            cells.append(_fill(asked, published, records, machine, experiment))
    return cells


def stand_in_cells(experiment: Experiment, model: str, records: Answers) -> list[Shown]:
    """The cells of a stand-in, by machine as `shown_cells`; nothing where none of its runs is there."""
    asked = experiment.stand_ins[model]
    machines = _machines_of(asked, records)
    cells = [_fill(one, None, records, machine, experiment) for machine in machines for one in asked]
    return cells if any(cell.value is not None for cell in cells) else []


def _fill(asked: Asked, published: Published | None, records: Answers, machine: str, experiment: Experiment) -> Shown:
    """A cell with what the records of its runs give, times of one machine; without a number and with the reason."""
    answers = [(run, records.find(run, machine)) for run in asked.runs]
    found = [record for _, record in answers if record is not None]
    missing = tuple(run.command for run, record in answers if record is None)
    reason = asked.reason or next((run.waits for run in asked.runs if run.waits), None)
    failed = next((record for record in found if record.status != "done"), None)
    if reason is None and failed is not None:
        reason = f"{failed.status}: {failed.reason or 'no reason recorded'}"
    if reason is not None or not found or missing:
        return Shown(asked, published, reason=reason, missing=missing, machine=machine)
    is_statistic, value = read_statistic(found, asked.metric, records.by_key)
    if not is_statistic:
        values = [read_metric(record, asked.metric) for record in found]
        known = [one for one in values if one is not None]
        count = 1 if experiment.layout.pool == "sum" else len(known)
        value = sum(known) / count if len(known) == len(values) else None
    if value is None:
        return Shown(asked, published, reason=f"{NO_METRIC} '{asked.metric}'", machine=machine)
    single = found[0] if len(found) == 1 else None
    name, bracket, part = asked.metric.partition("[")
    error = None if single is None else single.metrics.get(f"{name}_se{bracket}{part}")
    return Shown(
        asked,
        published,
        value=experiment.layout.scale * value,
        error=None if error is None else abs(experiment.layout.scale) * error,
        bits=_mean_of("bits_per_element", found),
        effective_bits=_mean_of("effective_bits", found),
        within_noise=single is not None and _within_noise(single, asked.metric),
        unquantized=all(is_unquantized(record, records.by_key) for record in found),
        stale=any(map(is_stale, found)),
        on_test_text=any(map(is_on_test_text, found)),
        machine=machine,
    )


def _within_noise(record: Record, metric: str) -> bool:
    """Whether a metric is within noise of full precision: by its own test, else the run's if it is of the whole run."""
    name, metrics = metric.removeprefix("percent of "), record.metrics
    if record.baseline_key is None or f"{name}_p" in metrics:
        return record.baseline_key is not None and metrics[f"{name}_p"] > ALPHA
    alone = f"{name}_lost" in metrics or "=" in name or name in ("same_answers", "same_tokens")
    alone = alone or metric_of(name).unit in ("bits", "bytes", "bytes/sequence", "MB/s")
    return not alone and is_noise(record, metrics.get("p_value"))


def _mean_of(metric: str, records: Sequence[Record]) -> float | None:
    """Mean of a metric over the records that have it; None where none has."""
    known = [record.metrics[metric] for record in records if metric in record.metrics]
    return sum(known) / len(known) if known else None


def count_refused(cells: Iterable[Shown]) -> dict[str, int]:
    """The reasons for which cells can never be measured, as their layout gives them, each with its number of cells."""
    return dict(Counter(cell.asked.reason for cell in cells if cell.asked.reason))


def labels_of(cells: Sequence[Shown], axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Labels along `axes` in the order in which cells have them."""
    return list(dict.fromkeys(tuple(cell.asked.labels.get(axis, "") for axis in axes) for cell in cells))
