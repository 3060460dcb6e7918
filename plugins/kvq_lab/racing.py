"""The decision rule of `kvq choose`: which formats leave a race, as a function of arrays of losses alone.

Formats are measured in rounds on the same randomly drawn windows. A format is dropped once another of at most its bytes
is better beyond noise. Let a format be on the true frontier if no other of at most its bytes has a smaller expected
loss; the chance that any of these is dropped in the whole race is meant to be at most 5%:

- In a round, all hypotheses "a is not better than b" are tested together by step-down max-T over flips of the windows'
  signs, which is a closed test (Marcus, Peritz and Gabriel, 1976, "On closed testing procedures with special reference
  to ordered analysis of variance"; Westfall and Young, 1993, "Resampling-based multiple testing", section 2.6). It is
  exact for windows that are independent and differences that are symmetric; windows are drawn at random for the first.
- Round r spends `alpha / (r (r + 1))`, which sums to `alpha` however many rounds there will be (Lan and DeMets, 1983,
  "Discrete sequential boundaries for clinical trials", with the union bound in place of the joint distribution).
- A round tests the formats that are left. Which are left follows from earlier windows, which the bounds above do not
  cover. `experiments/bench/race_levels.py` measures what remains, and what skewed differences cost: with windows on
  record, heavy tails or correlated texts the whole stays below 5%; with a strong skew (a chi-square of three degrees)
  and all formats equal it is 14%.

Whether a larger format is worth its bytes decides nothing but the answer. It is tested among the formats that no other
of at most their bytes undercuts: among all pairs, a correction for their number would leave few differences standing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

ALPHA = 0.03
"""What the rounds may spend together: less than the 5% that are promised, which leaves 2% for skewed differences."""
PATTERNS = 4096
"""Patterns of signs: all of them up to 12 windows, random ones beyond."""


def round_level(number: int, alpha: float = ALPHA) -> float:
    """The error probability that round `number` (from 1) may spend: alpha / (number (number + 1))."""
    return alpha / (number * (number + 1))


def round_sizes(windows: int, first: int = 8) -> Iterator[int]:
    """Windows of each round: 8, 8, 16, 32, ...; the last has what is left, if that is half of `first` or more."""
    used = 0
    while windows - used >= (first if not used else first // 2):
        size = min(max(first, used), windows - used)
        yield size
        used += size


@functools.cache
def _signs(windows: int) -> Float[np.ndarray, "patterns windows"]:
    """Sign flips of windows for the permutation test: all, or `PATTERNS` at random; the first flips nothing."""
    if 2**windows <= PATTERNS:
        return np.array(list(itertools.product((1.0, -1.0), repeat=windows)))
    drawn = np.random.default_rng(windows).choice((1.0, -1.0), size=(PATTERNS, windows))
    drawn[0] = 1.0
    return drawn


def find_positive(differences: Float[np.ndarray, "tests windows"], level: float) -> Bool[np.ndarray, " tests"]:
    """Which differences have a positive mean beyond noise, all tests together; one-sided step-down max-T.

    The statistic is the sum over the root of the sum of squares, a monotone function of Student's t. One pattern flips
    the windows of all tests, so that tests which go together cost little.
    """
    tests, windows = differences.shape
    if not differences.size:
        return np.zeros(tests, dtype=bool)
    units = differences / np.maximum(np.abs(differences).max(axis=1, keepdims=True), 1e-300)
    units /= np.maximum(np.sqrt(np.sum(units**2, axis=1, keepdims=True)), 1e-300)
    order = np.argsort(units.sum(axis=1), kind="stable")
    observed = units[order].sum(axis=1)
    largest = np.maximum.accumulate(_signs(windows) @ units[order].T, axis=1)
    p_values = np.mean(largest >= observed - 1e-9, axis=0)
    stepped = np.maximum.accumulate(p_values[::-1])[::-1]
    positive = np.zeros(tests, dtype=bool)
    positive[order] = (stepped <= level) & (observed > 0)
    return positive


@dataclass
class Race:
    """The state of a race after some rounds; formats are numbered as the rows of the arrays of losses.

    Attributes:
        sizes: bytes of each format.
        dropped: for each format that left, the better one of at most its bytes, and the round.
        worth: pairs (larger, smaller) of formats in which the larger has less loss beyond noise.
        means: mean loss of each format, which orders formats of equal bytes.
        rounds: number of rounds decided.
        windows: number of windows in these rounds.
    """

    sizes: Sequence[float]
    dropped: dict[int, tuple[int, int]] = field(default_factory=dict)
    worth: set[tuple[int, int]] = field(default_factory=set)
    means: Sequence[float] = ()
    rounds: int = 0
    windows: int = 0

    @property
    def left(self) -> list[int]:
        """Formats that are not dropped, the smallest first, of those of equal bytes the one with less loss."""
        left = (one for one in range(len(self.sizes)) if one not in self.dropped)
        return sorted(left, key=lambda one: (self.sizes[one], *self.means[one : one + 1], one))

    @property
    def undecided(self) -> list[tuple[int, int]]:
        """Pairs (smaller, larger) of formats left in which the larger is not better beyond noise."""
        return [pair for pair in itertools.combinations(self.left, 2) if pair[::-1] not in self.worth]

    def ladder(self) -> list[int]:
        """Formats left and measured, beginning with the smallest, each better beyond noise than the one before it."""
        steps: list[int] = []
        for one in self.left:
            if self.means[one : one + 1] != [np.inf] and (not steps or (one, steps[-1]) in self.worth):
                steps.append(one)
        return steps


def run_race(
    rounds: Sequence[Float[np.ndarray, "formats _windows"]], sizes: Sequence[float], alpha: float = ALPHA
) -> Race:
    """The state of a race after the given rounds.

    Args:
        rounds: losses of each window, in order; rows of formats that a round did not measure are NaN. A format that was
            left and not measured ends the race for it without being dropped: it is tested no more.
        sizes: bytes of each format.
        alpha: what all rounds together may spend.
    """
    race = Race(sizes)
    for number, _ in enumerate(rounds, 1):
        losses = np.concatenate(rounds[:number], axis=1)
        level = round_level(number, alpha)
        tested = [one for one in race.left if np.isfinite(losses[one]).all()]
        race.rounds, race.windows = number, losses.shape[1]
        race.means = np.nan_to_num(losses, nan=np.inf).mean(axis=1).tolist()
        dearer = [(a, b) for a in tested for b in tested if a != b and sizes[a] <= sizes[b]]
        better = find_positive(np.array([losses[b] - losses[a] for a, b in dearer]).reshape(-1, race.windows), level)
        for (a, b), is_better in zip(dearer, better, strict=True):
            if is_better and b not in race.dropped:
                race.dropped[b] = (a, number)
        undercut = {b for a, b in dearer if race.means[a] < race.means[b]}
        strict = [pair for pair in dearer if sizes[pair[0]] < sizes[pair[1]] and not undercut & set(pair)]
        worse = find_positive(np.array([losses[a] - losses[b] for a, b in strict]).reshape(-1, race.windows), level)
        race.worth |= {(b, a) for (a, b), is_worse in zip(strict, worse, strict=True) if is_worse}
        if not race.undecided:
            break
    return race
