"""Which rows of a table differ by more than noise, judged on the windows they share (`kvq.results.noise`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from kvq.errors import RecordError
from kvq.results import Record, Store
from kvq.results.noise import Family, family
from kvq.results.statistics import (
    ALPHA,
    BLOCK,
    RESAMPLES,
    Estimate,
    Losses,
    delta_nll_of_samples,
    losses,
    perplexity_of_samples,
)

Samples = Callable[[Record], list[dict[str, Any]]]


class Comparisons:
    """Paired differences between runs, each computed once.

    Args:
        samples: gives the stored samples of a run, such as `Store.samples_of`.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._losses: dict[str, Losses | None] = {}
        self._known: dict[tuple[str, str], Estimate | None] = {}

    def delta_nll(self, record: Record, other: Record) -> Estimate | None:
        """Loss of `record` minus that of `other`, nats per token; None when their samples cannot be paired."""
        pair = (record.key, other.key)
        if pair not in self._known:
            self._known[pair] = self._compute(record, other)
        return self._known[pair]

    def perplexity_error(self, record: Record) -> float | None:
        """Standard error of a run's perplexity over windows; None without samples or with too few windows."""
        try:
            return perplexity_of_samples(self.samples(record), **_bootstrap_settings(record.config)).standard_error
        except RecordError:
            return None

    def losses(self, record: Record) -> Losses | None:
        """Losses of a run by window; None where it has no samples of losses."""
        if record.key not in self._losses:
            try:
                self._losses[record.key] = losses(self.samples(record))
            except RecordError:
                self._losses[record.key] = None
        return self._losses[record.key]

    def family(self, pairs: Iterable[tuple[Record, Record]]) -> Family:
        """Pairs of runs judged at once, by the keys of both."""
        known = {(a.key, b.key): (self.losses(a), self.losses(b)) for a, b in pairs}
        return family({keys: (a, b) for keys, (a, b) in known.items() if a is not None and b is not None})

    def samples(self, record: Record) -> list[dict[str, Any]]:
        """The stored samples of a run. Raises: RecordError: they are missing or damaged."""
        if record.key not in self._rows:
            self._rows[record.key] = self._samples(record)
        return self._rows[record.key]

    def _compute(self, record: Record, other: Record) -> Estimate | None:
        settings = _bootstrap_settings(record.config)
        try:
            return delta_nll_of_samples(self.samples(record), self.samples(other), **settings)
        except RecordError:
            return None


class Verdicts:
    """Which of a table's runs have a lower loss than which others, beyond noise.

    Runs that are both within noise of full precision are not told apart, so that in a table of runs that equal full
    precision a false mark of either kind is as rare as one of the first alone.

    Args:
        records: runs of one protocol, all pairs of which are judged at once.
        further: more pairs, judged with them, such as a variant's at two widths.
        comparisons: gives their losses.
    """

    def __init__(
        self,
        records: Sequence[Record],
        comparisons: Comparisons,
        further: Iterable[tuple[Record, Record]] = (),
    ) -> None:
        every = {frozenset((a.key, b.key)): (a, b) for a, b in (*combinations(records, 2), *further)}
        self._family, self._losses = comparisons.family(every.values()), comparisons.losses
        self._judged = {key for pair in self._family.p for key in pair}

    def knows(self, record: Record) -> bool:
        """Whether a run was compared with others: it has losses of as many windows as a verdict needs."""
        return record.key in self._judged

    def beats(self, record: Record, other: Record) -> bool:
        """Whether the loss of `record` is lower than that of `other` beyond noise."""
        if is_noise(record) and is_noise(other):
            return False
        ours, theirs = self._losses(record), self._losses(other)
        pair = record.key, other.key
        return (
            (self._family.differs(pair) or self._family.differs(pair[::-1]))
            and ours is not None
            and theirs is not None
            and float(np.sum(ours.nll - theirs.nll)) < 0
        )


