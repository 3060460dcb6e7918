"""The rule of noise: against its definition, and false marks and power under the committed windows' covariance."""

from __future__ import annotations

import itertools
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvq.errors import RecordError
from kvq.results.noise import (
    bounded_not_worse,
    compare_items,
    compare_pairs,
    differ_p,
    max_t,
    needed_for_not_worse,
    not_worse,
    not_worse_p,
    sign_flip,
)
from kvq.results.statistics import ALPHA, fewest_to_differ, losses, mcnemar
from tests.properties import examples
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
    found = compare_pairs({"same": (same, full), "other": (other, full), "broken": (broken, full)})
    assert dict(found.p) == {"same": 2 / 2**8}
    assert (found.windows, found.differs("same"), found.differs("other")) == (8, True, False)
    few = losses(made.samples([2.0] * (fewest_to_differ() - 1)))
    assert not compare_pairs({"few": (few, losses(made.samples([1.0] * (fewest_to_differ() - 1))))}).p
    assert not compare_pairs({}).p


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


Draw = Callable[[np.random.Generator, int], np.ndarray]


def test_not_worse_needs_items_even_where_nothing_flipped() -> None:
    for items in (10, 50, 58, 59, 200):
        # At the margin, with no gains at all, nothing is lost with this probability.
        assert not_worse(0, 0, items, 0.05) >= 0.95**items * (1 - 1e-12)
    assert not_worse(0, 0, 58, 0.05) > 0.05 > not_worse(0, 0, 59, 0.05) > not_worse(0, 0, 200, 0.05)
    assert not_worse(20, 0, 100, 0.05) > 0.99


def test_not_worse_is_near_tangos_normal_tail_where_items_are_many() -> None:
    # 2000 items, 60 lost, 20 gained: the likeliest rate of gains under a fall by 0.05 by Tango's own formula.
    n, lost, gained, margin = 2000, 60, 20, 0.05
    rates = np.linspace(1e-6, 0.4, 400_001)
    likelihood = lost * np.log(rates + margin) + gained * np.log(rates)
    likelihood += (n - lost - gained) * np.log(1 - 2 * rates - margin)
    rate = rates[np.argmax(likelihood)]
    z = (lost - gained - n * margin) / math.sqrt(n * (2 * rate + margin * (1 - margin)))
    assert not_worse(lost, gained, n, margin) == pytest.approx(stats.norm.cdf(z), rel=0.1)


@given(lost=st.integers(0, 20), gained=st.integers(0, 20), more=st.integers(0, 60))
@settings(max_examples=examples(40))
def test_not_worse_is_monotone(lost: int, gained: int, more: int) -> None:
    """Of the same items one lost more is no better, and one gained more no worse; nor is a wider margin."""
    items = lost + gained + more + 1
    p = not_worse(lost, gained, items, 0.1)
    assert 0 <= p <= 1
    assert not_worse(lost, gained, items, 0.2) <= p + 1e-9
    assert not_worse(lost + 1, gained, items, 0.1) >= p - 1e-9
    assert not_worse(lost, gained + 1, items, 0.1) <= p + 1e-9


@pytest.mark.parametrize("margin", [0.1, *(pytest.param(m, marks=pytest.mark.long) for m in (0.05, 0.2, 0.3))])
@pytest.mark.parametrize("items", [2, 3, 5, 10, 20, 50])
def test_the_error_of_not_worse_counted_over_all_outcomes(items: int, margin: float) -> None:
    """Right or wrong answers that fall by the margin or more, at any rate of gains: passed at most one time in 20."""
    outcomes = [(lost, gained) for lost in range(items + 1) for gained in range(items + 1 - lost)]
    # What passes with some gains passes with more, so the edge of the region is enough.
    passed = []
    for lost in range(items + 1):
        edge = next((g for g in range(items + 1 - lost) if not_worse(lost, g, items, margin) <= ALPHA), None)
        if edge is None:
            break
        passed += [(lost, gained) for gained in range(edge, items + 1 - lost)]
    assert set(passed) <= set(outcomes)
    if not passed:
        return
    counts = np.array([(lost, gained, items - lost - gained) for lost, gained in passed])
    worst = 0.0
    for fall in (margin, margin + 0.03, margin + 0.2):
        for gains in np.linspace(0, (1 - fall) / 2, 60):
            rates = [gains + fall, gains, max(0.0, 1 - 2 * gains - fall)]
            worst = max(worst, float(stats.multinomial.pmf(counts, items, rates).sum()))
    assert worst <= ALPHA + 1e-9


