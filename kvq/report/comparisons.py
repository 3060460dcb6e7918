"""Which runs of a store differ by more than noise, tested on the windows and items that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import RecordError
from kvq.report.labels import by_bits, labelled
from kvq.results import Broken, Record, Store, statistics
from kvq.results.files import SAMPLES
from kvq.results.metrics import is_lower_better
from kvq.results.noise import PairTests, compare_items, compare_pairs
from kvq.results.presets import parse_label, part_of

Samples = Callable[[Record], list[dict[str, Any]]]
_TESTS = ("p_value", "not_worse_p", "within_noise", "not_worse")


class Comparisons:
    """Paired differences between runs; `samples` gives the stored samples of a run, which are read once."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._losses: dict[str, statistics.Losses | None] = {}

    def delta_nll(self, record: Record, other: Record) -> statistics.Estimate | None:
        """Loss of `record` minus that of `other`, nats per token; None when their samples cannot be paired."""
        settings = _bootstrap_settings(record.config)
        with suppress(RecordError):
            return statistics.delta_nll_of_samples(self.samples(record), self.samples(other), **settings)
        return None

    def perplexity_error(self, record: Record) -> float | None:
        """Standard error of a run's perplexity over windows; None without samples or with too few windows."""
        with suppress(RecordError):
            settings = _bootstrap_settings(record.config)
            return statistics.perplexity_of_samples(self.samples(record), **settings).standard_error
        return None

    def losses(self, record: Record) -> statistics.Losses | None:
        """Losses of a run by window; None where its samples hold none."""
        if record.key not in self._losses:
            self._losses[record.key] = None
            with suppress(RecordError):
                self._losses[record.key] = statistics.losses(self.samples(record))
        return self._losses[record.key]

    def compare_pairs(self, pairs: Iterable[tuple[Record, Record]]) -> PairTests:
        """Test the differences of several pairs of runs together; results are by the keys of both."""
        known = {(a.key, b.key): (self.losses(a), self.losses(b)) for a, b in pairs}
        return compare_pairs({keys: (a, b) for keys, (a, b) in known.items() if a is not None and b is not None})

    def samples(self, record: Record) -> list[dict[str, Any]]:
        """The stored samples of a run. Raises: RecordError: they are missing or damaged."""
        if record.key not in self._rows:
            self._rows[record.key] = self._samples(record)
        return self._rows[record.key]


class Verdicts:
    """Which of a table's runs have a lower loss than which others, beyond noise; all pairs are tested together.

    Runs that are both within noise of full precision are not told apart, so that in a table of runs that equal full
    precision a false mark of either kind is as rare as one of the first alone. `further`: more pairs.
    """

    def __init__(
        self, records: Sequence[Record], comparisons: Comparisons, further: Iterable[tuple[Record, Record]] = ()
    ) -> None:
        every = {frozenset((a.key, b.key)): (a, b) for a, b in (*combinations(records, 2), *further)}
        self._tests, self._losses = comparisons.compare_pairs(every.values()), comparisons.losses
        self._with_verdicts = {key for pair in self._tests.p for key in pair}

    def knows(self, record: Record) -> bool:
        """Whether a run was compared with others: it has losses of as many windows as a verdict needs."""
        return record.key in self._with_verdicts

    def beats(self, record: Record, other: Record) -> bool:
        """Whether the loss of `record` is lower than that of `other` beyond noise."""
        if is_noise(record) and is_noise(other):
            return False
        ours, theirs = self._losses(record), self._losses(other)
        pair = record.key, other.key
        differ = self._tests.differs(pair) or self._tests.differs(pair[::-1])
        return differ and ours is not None and theirs is not None and float(np.sum(ours.nll - theirs.nll)) < 0


def is_noise(record: Record, p_value: float | None = None) -> bool:
    """Whether a run is within noise of full precision, by its flag or the corrected `p_value` of its items."""
    return (p_value is not None and p_value > statistics.ALPHA) or record.metrics.get("within_noise") == 1


def _bootstrap_settings(config: Mapping[str, Any]) -> dict[str, int]:
    """The `block`, `resamples` and `seed` of a run's bootstrap, from its settings or as they are by default."""
    given = part_of(part_of(config, "task"), "bootstrap")
    settings = {"block": statistics.BLOCK, "resamples": statistics.RESAMPLES, "seed": 0}
    return settings | {name: int(given[name]) for name in settings if isinstance(given.get(name), int)}


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