def is_noise(record: Record, p_value: float | None = None) -> bool:
    """Whether a run is within noise of full precision, as `read_records` judged it.

    `p_value`: that of its items, corrected for the rows of a table.
    """
    return (p_value is not None and p_value > ALPHA) or record.metrics.get("within_noise") == 1


def loss_change(record: Record, other: Record, store: Store) -> tuple[float, float]:
    """Loss of `record` minus that of `other` on the same windows, and its standard error; NaN: unknown (nats/token)."""
    try:
        found = delta_nll_of_samples(store.samples_of(record), store.samples_of(other))
    except RecordError:
        return math.nan, math.nan
    return found.value, math.nan if found.standard_error is None else found.standard_error


def _bootstrap_settings(config: Mapping[str, Any]) -> dict[str, int]:
    task = config.get("task")
    given = task.get("bootstrap") if isinstance(task, Mapping) else None
    settings = {"block": BLOCK, "resamples": RESAMPLES, "seed": 0}
    if isinstance(given, Mapping):
        settings |= {name: int(given[name]) for name in settings if isinstance(given.get(name), int)}
    return settings


def parse_label(bits: str) -> tuple[float, float] | None:
    """Bits of keys and values of a label such as '3' or 'k3v2'; None for another label, such as a fixed rate's."""
    if match := re.fullmatch(r"k(\d+(?:\.\d+)?)v(\d+(?:\.\d+)?)", bits):
        return float(match[1]), float(match[2])
    if re.fullmatch(r"\d+(?:\.\d+)?", bits):
        return float(bits), float(bits)
    return None


def by_bits(bits: str) -> tuple[float, str]:
    """Sort key of a bit label: the mean of keys and values, labels without a number last."""
    parsed = parse_label(bits)
    return (float("inf") if parsed is None else sum(parsed) / 2, bits)


def widths(records: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Neighbouring bit widths of one method, (fewer bits, more bits): neither keys nor values may have fewer."""
    ordered = sorted((record for record in records if parse_label(record.bits)), key=lambda r: by_bits(r.bits))
    for fewer, more in pairwise(ordered):
        low, high = parse_label(fewer.bits), parse_label(more.bits)
        if low and high and low != high and low[0] <= high[0] and low[1] <= high[1]:
            yield fewer, more


def effective_bits(record: Record) -> float | None:
    """Bits per element that a run stored, its residual included; where unknown, those of its packed cache."""
    return record.metrics.get("effective_bits", record.metrics.get("bits_per_element"))


def measured_bits(record: Record) -> float | None:
    """Bits per element of a run's packed tokens, without those of its residual."""
    return record.metrics.get("bits_per_element")


def frontier(
    records: Sequence[Record],
    verdicts: Verdicts,
    bits_of: Callable[[Record], float | None] = effective_bits,
) -> set[str]:
    """Keys of runs on the Pareto frontier of bits and loss (`unbeaten`), without those within noise of full precision.

    Such runs compete; that they are on the frontier is not marked.
    """
    return {record.key for record in unbeaten(records, verdicts, bits_of) if not is_noise(record)}


def unbeaten(records: Sequence[Record], verdicts: Verdicts, size_of: Callable[[Record], float | None]) -> list[Record]:
    """Runs of which none of at most their size is better, smallest first, judged beyond noise (`FRONTIER_RULE`).

    Runs are visited by increasing size. One is kept if no run of at most its size beats it, and it beats the run kept
    before it; so the first is, and of two runs that differ within noise, the smaller one.
    """
    sized = [(bits, run) for run in records if verdicts.knows(run) and (bits := size_of(run)) is not None]
    sized.sort(key=lambda pair: (pair[0], pair[1].metrics.get("nll", 0.0), pair[1].key))
    best: list[Record] = []
    for bits, record in sized:
        cheaper = (other for other_bits, other in sized if other_bits <= bits)
        if not (best and not verdicts.beats(record, best[-1])) and not any(verdicts.beats(o, record) for o in cheaper):
            best.append(record)
    return best
