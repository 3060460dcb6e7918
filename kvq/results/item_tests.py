"""Tests of two runs' scores of the same items: do they differ, and is one not worse than the other by a margin.

Both tests hold their level for any number of items and any scores: exact tests of counts for right and wrong answers,
sign flips and a betting test for graded scores. Where no outcome could be significant, the p-value is None.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import scipy  # `scipy.stats` loads when it is first asked for

from kvq.errors import RecordError
from kvq.results.statistics import ALPHA, Items, fewest_to_differ, flips, mcnemar

RESAMPLES = 9999
"""Number of random sign patterns, used where there are more patterns than this."""
_WIDTH = (
    2**40
)  # differences are rounded to multiples of the largest one over this, so that equal sums are exactly equal
_BATCH_VALUES = 2**20
_NUISANCE = 256  # grid points for the rate of gains, before the search around the worst one
_BETS = 20
_ALL_IN = 0.25


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


def judge_items(ours: Items, theirs: Items, *, margin: float, noise_flips: float = 0.0) -> dict[str, float]:
    """The metrics of a paired comparison of scores, those of full precision second.

    Args:
        ours: scores of the run, one for each item.
        theirs: scores of full precision.
        margin: largest fall of the mean score that still counts as not worse.
        noise_flips: fraction of the items whose score changes with the batch order alone.

    Returns:
        `flips`, and for right and wrong answers `lost` and `gained`; `p_value` and `not_worse_p` where there are enough
        items; `within_noise`: no significant difference; `not_worse`: a fall by `margin` is excluded.

    Raises:
        RecordError: no items, not the same number of them, or a margin out of range.
    """
    out = {"flips": float(np.mean(ours != theirs)) if len(ours) == len(theirs) and len(ours) else math.nan}
    differ, kept = differ_p(ours, theirs), not_worse_p(ours, theirs, margin)
    if _binary(ours, theirs):
        counts = flips((ours == 1).tolist(), (theirs == 1).tolist())
        out |= {"lost": float(counts.lost), "gained": float(counts.gained)}
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

    Raises:
        RecordError: no items, or not the same number of them.
    """
    _check(ours, theirs)
    if len(ours) < fewest_to_differ():
        return None
    if _binary(ours, theirs):
        counts = flips((ours == 1).tolist(), (theirs == 1).tolist())
        return mcnemar(counts.lost, counts.gained)
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
        batch=max(1, _BATCH_VALUES // len(whole)),
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def not_worse_p(ours: Items, theirs: Items, margin: float) -> float | None:
    """One-sided p-value of the hypothesis that the mean score fell by at least `margin`; small means not worse.

    None where it cannot be tested: fewer items than `needed_for_not_worse`, a full-precision score of at most the
    margin, which cannot fall by it, or scores outside 0 to 1.

    Raises:
        RecordError: no items, not the same number of them, or a margin out of range.
    """
    _check(ours, theirs)
    _check_margin(margin)
    binary = _binary(ours, theirs)
    fractions = min(ours.min(), theirs.min()) >= 0 and max(ours.max(), theirs.max()) <= 1
    if not fractions or np.mean(theirs) <= margin or len(ours) < needed_for_not_worse(margin, binary):
        return None
    if binary:
        counts = flips((ours == 1).tolist(), (theirs == 1).tolist())
        return not_worse(counts.lost, counts.gained, counts.items, margin)
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
    unconditional tests for testing non-inferiority in matched-pairs design").

    Args:
        lost: items that the baseline got right and the run did not.
        gained: the reverse.
        items: all items, flipped or not.
        margin: largest fall of the accuracy that still counts as "not worse", above 0 and below 1.

    Raises:
        RecordError: counts that do not fit, or a margin out of range.
    """
    if min(lost, gained) < 0 or lost + gained > items or items < 1:
        raise RecordError(f"not_worse: lost={lost}, gained={gained} of items={items}")
    _check_margin(margin)
    losses = np.arange(items + 1)
    enough = _gains_that_do(losses, float(_score(lost, gained, items, margin)), items, margin)

    def as_good(rate: np.ndarray) -> np.ndarray:
        """Probability that an outcome is as good, at these rates of gains, while losses exceed them by the margin."""
        rate = rate[:, None]
        share = np.minimum(1.0, rate / (1 - rate - margin))
        tail = scipy.stats.binom.sf(enough - 1, items - losses, share)
        return np.sum(scipy.stats.binom.pmf(losses, items, rate + margin) * tail, axis=1)

    rates = (1 - margin) / 2 * (np.arange(_NUISANCE + 1) / _NUISANCE) ** 2
    found = as_good(rates)
    worst = int(np.argmax(found))
    around = (rates[max(0, worst - 1)], rates[min(_NUISANCE, worst + 1)])
    refined = scipy.optimize.minimize_scalar(
        lambda rate: -float(as_good(np.array([rate]))[0]), bounds=around, method="bounded"
    )
    return float(min(1.0, max(found[worst], -refined.fun)))


def _gains_that_do(losses: np.ndarray, observed: float, items: int, margin: float) -> np.ndarray:
    """For each number of losses the fewest gains with a score as good as the observed; one too many where none are."""
    low, high = np.zeros(len(losses), dtype=np.int64), items - losses + 1
    while np.any(low < high):
        middle = (low + high) // 2
        does = (middle <= items - losses) & (_score(losses, middle, items, margin) <= observed + 1e-9)
        open_ = low < high
        high = np.where(open_ & does, middle, high)
        low = np.where(open_ & ~does, middle + 1, low)
    return low


def _score(lost: np.ndarray | int, gained: np.ndarray | int, items: int, margin: float) -> np.ndarray:
    """Tango's statistic; the smaller, the better the run."""
    # With the fall held at the margin, the likeliest rate of gains solves a x^2 + b x + c = 0.
    lost, gained = np.asarray(lost, dtype=np.float64), np.asarray(gained, dtype=np.float64)
    a, b = 2 * items, (2 * items - lost + gained) * margin - lost - gained
    c = -gained * margin * (1 - margin)
    gains = (np.sqrt(np.maximum(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = items * (2 * gains + margin * (1 - margin))
    return np.asarray((lost - gained - items * margin) / np.sqrt(variance))


def _binary(ours: Items, theirs: Items) -> bool:
    return bool(np.isin(np.concatenate([ours, theirs]), (0.0, 1.0)).all())


def _check(ours: Items, theirs: Items) -> None:
    if len(ours) != len(theirs) or not len(ours):
        raise RecordError(f"paired runs need the same items: {len(ours)} against {len(theirs)}")


def _check_margin(margin: float) -> None:
    if not 0 < margin < 1:
        raise RecordError(f"not_worse: margin={margin:g}; above 0 and below 1")