def frontier(records: Sequence[Record], verdicts: Verdicts, bits_of: Callable[[Record], float | None]) -> set[str]:
    """Keys of runs on the frontier of bits and loss (`unbeaten`) that are not within noise of full precision."""
    return {record.key for record in unbeaten(records, verdicts, bits_of) if not is_noise(record)}


def unbeaten(records: Sequence[Record], verdicts: Verdicts, size_of: Callable[[Record], float | None]) -> list[Record]:
    """The frontier of size and loss by `FRONTIER_RULE`: unbeaten by smaller runs, beating the one kept before."""
    sized = [(bits, run) for run in records if verdicts.knows(run) and (bits := size_of(run)) is not None]
    sized.sort(key=lambda pair: (pair[0], pair[1].metrics.get("nll", 0.0), pair[1].key))
    best: list[Record] = []
    for bits, record in sized:
        cheaper = (other for other_bits, other in sized if other_bits <= bits)
        if not (best and not verdicts.beats(record, best[-1])) and not any(verdicts.beats(o, record) for o in cheaper):
            best.append(record)
    return best


def read_records(store: Store, keys: Collection[str] | None = None) -> tuple[list[Record], list[Broken]]:
    """Read the records of a store, with p-values and verdicts computed anew, so that all have the same test.

    Items are compared by samples and margin, losses of windows by the test of `kvq.results.noise` over all runs of a
    protocol. Without paired samples there is no verdict. With `keys`, other protocols' verdicts stay as measured.
    """
    records, broken = labelled(store, keys)
    known = {record.key: record for record in records}
    odd: dict[Path, str] = {}
    out = [_judge_items(one, known, store, odd) if keys is None or one.key in keys else one for one in records]
    return mark_within_noise(out, store, keys), [*broken, *(Broken(path, reason) for path, reason in odd.items())]


def mark_within_noise(records: Sequence[Record], store: Store, keys: Collection[str] | None = None) -> list[Record]:
    """Records with the flag `within_noise` of their losses, where it can be told; arguments as in `read_records`."""
    known = {record.key: record for record in records}
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.baseline_key in known and record.status == "done" and "delta_nll" in record.metrics:
            groups[str(record.baseline_key)].append(record)
    marked: dict[str, Record] = {}
    for full, group in groups.items():
        if keys is None or any(record.key in keys for record in group):
            found = Comparisons(store.samples_of).compare_pairs((record, known[full]) for record in group)
            for record in group:
                metrics = {name: value for name, value in record.metrics.items() if name != "within_noise"}
                if (p_value := found.p.get((record.key, full))) is not None:
                    metrics["within_noise"] = float(p_value > statistics.ALPHA)
                marked[record.key] = record.model_copy(update={"metrics": metrics})
    return [marked.get(record.key, record) for record in records]


def samples_of(record: Record, store: Store, odd: dict[Path, str]) -> list[dict[str, Any]]:
    """Read the samples of a record; the path of a file that cannot be used is put into `odd`, with the reason."""
    try:
        return store.samples_of(record)
    except RecordError as error:
        if not isinstance(error.__cause__, FileNotFoundError):  # a record without them is a choice: a small archive
            odd[store.samples_path(record.key)] = str(error).rpartition(f"{SAMPLES}: ")[2]
        raise


def _judge_items(record: Record, known: Mapping[str, Record], store: Store, odd: dict[Path, str]) -> Record:
    """The record with the tests of its items computed anew from samples; one without a margin stays as it is."""
    margin = part_of(record.config, "task").get("margin")
    if "items" not in record.metrics or record.baseline_key is None or not isinstance(margin, int | float):
        return record
    metrics = {name: value for name, value in record.metrics.items() if name not in _TESTS}
    full = known.get(record.baseline_key)
    with suppress(RecordError, KeyError, TypeError, ValueError):
        if full is None:
            raise RecordError("no record of full precision")
        ours, theirs = (
            {row["item"]: float(row["score"]) for row in samples_of(run, store, odd) if "skipped" not in row}
            for run in (record, full)
        )
        if ours.keys() != theirs.keys():
            raise RecordError("other items were scored")
        pairs = np.array([(ours[item], theirs[item]) for item in ours], dtype=np.float64).reshape(-1, 2)
        floor = full.metrics.get("noise_flips", 0.0)
        if any(is_lower_better(str(row["metric"])) for row in store.samples_of(record) if "metric" in row):
            pairs = -pairs
        metrics |= compare_items(pairs[:, 0], pairs[:, 1], margin=margin, noise_flips=floor)
    return record.model_copy(update={"metrics": metrics})
