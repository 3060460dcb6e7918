"""What differs beyond noise: losses, tested for all rows of a table together, and two runs' scores of the same items.

One rule for tables, figures and the page. Losses of runs on the same windows are compared by flips of signs, not by
standard errors: two errors either way are too few where windows are few (8 windows leave Student's t 7 degrees of
freedom) and where rows are many.

Tests of items, whether they differ and whether one run is not worse than the other by a margin, hold their level for
any number of items and any scores: exact tests of counts for right and wrong answers, sign flips and a betting test for
graded scores. Where no outcome could be significant, the p-value is None.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy  # `scipy.stats` loads when it is first asked for
from jaxtyping import Float

from kvq.errors import RecordError
from kvq.results.statistics import ALPHA, Items, Losses, fewest_to_differ, flips, mcnemar

NOISE_RULE = (
    "A difference in loss is beyond noise where any row of the table has as large a t in at most "
    f"{100 * ALPHA:g}% of the flips of the windows' signs, the same for all rows (step-down max-T); pairs of rows are "
    "tested in the same way, all pairs at once."
)
FRONTIER_RULE = (
    "Bold in tables and rings in figures are the frontier of bits and loss: no method of equal or fewer bits is better "
    "beyond noise, and it beats the ring to its left beyond noise; what is within noise of full precision competes, "
    "but is only marked ≈."
)
"""What tables, figures, the page and README say, word for word."""
FLIPS = 4096
"""Patterns of signs that `max_t` goes through: all of them up to 13 windows, random ones beyond."""
SHORT = 12
"""Tables of fewer windows say that they are short."""
RESAMPLES = 9999
"""Number of random sign patterns, used where there are more patterns than this."""
# Differences are rounded to multiples of the largest one over this, so that equal sums are exactly equal.
_WIDTH = 2**40
_NUISANCE = 256  # grid points for the rate of gains, before the search around the worst one
_BETS = 20
_ALL_IN = 0.25
_BATCH_PRODUCTS = 2**18  # OpenBLAS computes as few in the calling thread: others would wait longer than they compute
Name = TypeVar("Name", bound=Hashable)


class MaxT(NamedTuple):
    """A p-value for each test, and the |t| above which a test stands out from all of them (infinite: none does)."""

    p: Float[np.ndarray, " tests"]
    critical: float


def max_t(differences: Float[np.ndarray, "tests windows"]) -> MaxT:
    """Two-sided p-values of paired differences, corrected for all of them: step-down max-T by flips of signs.

    Where a difference is symmetric around 0 and windows are independent, every pattern of signs is as likely. One
    pattern flips the windows of all tests, which keeps how tests depend on each other, so that few are lost to the
    number of tests where they go together (Westfall and Young, 1993, "Resampling-based multiple testing", section 2.6;
    Romano and Wolf, 2005, "Exact and approximate stepdown methods for multiple hypothesis testing"). The statistic is
    |sum| over the root of the sum of squares, which no flip changes: a monotone function of Student's |t|. The chance
    of a false finding is at most `ALPHA`, whichever hypotheses hold (`experiments/bench/noise_levels.py` measures it).
    `differences`: of sums of losses, which have the weight of their tokens. p-values have a resolution of
    2^(1 - windows) or 1 / `FLIPS`; 1 where all differences are 0.
    """
    tests, windows = differences.shape
    if not differences.size:
        return MaxT(np.ones(tests), math.inf)
    largest_of = np.abs(differences).max(axis=1, keepdims=True)  # divided by first, so that no square overflows
    units = differences / np.where(largest_of > 0, largest_of, 1.0)
    units /= np.maximum(np.sqrt(np.sum(units**2, axis=1, keepdims=True)), 1.0)
    order = np.argsort(np.abs(units.sum(axis=1)), kind="stable")  # a step's largest is then that of all before it
    units = units[order]
    observed = np.abs(units.sum(axis=1)) - 1e-9
    signs = _sign_patterns(windows)
    reached, largest = np.zeros(tests), []
    for part in np.array_split(signs, min(len(signs), math.ceil(signs.size * tests / _BATCH_PRODUCTS))):
        found = np.maximum.accumulate(np.abs(part @ units.T), axis=1)
        reached += np.sum(found >= observed, axis=0)
        largest.append(found[:, -1])
    p_values = np.empty(tests)
    p_values[order] = np.maximum.accumulate((reached / len(signs))[::-1])[::-1]
    most = int(ALPHA * len(signs))  # patterns in which a finding may be reached
    needed = np.sort(np.concatenate(largest))[::-1][most]
    spread = windows - needed**2
    never = most == 0 or spread < 1e-9
    return MaxT(p_values, math.inf if never else float(needed * math.sqrt((windows - 1) / spread)))


@functools.cache
def _sign_patterns(windows: int) -> Float[np.ndarray, "patterns windows"]:
    """Patterns of signs, the observed one first; a pattern and its opposite are one."""
    if 2 ** (windows - 1) <= FLIPS:
        patterns = list(itertools.product((1.0, -1.0), repeat=windows - 1))
        others = np.array(patterns).reshape(len(patterns), windows - 1)
    else:
        others = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS, windows - 1))
        others[0] = 1.0
    return np.hstack([np.ones((len(others), 1)), others])


class PairTests(NamedTuple):
    """p-values of pairs by name, corrected for all of them; `windows` and the `critical` |t| of the most pairs."""

    p: Mapping[Any, float]
    windows: int = 0
    critical: float = math.inf

    def differs(self, name: Hashable) -> bool:
        """Whether a pair differs beyond noise."""
        return self.p.get(name, 1.0) <= ALPHA


def compare_pairs(pairs: Mapping[Name, tuple[Losses, Losses]]) -> PairTests:
    """Test all pairs of runs with `max_t`; those of other windows (a broken or old run) are tested apart.

    A pair has no p-value if its two runs scored other windows, lost infinitely, or have too few windows to differ.
    """
    groups: dict[Hashable, list[Name]] = defaultdict(list)
    runs = {id(run): run for pair in pairs.values() for run in pair}
    scored = {place: (str(run.windows), run.tokens.tobytes()) for place, run in runs.items()}
    for name, (first, second) in pairs.items():
        if scored[id(first)] == scored[id(second)] and np.isfinite(first.nll - second.nll).all():
            groups[scored[id(first)]].append(name)
    p_values: dict[Name, float] = {}
    windows, critical = 0, math.inf
    for names in sorted(groups.values(), key=len):
        found = max_t(np.array([pairs[name][0].nll - pairs[name][1].nll for name in names]))
        windows, critical = len(pairs[names[0]][0].windows), found.critical
        if windows >= fewest_to_differ():
            p_values |= dict(zip(names, found.p.tolist(), strict=True))
    return PairTests(p_values, windows, critical)


@functools.cache
def needed_for_not_worse(margin: float, binary: bool) -> int:
    """Fewest items for which equal scores show that the mean fell by less than `margin`.

    For right and wrong answers at least log `ALPHA` / log(1 - margin): the number of items of which, if each is lost
    with probability `margin`, none is lost with probability at most `ALPHA`.
    """
    if binary:
        items = math.ceil(math.log(ALPHA) / math.log1p(-margin))
        while not_worse(0, 0, items, margin) > ALPHA:
            items += 1
        return items
    bets, weights = _wagers(margin)
    return next(items for items in itertools.count(1) if weights @ (1 + bets * margin / 2) ** items >= 1 / ALPHA)


def compare_items(ours: Items, theirs: Items, *, margin: float, noise_flips: float = 0.0) -> dict[str, float]:
    """The metrics of a paired comparison of scores, those of full precision second.

    `flips`, and for right and wrong answers `lost` and `gained`; `p_value` and `not_worse_p` where there are enough
    items; `within_noise`: no significant difference, or no more flips than `noise_flips`, the fraction of items whose
    score changes where nothing but the batch order does; `not_worse`: a fall of the mean by `margin` is excluded.
    """
    out = {"flips": float(np.mean(ours != theirs)) if len(ours) == len(theirs) and len(ours) else math.nan}
    differ, kept = differ_p(ours, theirs), not_worse_p(ours, theirs, margin)
    if _is_binary(ours, theirs):
        out |= dict(zip(("lost", "gained"), map(float, flips(ours, theirs)), strict=True))
    if differ is not None:
        out["p_value"] = differ
    if kept is not None:
        out["not_worse_p"] = kept
    out["within_noise"] = float(differ is None or differ > ALPHA or out["flips"] <= noise_flips)
    out["not_worse"] = float(kept is not None and kept <= ALPHA)
    return out


def differ_p(ours: Items, theirs: Items) -> float | None:
    """Two-sided p-value of the hypothesis that the runs are exchangeable; None below `fewest_to_differ` items.

    McNemar's exact test for right and wrong answers; for graded scores the sum of differences under all sign patterns,
    or `RESAMPLES` random ones, counting the observed one (Phipson and Smyth, 2010).
    """
    _check_paired(ours, theirs)
    if len(ours) < fewest_to_differ():
        return None
    if _is_binary(ours, theirs):
        return mcnemar(*flips(ours, theirs))
    return sign_flip(np.subtract(ours, theirs, dtype=np.float64))


def sign_flip(differences: Items) -> float:
    """Two-sided p-value of the sum of paired differences under flips of their signs; 1 where all are zero."""
    moved = differences[differences != 0]
    if not len(moved):
        return 1.0
    whole = np.rint(moved / np.abs(moved).max() * _WIDTH)
    if abs(whole.sum()) == np.abs(whole).sum():
        return 2.0 ** (1 - len(whole))  # all in one direction: two patterns of 2^n, exactly
    found = scipy.stats.permutation_test(
        (whole,),
        lambda values, axis: np.sum(values, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, 2**20 // len(whole)),  # held at once
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def not_worse_p(ours: Items, theirs: Items, margin: float) -> float | None:
    """One-sided p-value of the hypothesis that the mean score fell by at least `margin`; small means not worse.

    None where it cannot be tested: fewer items than `needed_for_not_worse`, a full-precision score of at most the
    margin, which cannot fall by it, or scores outside 0 to 1.
    """
    _check_paired(ours, theirs)
    if not 0 < margin < 1:
        raise RecordError(f"not_worse: margin={margin:g}; above 0 and below 1")
    binary = _is_binary(ours, theirs)
    fractions = min(ours.min(), theirs.min()) >= 0 and max(ours.max(), theirs.max()) <= 1
    if not fractions or np.mean(theirs) <= margin or len(ours) < needed_for_not_worse(margin, binary):
        return None
    if binary:
        return not_worse(*flips(ours, theirs), len(ours), margin)
    return bounded_not_worse(np.subtract(ours, theirs, dtype=np.float64), margin)


def bounded_not_worse(differences: Items, margin: float) -> float:
    """p-value of the hypothesis that differences within [-1, 1] have a mean of at most -`margin`, by betting.

    Under this hypothesis the wealth of a gambler who bets against it is a nonnegative supermartingale, so wealth above
    1/p has probability at most p (Waudby-Smith and Ramdas, 2024, "Estimating means of bounded random variables by
    betting"). The wealth is a weighted average over several stakes.
    """
    bets, weights = _wagers(margin)
    gains = 1 + np.multiply.outer(bets, (np.asarray(differences, dtype=np.float64) + margin) / 2)
    with np.errstate(divide="ignore"):  # the largest stake is lost entirely at a difference of -1
        logs = np.log(np.maximum(gains, 0.0)).sum(axis=1) + np.log(weights)
    return float(min(1.0, math.exp(min(0.0, -float(scipy.special.logsumexp(logs))))))


def _wagers(margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Stakes up to the one that a difference of -1 loses entirely, and their weights in the wealth."""
    bets = np.arange(1, _BETS + 1) / _BETS * (2 / (1 - margin))
    weights = np.full(_BETS, (1 - _ALL_IN) / (_BETS - 1))
    weights[-1] = _ALL_IN
    return bets, weights


def not_worse(lost: int, gained: int, items: int, margin: float) -> float:
    """One-sided exact p-value of the hypothesis that the accuracy fell by at least `margin`.

    Outcomes are ordered by Tango's score statistic (Tango, 1998, "Equivalence test and confidence interval for the
    difference in proportions for the paired-sample design"), whose normal approximation is too small at few items; the
    p-value is the largest probability, over rates of gains, of an outcome as good or better (Sidik, 2003, "Exact
    unconditional tests for testing non-inferiority in matched-pairs design"). `lost`: items, of `items` in all, that
    the baseline got right and the run did not; `gained`: the reverse; `margin`: above 0 and below 1.
    """
    losses = np.arange(items + 1)
    enough = _fewest_gains(losses, float(_tango_statistic(lost, gained, items, margin)), items, margin)

    def as_good(rate: np.ndarray) -> np.ndarray:
        """Probability of an outcome at least as good as observed, at these rates of gains and losses `margin` above."""
        rate = rate[:, None]
        share = np.minimum(1.0, rate / (1 - rate - margin))
        tail = scipy.stats.binom.sf(enough - 1, items - losses, share)
        return np.sum(scipy.stats.binom.pmf(losses, items, rate + margin) * tail, axis=1)

    rates = (1 - margin) / 2 * (np.arange(_NUISANCE + 1) / _NUISANCE) ** 2
    found = as_good(rates)
    worst = int(np.argmax(found))
    around = (rates[max(0, worst - 1)], rates[min(_NUISANCE, worst + 1)])
    best = scipy.optimize.minimize_scalar(lambda p: -float(as_good(np.array([p]))[0]), bounds=around, method="bounded")
    return float(min(1.0, max(found[worst], -best.fun)))


def _fewest_gains(losses: np.ndarray, observed: float, items: int, margin: float) -> np.ndarray:
    """For each number of losses, the fewest gains that score as well as observed; one too many where none do."""
    low, high = np.zeros(len(losses), dtype=np.int64), items - losses + 1
    while np.any(low < high):
        middle = (low + high) // 2
        does = (middle <= items - losses) & (_tango_statistic(losses, middle, items, margin) <= observed + 1e-9)
        low, high = np.where((low < high) & ~does, middle + 1, low), np.where((low < high) & does, middle, high)
    return low


def _tango_statistic(lost: np.ndarray | int, gained: np.ndarray | int, items: int, margin: float) -> np.ndarray:
    """Tango's score statistic of a fall by `margin`: negative and large where the run lost less than that."""
    # With the fall held at the margin, the likeliest rate of gains solves a x^2 + b x + c = 0.
    lost, gained = np.asarray(lost, dtype=np.float64), np.asarray(gained, dtype=np.float64)
    a, b = 2 * items, (2 * items - lost + gained) * margin - lost - gained
    c = -gained * margin * (1 - margin)
    gains = (np.sqrt(np.maximum(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = items * (2 * gains + margin * (1 - margin))
    return np.asarray((lost - gained - items * margin) / np.sqrt(variance))


def _is_binary(ours: Items, theirs: Items) -> bool:
    """Whether all scores of both runs are 0 or 1."""
    return bool(np.isin(np.concatenate([ours, theirs]), (0.0, 1.0)).all())


def _check_paired(ours: Items, theirs: Items) -> None:
    """Refuse paired scores of different lengths, or of no items."""
    if len(ours) != len(theirs) or not len(ours):
        raise RecordError(f"paired runs need the same items: {len(ours)} against {len(theirs)}")
