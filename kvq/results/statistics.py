"""Standard errors and tests of the difference between two runs on the same windows or items.

Consecutive windows of one text are correlated, so the bootstrap draws blocks of consecutive windows (Künsch, 1989, "The
jackknife and the bootstrap for general stationary observations"). The difficulty of the text is common to two runs on
the same windows and cancels in their per-window difference. These are errors to show; whether losses differ is
tested for all rows of a table together (`kvq.results.noise`). Items of a task are independent: `paired_mean` draws them
one by one, `flips` and `mcnemar` compare right and wrong answers, and `noise` tests differences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy  # `scipy.stats` loads when it is first asked for: it takes longer than all else here
from jaxtyping import Num

from kvq.errors import RecordError

BLOCK = 2
RESAMPLES = 2000
# Resampled values in memory at once: 32 MiB of float64, whatever the number of windows.
ALPHA = 0.05
"""Significance level: p-values above it (corrected where a table has several) are within noise."""
Windows = Num[np.ndarray, " windows"]
Items = Num[np.ndarray, " _items"]
Name = TypeVar("Name", bound=Hashable)
Samples = Sequence[Mapping[str, Any]]
"""Rows that a run stored."""


class Estimate(NamedTuple):
    """A value with its bootstrap error. With fewer than two blocks there is no error: the three are None."""

    value: float
    standard_error: float | None
    low: float | None
    high: float | None
    blocks: int

    def metrics(self, name: str, part: str = "") -> dict[str, float]:
        """The value under a name and, where there is one, its error under `<name>_se`; `part` ends both names."""
        error = self.standard_error
        return {f"{name}{part}": self.value} | ({} if error is None else {f"{name}_se{part}": error})


class Losses(NamedTuple):
    """A run's windows, the tokens scored in each, and the sums of their losses in nats."""

    windows: tuple[Any, ...]
    tokens: Windows
    nll: Windows


def fewest_to_differ() -> int:
    """Fewest windows or items for which the most extreme outcome has p at most `ALPHA`: 2 of 2^n sign patterns."""
    return math.ceil(1 - math.log2(ALPHA))


def delta_nll(nll: Windows, baseline_nll: Windows, tokens: Windows, **drawn: int) -> Estimate:
    """Mean difference of negative log-likelihood per token between two runs on the same windows, in nats.

    Args:
        nll, baseline_nll: sum of each window's token losses; a positive result means `nll` is worse.
        tokens: scored tokens of each window.
        drawn: of the bootstrap: `block`, consecutive windows drawn together; `resamples`; `seed`. They are `BLOCK`,
            `RESAMPLES` and 0 unless given.

    The standard error is scaled by sqrt(B/(B-1)) for B blocks, because the plain bootstrap divides by B and is too
    small for few blocks; the interval is the 95% percentile interval.
    """
    return _bootstrap(np.subtract(nll, baseline_nll, dtype=np.float64), tokens, _ratio, **drawn)


def perplexity(nll: Windows, tokens: Windows, **drawn: int) -> Estimate:
    """exp of the mean loss per token, with its unpaired error (another stretch of the same text), as `delta_nll`."""
    sums = np.asarray(nll, dtype=np.float64)
    return _bootstrap(sums, tokens, lambda nll, tokens, axis=-1: np.exp(_ratio(nll, tokens, axis)), **drawn)


def delta_nll_of_samples(samples: Samples, baseline: Samples, **drawn: int) -> Estimate:
    """`delta_nll` of two runs' stored samples, rows of `{"window": i, "tokens": n, "nll": sum in nats}`."""
    ours, theirs = losses(samples), losses(baseline)
    if ours.windows != theirs.windows or not np.array_equal(ours.tokens, theirs.tokens):
        raise RecordError("paired runs need the same windows with the same scored tokens")
    return delta_nll(ours.nll, theirs.nll, ours.tokens, **drawn)


def perplexity_of_samples(samples: Samples, **drawn: int) -> Estimate:
    """`perplexity` of a run's stored samples, rows as in `delta_nll_of_samples`."""
    _, tokens, nll = losses(samples)
    return perplexity(nll, tokens, **drawn)


def losses(samples: Samples) -> Losses:
    """Stored samples as arrays; rows as in `delta_nll_of_samples`."""
    try:
        windows = tuple(row["window"] for row in samples)
        tokens, nll = (np.array([row[name] for row in samples], dtype=np.float64) for name in ("tokens", "nll"))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"samples need a window, tokens and nll in each row: {error!r}") from None
    return Losses(windows, tokens, nll)


