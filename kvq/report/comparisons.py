"""Which rows of a table differ by more than noise, judged on the windows they share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvq.errors import RecordError
from kvq.results import Record, Store
from kvq.results.statistics import BLOCK, RESAMPLES, Estimate, delta_nll_of_samples, perplexity_of_samples, within_noise

Samples = Callable[[str], list[dict[str, Any]]]


class Comparisons:
    """Paired differences between runs, each computed once.

    Args:
        samples: gives the stored samples of a run's key, such as `Store.samples`.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._means: dict[str, float] = {}
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
            return perplexity_of_samples(self.samples(record.key), **_bootstrap_settings(record.config)).standard_error
        except RecordError:
            return None

    def beats(self, record: Record, other: Record) -> bool:
        """Return whether the loss of `record` is lower than that of `other` beyond noise."""
        if self._mean(record) >= self._mean(other):
            return False  # most pairs, and needs no bootstrap
        found = self.delta_nll(record, other)
        return (
            found is not None
            and found.standard_error is not None
            and found.value < 0
            and not within_noise(found.value, found.standard_error)
        )

    def samples(self, key: str) -> list[dict[str, Any]]:
        """The stored samples of a run's key. Raises: RecordError: there are none, or they are damaged."""
        if key not in self._rows:
            self._rows[key] = self._samples(key)
        return self._rows[key]

    def _mean(self, record: Record) -> float:
        """Loss in nats per token; NaN where the run has no samples of losses."""
        if record.key not in self._means:
            try:
                rows = self.samples(record.key)
                self._means[record.key] = sum(row["nll"] for row in rows) / sum(row["tokens"] for row in rows)
            except (RecordError, KeyError, TypeError, ZeroDivisionError):
                self._means[record.key] = math.nan
        return self._means[record.key]

    def _compute(self, record: Record, other: Record) -> Estimate | None:
        settings = _bootstrap_settings(record.config)
        try:
            rows = [self.samples(key) for key in (record.key, other.key)]
            return delta_nll_of_samples(rows[0], rows[1], **settings)
        except RecordError:
            return None


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
    comparisons: Comparisons,
    bits_of: Callable[[Record], float | None] = effective_bits,
) -> set[str]:
    """Keys of runs on the Pareto frontier of bits and loss, judged beyond noise.

    Run A beats run B if its loss is lower by more than `NOISE` paired standard errors. Runs are visited by increasing
    bits. A run is on the frontier if it beats the previous run on the frontier and no run with at most its bits beats
    it; of two runs that differ within noise, the one with fewer bits is on it. The first run of the frontier also has
    to beat some run with at least its bits.
    """
    sized = [(bits, record) for record in records if (bits := bits_of(record)) is not None]
    sized.sort(key=lambda pair: (pair[0], pair[1].metrics.get("nll", 0.0), pair[1].key))
    best: list[Record] = []
    for bits, record in sized:
        if best and not comparisons.beats(record, best[-1]):
            continue
        cheaper = [other for other_bits, other in sized if other_bits <= bits and other.key != record.key]
        if any(comparisons.beats(other, record) for other in cheaper):
            continue
        dearer = [other for other_bits, other in reversed(sized) if other_bits >= bits and other.key != record.key]
        if best or any(comparisons.beats(record, other) for other in dearer):
            best.append(record)
    return {record.key for record in best}
