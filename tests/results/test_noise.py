"""The rule of noise: against its definition, and false marks and power under the committed windows' covariance."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvq.results.noise import family, max_t
from kvq.results.statistics import ALPHA, fewest_to_differ, losses
from tests.results import made

ROOT = Path(__file__).parents[2]
LEVELS = runpy.run_path(str(ROOT / "experiments" / "bench" / "noise_levels.py"))
DRAWS = 60


def by_definition(differences: np.ndarray) -> list[float]:
    """Step-down max-T over all patterns of signs, one test after the other."""
    tests, windows = differences.shape
    signs = np.array(list(itertools.product((1, -1), repeat=windows)))
    roots = np.sqrt((differences**2).sum(axis=1))
    flipped = np.abs(signs @ differences.T) / np.where(roots > 0, roots, 1)
    observed, left, largest, found = flipped[0], list(range(tests)), 0.0, [0.0] * tests
    for test in sorted(left, key=lambda test: -observed[test]):
        share = float(np.mean(flipped[:, left].max(axis=1) >= observed[test] - 1e-9))
        largest = max(largest, share)
        found[test] = largest
        left.remove(test)
    return found


@given(seed=st.integers(0, 30), tests=st.integers(1, 6), windows=st.integers(1, 7))
def test_p_values_are_those_of_the_definition(seed: int, tests: int, windows: int) -> None:
    differences = np.random.default_rng(seed).normal(size=(tests, windows)) + np.arange(tests)[:, None]
    found = max_t(differences)
    assert found.p.tolist() == pytest.approx(by_definition(differences))
    assert max_t(-3e150 * differences).p.tolist() == pytest.approx(found.p.tolist())


def test_one_pair_is_a_sign_test_of_the_sum() -> None:
    assert max_t(np.ones((1, 8))).p.tolist() == [2 / 2**8]
    assert max_t(np.zeros((2, 8))).p.tolist() == [1.0, 1.0]
    assert max_t(np.ones((1, 40))).p.tolist() == [pytest.approx(1 / 4096)]
    assert max_t(np.ones((0, 8))) == (pytest.approx(np.ones(0)), math.inf)


def test_critical_t_is_where_findings_begin() -> None:
    noise = np.random.default_rng(3).normal(size=(12, 29))
    needed = max_t(noise).critical
    for share in (0.9, 1.1):
        row = noise[0] - noise[0].mean()
        row += share * needed * row.std(ddof=1) / math.sqrt(29)
        assert (max_t(np.vstack([noise[1:], row])).p[-1] <= ALPHA) == (share > 1)
    assert max_t(noise[:, :5]).critical == math.inf


def test_only_pairs_of_the_same_windows_are_judged() -> None:
    full, same = losses(made.samples([1.0] * 8)), losses(made.samples([2.0] * 8))
    other, broken = losses(made.samples([2.0] * 9)), losses(made.samples([math.nan] * 8))
    found = family({"same": (same, full), "other": (other, full), "broken": (broken, full)})
    assert dict(found.p) == {"same": 2 / 2**8}
    assert (found.windows, found.differs("same"), found.differs("other")) == (8, True, False)
    few = losses(made.samples([2.0] * (fewest_to_differ() - 1)))
    assert not family({"few": (few, losses(made.samples([1.0] * (fewest_to_differ() - 1))))}).p
    assert not family({}).p


@pytest.fixture(scope="module")
def sources() -> Any:
    return LEVELS["protocols"]()


@pytest.mark.thin(4)
@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, LEVELS["OFFSET"]])
@pytest.mark.parametrize("windows", [4, 8, 12, 29])
def test_a_table_of_40_equal_methods_seldom_has_a_false_mark(sources: Any, windows: int, offset: float) -> None:
    """As good as full precision, or all worse by the same: in at most 5% of tables, `noise_levels.py` draws more."""
    wrong = LEVELS["false_marks"](sources["tiny_hard"], windows, DRAWS, offset=offset)
    assert wrong <= scipy.stats.binom.ppf(0.999, DRAWS, ALPHA)


@pytest.mark.long
@pytest.mark.parametrize("windows", [4, 8, 12, 29])
def test_false_marks_over_many_draws(sources: Any, windows: int) -> None:
    wrong = sum(LEVELS["false_marks"](source, windows, 500) for source in sources.values())
    assert wrong <= 0.06 * 500 * len(sources)


def test_the_cheapest_of_equal_methods_is_marked(sources: Any) -> None:
    generator = np.random.default_rng(5)
    for windows in (8, 29):
        noise = LEVELS["drawn"](sources["tiny"], windows, generator)
        found = LEVELS["marks"](noise + LEVELS["OFFSET"] * noise.std(axis=1).max())
        assert found.frontier[:1] == [0]
        assert len(found.differ) == LEVELS["ROWS"]


@pytest.mark.long
def test_a_difference_is_found_the_sooner_the_more_windows(sources: Any) -> None:
    found = [LEVELS["smallest_found"](sources["tiny_hard"], windows, 60) for windows in (4, 8, 12, 29)]
    assert found[0] == math.inf
    assert all(fewer > 1.2 * more for fewer, more in itertools.pairwise(found))


def test_committed_windows_are_not_correlated_with_their_neighbours(sources: Any) -> None:
    """Flips of single windows take them as independent; `noise_levels.py` says what a correlation would cost."""
    assert len(sources) == 4
    assert all(abs(LEVELS["serial_correlation"](source)) < 0.1 for source in sources.values())
    correlated = np.random.default_rng(0).normal(size=(40, 30)).cumsum(axis=1)
    assert LEVELS["serial_correlation"](correlated) > 0.5