def _ratio(sums: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean loss per token."""
    return np.asarray(np.sum(sums, axis=axis) / np.sum(counts, axis=axis))


def _bootstrap(
    sums: Windows,
    tokens: Windows,
    statistic: Callable[..., np.ndarray],
    *,
    block: int = BLOCK,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The statistic of sums and tokens over all windows, with error and interval from a bootstrap over blocks."""
    counts = np.asarray(tokens, dtype=np.float64)
    if block < 1 or resamples < 2 or not len(sums) == len(counts) > 0 or not counts.min() > 0:
        what = f"block={block}, resamples={resamples}, {len(sums)} losses for {len(counts)} windows"
        raise RecordError(f"bootstrap: {what}; block >= 1, resamples >= 2, one of each window and scored tokens in all")
    starts = np.arange(0, len(sums), block)
    blocks = (np.add.reduceat(sums, starts), np.add.reduceat(counts, starts))
    value = float(statistic(*blocks))
    if len(starts) < 2:
        return Estimate(value, None, None, None, len(starts))
    result = scipy.stats.bootstrap(
        blocks,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, 2**22 // len(starts)),  # values held at once
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    error = float(result.standard_error) * math.sqrt(len(starts) / (len(starts) - 1))
    low, high = result.confidence_interval
    return Estimate(value, error, float(low), float(high), len(starts))


def flips(ours: Items, theirs: Items) -> tuple[int, int]:
    """Items that only the baseline (`theirs`) got right, 1, and that only the run did: lost and gained."""
    now, before = (np.asarray(scores) == 1 for scores in (ours, theirs))
    return int(np.sum(before & ~now)), int(np.sum(now & ~before))


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test: whether `lost` and `gained` items differ by more than chance.

    Given that an item flipped, either direction has probability 1/2 (McNemar, 1947). 1.0 where nothing flipped.
    """
    return float(scipy.stats.binomtest(lost, lost + gained, 0.5).pvalue) if lost + gained else 1.0


def paired_mean(values: Items, baseline: Items, **drawn: int) -> Estimate:
    """Mean difference of per-item scores of two runs, with its bootstrap error; positive: `values` are higher."""
    difference = np.subtract(values, baseline, dtype=np.float64)
    return _bootstrap(difference, np.ones(len(difference)), _ratio, **drawn, block=1)


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """p-values by name, corrected for multiple tests (Holm, 1979); valid under any dependence."""
    corrected, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


class Correlation(NamedTuple):
    """Spearman's rho of `n` points, its 95% interval (None: fewer than 4 points, or nothing but ties) and p-value.

    `p` is two-sided: exact up to 8 points, the share of all orders that are as extreme, and by Student's t beyond
    (None: fewer than 4, or nothing but ties).
    """

    n: int
    rho: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None


def spearman(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Spearman's rank correlation; its interval by Fisher's z with the variance of Bonett and Wright (2000)."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return Correlation(len(x), None)
    found = scipy.stats.spearmanr(x, y)
    rho = float(found.statistic)
    if len(x) < 4:
        return Correlation(len(x), rho)
    reach = float(scipy.stats.norm.ppf(0.975)) * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
    z = math.atanh(max(min(rho, 1 - 1e-12), -1 + 1e-12))
    p = float(found.pvalue)
    if len(x) <= 8:  # all 40,320 orders are gone through
        first, second = (scipy.stats.rankdata(values) for values in (x, y))
        orders = np.abs(np.array(list(itertools.permutations(second))) @ (first - first.mean()))
        p = float(np.mean(orders >= abs(second @ (first - first.mean())) - 1e-9))
    return Correlation(len(x), rho, math.tanh(z - reach), math.tanh(z + reach), p)


def divergence_metrics(kl: Num[np.ndarray, " tokens"]) -> dict[str, float]:
    """Mean, upper quantiles and largest of tokens' KL divergences in nats, as the metrics of a record.

    Of n tokens the 99.9th percentile stands on n / 1000 and the largest on one; `scored_tokens` of the record says n.
    """
    values = kl.astype(np.float64)
    p99, p999 = np.quantile(values, [0.99, 0.999]).tolist()
    return {"kl_mean": float(values.mean()), "kl_p99": p99, "kl_p999": p999, "kl_max": float(values.max())}