@pytest.mark.parametrize("items", [2, 3, 5, 6, 8, 12, 20, 50])
def test_the_error_of_p_for_right_or_wrong_answers(items: int) -> None:
    """Given that `items` flipped, either direction has probability 1/2."""
    for level in (0.01, 0.05, 0.2):
        error = sum(
            stats.binom.pmf(lost, items, 0.5) for lost in range(items + 1) if mcnemar(lost, items - lost) <= level
        )
        assert error <= level + 1e-12


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=2, max_size=9))
@settings(max_examples=examples(30))
def test_the_error_of_sign_flips_counted_over_all_signs(sizes: list[float]) -> None:
    """Whatever the sizes of the differences: at most a share of `level` of the patterns of their signs has such a p."""
    found = [sign_flip(np.array(sizes) * signs) for signs in itertools.product((1, -1), repeat=len(sizes))]
    for level in (0.01, 0.03, 0.05, 0.1, 0.25, 0.5):
        assert np.mean(np.array(found) <= level) <= level
    assert max(found) <= 1


def test_sign_flips_against_their_definition() -> None:
    differences = np.array([0.1, -0.2, 0.3, 0.4, -0.05, 0.25, 0.3])
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in
            itertools.product((1, -1), repeat=7)]  # fmt: skip
    reached = sum(total >= abs(differences.sum()) - 1e-12 for total in sums)
    assert sign_flip(differences) == pytest.approx(reached / 2**7)
    assert sign_flip(np.full(60, 0.2)) == 2.0**-59
    assert sign_flip(np.zeros(5)) == 1
    # Random patterns, the observed one counted in: near the normal tail, and a function of the differences alone.
    many = np.random.default_rng(3).normal(0.3, 1, 60)
    z = many.sum() / math.sqrt(float(many @ many))
    assert sign_flip(many) == pytest.approx(2 * stats.norm.sf(abs(z)), abs=0.01)
    assert sign_flip(many) == sign_flip(many)


def _rouge(rng: np.random.Generator, items: int) -> np.ndarray:
    """Scores as ROUGE-L has them: many zeros, some whole, the rest spread low."""
    kind = rng.uniform(size=items)
    return np.where(kind < 0.3, 0.0, np.where(kind > 0.95, 1.0, rng.beta(1.2, 4, size=items)))


