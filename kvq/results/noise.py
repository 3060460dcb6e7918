"""Which losses differ beyond noise, judged for all rows of a table at once: one rule for tables, figures and the page.

Losses of runs on the same windows are compared by flips of signs, not by standard errors: two errors either way are too
few where windows are few (8 windows leave Student's t 7 degrees of freedom) and where rows are many.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from kvq.results.statistics import ALPHA, Losses, fewest_to_differ

NOISE_RULE = (
    "A difference in loss is beyond noise where any row of the table has as large a t in at most "
    f"{100 * ALPHA:g}% of the flips of the windows' signs, the same for all rows (step-down max-T); pairs of rows are "
    "judged in the same way, all pairs at once."
)
FRONTIER_RULE = (
    "Bold in tables and rings in figures are the frontier of bits and loss: no method of equal or fewer bits is better "
    "beyond noise, and it beats the ring to its left beyond noise; what is within noise of full precision competes, "
    "but is marked ≈ alone."
)
"""What tables, figures, the page and README say, word for word."""

FLIPS = 4096
"""Patterns of signs that `max_t` goes through: all of them up to 13 windows, random ones beyond."""

SHORT = 12
"""Tables of fewer windows say that they are short."""

_BATCH_VALUES = 2**22
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
    of a false finding is at most `ALPHA`, whichever hypotheses hold (`experiments/noise_levels.py` measures it).

    Args:
        differences: of windows' losses; weighted by nothing, since a sum of losses has the weight of its tokens.

    Returns:
        p-values at a resolution of 2^(1 - windows) or 1 / `FLIPS`; 1 where all differences are 0.
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
    signs = _signs(windows)
    reached, largest = np.zeros(tests), []
    for part in np.array_split(signs, math.ceil(signs.shape[0] * tests / _BATCH_VALUES)):
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
def _signs(windows: int) -> Float[np.ndarray, "patterns windows"]:
    """Patterns of signs, the observed one first; a pattern and its opposite are one."""
    if 2 ** (windows - 1) <= FLIPS:
        patterns = list(itertools.product((1.0, -1.0), repeat=windows - 1))
        others = np.array(patterns).reshape(len(patterns), windows - 1)
    else:
        others = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS, windows - 1))
        others[0] = 1.0
    return np.hstack([np.ones((len(others), 1)), others])


class Family(NamedTuple):
    """p-values of pairs by name, corrected for all of them; `windows` and the `critical` |t| of the most pairs.

    Pairs that did not score the same windows, or too few (`fewest_to_differ`), have none.
    """

    p: Mapping[Any, float]
    windows: int = 0
    critical: float = math.inf

    def differs(self, name: Hashable) -> bool:
        """Whether a pair differs beyond noise."""
        return self.p.get(name, 1.0) <= ALPHA


def family(pairs: Mapping[Name, tuple[Losses, Losses]]) -> Family:
    """`max_t` of all pairs of runs; those of other windows (a broken or an old run) are a family of their own."""
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
    return Family(p_values, windows, critical)