SCORES: dict[str, Draw] = {
    "right or wrong": lambda rng, items: (rng.uniform(size=items) < 0.6).astype(float),
    "ROUGE-like": _rouge,
    "constant": lambda rng, items: np.full(items, 0.37),
    "skewed": lambda rng, items: (rng.uniform(size=items) < 0.03) * rng.uniform(size=items),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("items", [2, 3, 5, 6, 10, 20, 50])
@pytest.mark.parametrize("name", SCORES)
def test_two_runs_of_one_distribution_seldom_differ(name: str, items: int) -> None:
    rng = np.random.default_rng([len(name), items])
    trials = 400 if items < 20 else 100
    found = [differ_p(SCORES[name](rng, items), SCORES[name](rng, items)) for _ in range(trials)]
    wrong = sum(p is not None and p <= ALPHA for p in found)
    assert wrong <= stats.binom.ppf(0.9999, trials, ALPHA)
    if items < fewest_to_differ() or name == "constant":
        assert wrong == 0
        assert set(found) == ({None} if items < fewest_to_differ() else {1.0})


def _falls(name: str, margin: float, rng: np.random.Generator, items: int) -> np.ndarray:
    """Differences within [-1, 1] with a mean of exactly -margin."""
    if name == "seldom lost":
        return -(rng.uniform(size=items) < margin).astype(float)
    if name == "gains hide losses":  # many small gains, seldom a total loss
        gain = 0.05
        return np.where(rng.uniform(size=items) < (margin + gain) / (1 + gain), -1.0, gain)
    if name == "constant":
        return np.full(items, -margin)
    if name == "ROUGE-like":
        spread = rng.beta(1.2, 4, size=items) - 1.2 / 5.2  # mean 0, above -0.24
        return np.clip(spread * 0.7 - margin, -1, 1)
    lost, gained = margin + 0.1, 0.1
    kind = rng.uniform(size=items)
    return np.where(kind < lost, -1.0, np.where(kind > 1 - gained, 1.0, 0.0))


@pytest.mark.parametrize("margin", [0.2, *(pytest.param(margin, marks=pytest.mark.long) for margin in (0.05, 0.5))])
@pytest.mark.parametrize("name", ["seldom lost", "gains hide losses", "constant", "ROUGE-like", "flips"])
def test_graded_scores_that_fell_by_the_margin_seldom_pass(name: str, margin: float) -> None:
    trials = 1000
    for items in (2, 5, 10, 20, 50):
        rng = np.random.default_rng([len(name), items])
        wrong = sum(bounded_not_worse(_falls(name, margin, rng, items), margin) <= ALPHA for _ in range(trials))
        assert wrong <= stats.binom.ppf(0.9999, trials, ALPHA)


def test_wealth_is_one_on_average_at_the_margin() -> None:
    """Counted over all outcomes: 1/p has a mean of at most one, which is what makes p a p-value."""
    margin, values, shares = 0.1, np.array([-1.0, -0.3, 0.0, 0.2]), np.array([0.1, 0.08, 0.702, 0.118])
    shares[-1] = (shares[0] + 0.3 * shares[1] - margin) / 0.2
    shares[2] = 1 - shares[[0, 1, 3]].sum()
    assert shares @ values == pytest.approx(-margin)
    for items in (1, 2, 4):
        mean = 0.0
        for drawn in itertools.product(range(4), repeat=items):
            p = bounded_not_worse(values[list(drawn)], margin)
            mean += float(np.prod(shares[list(drawn)])) * (p <= 0.5) / 0.5
        assert mean <= 1 + 1e-9


@pytest.mark.parametrize("margin", [0.02, 0.05, 0.1, 0.3])
def test_how_many_items_equal_scores_take(margin: float) -> None:
    for binary, scores in ((True, 1.0), (False, 0.9)):
        needed = needed_for_not_worse(margin, binary)
        same = np.full(needed, scores)
        assert not_worse_p(same[1:], same[1:], margin) is None
        p = not_worse_p(same, same, margin)
        assert p is not None
        assert p <= ALPHA
    assert fewest_to_differ() == 6


def test_what_the_issue_of_few_items_was() -> None:
    two = compare_items(np.array([0.0, 0.0]), np.array([0.04, 0.03]), margin=0.05)
    assert two == {"flips": 1.0, "within_noise": 1.0, "not_worse": 0.0}
    # Three items of which full precision gets little: not even an equal run is shown to be as good.
    theirs = np.array([0.03, 0.04, 0.02])
    for ours in (np.zeros(3), theirs):
        assert compare_items(ours, theirs, margin=0.05)["not_worse"] == 0
        assert compare_items(ours, theirs, margin=0.05)["within_noise"] == 1


@given(st.integers(2, 400), st.floats(0.0, 1.0), st.sampled_from([0.02, 0.05, 0.2]), st.booleans(), st.integers(0, 99))
@settings(max_examples=examples(60))
def test_scoring_nothing_is_never_not_worse(items: int, level: float, margin: float, binary: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    theirs = rng.uniform(size=items) * level
    theirs = (theirs > 0.5).astype(float) if binary else theirs
    found = compare_items(np.zeros(items), theirs, margin=margin)
    assert found["not_worse"] == 0
    same = compare_items(theirs, theirs, margin=margin)
    assert same["within_noise"] == 1
    assert same.get("p_value", 1.0) == 1


def test_scores_that_are_no_fractions_have_no_margin() -> None:
    ours, theirs = np.linspace(1, 90, 200), np.linspace(2, 91, 200)
    found = compare_items(ours, theirs, margin=0.05)
    assert "not_worse_p" not in found
    assert found["not_worse"] == 0
    assert found["p_value"] < 1e-3


def test_only_the_same_items() -> None:
    for bad in ((np.ones(3), np.ones(4)), (np.ones(0), np.ones(0))):
        with pytest.raises(RecordError, match="same items"):
            compare_items(*bad, margin=0.05)
    with pytest.raises(RecordError, match="margin=1"):
        compare_items(np.ones(3), np.ones(3), margin=1.0)
