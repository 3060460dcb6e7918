"""The bootstrap against closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import RecordError
from kvq.results.statistics import (
    Estimate,
    delta_nll,
    delta_nll_of_samples,
    flips,
    holm,
    mcnemar,
    paired_mean,
    perplexity,
    perplexity_of_samples,
    spearman,
)
from tests.results import made


def test_standard_error_of_iid_windows() -> None:
    values = np.random.default_rng(1).normal(size=200)
    found = delta_nll(values, np.zeros(200), np.ones(200), block=1, resamples=20_000)
    exact = values.std(ddof=1) / math.sqrt(200)
    assert found.value == pytest.approx(values.mean(), abs=1e-12)
    # The error of a bootstrap standard error is 1/sqrt(2 * resamples) = 0.5% here.
    assert found.standard_error == pytest.approx(exact, rel=0.02)
    assert found.low == pytest.approx(values.mean() - 1.96 * exact, abs=0.1 * exact)
    assert found.high == pytest.approx(values.mean() + 1.96 * exact, abs=0.1 * exact)
    assert found.blocks == 200


def test_standard_error_of_two_blocks_is_exact() -> None:
    # Resampled means of {0, 1}: 0, 1/2, 1 with 1/4, 1/2, 1/4: variance 1/8; times B/(B-1) = 2: s^2 / n = 1/4.
    found = delta_nll(np.array([0.0, 1.0]), np.zeros(2), np.ones(2), block=1, resamples=40_000)
    assert found.standard_error == pytest.approx(0.5, rel=0.02)


def test_blocks_see_what_neighbours_share() -> None:
    # Every 4 windows are equal: blocks of 4 know that there are 50 values, single windows believe in 200.
    values = np.repeat(np.random.default_rng(2).normal(size=50), 4)
    single, blocks = (delta_nll(values, np.zeros(200), np.ones(200), block=b, resamples=5000) for b in (1, 4))
    assert (single.blocks, blocks.blocks) == (200, 50)
    assert blocks.standard_error == pytest.approx(values[::4].std(ddof=1) / math.sqrt(50), rel=0.04)
    assert blocks.standard_error == pytest.approx(2 * single.standard_error, rel=0.06)


def test_interval_covers() -> None:
    generator, hits = np.random.default_rng(3), 0
    for seed in range(200):
        values = generator.normal(loc=0.3, size=60)
        found = delta_nll(values, np.zeros(60), np.ones(60), block=2, resamples=300, seed=seed)
        hits += found.low <= 0.3 <= found.high
    assert 176 <= hits <= 200  # 95% of 200 is 190; percentile intervals of 30 blocks cover about 93%


def test_pairing_removes_what_the_text_shares() -> None:
    generator = np.random.default_rng(4)
    text = generator.normal(scale=100, size=64)
    found = delta_nll(text + 1.0, text, np.full(64, 10.0))
    assert found.value == pytest.approx(0.1, abs=1e-12)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)


def test_windows_weigh_by_their_tokens() -> None:
    nll, tokens = np.array([300.0, 10.0, 20.0]), np.array([100, 10, 10])
    assert delta_nll(nll, np.zeros(3), tokens, block=1).value == pytest.approx(330 / 120)
    assert perplexity(nll, tokens, block=1).value == pytest.approx(math.exp(330 / 120))


def test_perplexity_error_is_the_deltas_rule() -> None:
    nll = 100 * np.random.default_rng(5).normal(2.5, 0.05, size=100)
    found, plain = perplexity(nll, np.full(100, 100)), delta_nll(nll, np.zeros(100), np.full(100, 100))
    assert found.value == pytest.approx(math.exp(nll.mean() / 100))
    assert found.standard_error == pytest.approx(found.value * plain.standard_error, rel=0.02)


@pytest.mark.parametrize(("windows", "block"), [(1, 1), (1, 4), (4, 4), (3, 9)])
def test_one_block_has_no_error(windows: int, block: int) -> None:
    found = delta_nll(np.full(windows, 3.0), np.full(windows, 1.0), np.ones(windows), block=block)
    assert found == Estimate(2.0, None, None, None, 1)


@given(seed=st.integers(0, 5), windows=st.integers(1, 30), block=st.integers(1, 8))
def test_properties(seed: int, windows: int, block: int) -> None:
    generator = np.random.default_rng(seed)
    ours, theirs = generator.normal(size=(2, windows))
    tokens = generator.integers(1, 50, size=windows)
    found = delta_nll(ours, theirs, tokens, block=block, resamples=50, seed=seed)
    assert found == delta_nll(ours, theirs, tokens, block=block, resamples=50, seed=seed)
    assert found.blocks == math.ceil(windows / block)
    back = delta_nll(theirs, ours, tokens, block=block, resamples=50, seed=seed)
    assert back.value == pytest.approx(-found.value)
    if found.blocks > 1:
        assert found.low <= found.high
        assert back.standard_error == pytest.approx(found.standard_error)
    same = delta_nll(ours, ours, tokens, block=block, resamples=50)
    assert (same.value, same.standard_error) == ((0.0, 0.0) if found.blocks > 1 else (0.0, None))


def test_samples() -> None:
    ours, theirs = made.samples([10.0, 30.0, 20.0]), made.samples([10.0, 10.0, 10.0])
    assert delta_nll_of_samples(ours, theirs).value == pytest.approx(30 / 300)
    assert perplexity_of_samples(ours).value == pytest.approx(math.exp(60 / 300))
    for bad in (theirs[:2], [], [{**row, "tokens": 7} for row in theirs], theirs[::-1]):
        with pytest.raises(RecordError, match="same windows"):
            delta_nll_of_samples(ours, bad)
    with pytest.raises(RecordError, match="'nll'"):
        delta_nll_of_samples(ours, [{"window": 0, "tokens": 1}])
    with pytest.raises(RecordError, match="0 losses for 0 windows"):
        delta_nll_of_samples([], [])
    with pytest.raises(RecordError, match="scored tokens in all"):
        perplexity_of_samples([{"window": 0, "tokens": 0, "nll": 0.0}])


@pytest.mark.parametrize("settings", [{"block": 0}, {"resamples": 1}])
def test_settings_out_of_range(settings: dict[str, int]) -> None:
    with pytest.raises(RecordError, match="block >= 1, resamples >= 2"):
        perplexity(np.ones(4), np.ones(4), **settings)


def test_flips_are_counted_by_direction() -> None:
    assert flips(np.array([1, 0, 0, 1, 1]), np.array([1, 1, 1, 0, 1])) == (2, 1)


@given(lost=st.integers(0, 12), gained=st.integers(0, 12))
def test_mcnemar_is_the_sum_over_all_directions(lost: int, gained: int) -> None:
    flipped = lost + gained
    as_likely = math.comb(flipped, lost)
    tail = sum(math.comb(flipped, k) for k in range(flipped + 1) if math.comb(flipped, k) <= as_likely)
    assert mcnemar(lost, gained) == pytest.approx(tail / 2**flipped)
    assert mcnemar(lost, gained) == pytest.approx(mcnemar(gained, lost))


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(6, 0) == pytest.approx(2 / 64)  # the fewest losses that are significant at 5%
    assert mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)


def test_paired_mean_is_free_of_how_hard_items_are() -> None:
    generator = np.random.default_rng(6)
    hard = generator.uniform(size=150)
    found = paired_mean(hard - 0.1 * generator.uniform(size=150), hard, resamples=500)
    assert found.value == pytest.approx(-0.05, abs=0.01)
    assert found.standard_error == pytest.approx(0.1 / math.sqrt(12 * 150), rel=0.15)
    assert found.blocks == 150


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, and never falling: 0.04, 0.06, 0.06, 0.06.
    found = holm({"a": 0.03, "b": 0.01, "c": 0.04, "d": 0.02})
    assert list(found) == ["a", "b", "c", "d"]
    assert found == pytest.approx({"a": 0.06, "b": 0.04, "c": 0.06, "d": 0.06})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@given(st.dictionaries(st.integers(), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_nothing_and_bonferroni(p_values: dict[int, float]) -> None:
    found = holm(p_values)
    for name, p in p_values.items():
        assert p <= found[name] <= min(1.0, len(p_values) * p)
    ordered = [found[name] for name in sorted(p_values, key=lambda name: p_values[name])]
    assert ordered == sorted(ordered)


def test_spearman_against_its_definition() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 1.0, 4.0, 3.0, 6.0, 5.0]
    found = spearman(x, y)
    differences = sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
    rho = 1 - 6 * differences / (6 * 35)
    assert (found.n, found.rho) == (6, pytest.approx(rho))
    reach = 1.959964 * ((1 + rho**2 / 2) / 3) ** 0.5
    assert found.low == pytest.approx(np.tanh(np.arctanh(rho) - reach))
    assert found.high == pytest.approx(np.tanh(np.arctanh(rho) + reach))
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == (3, -1.0, None, None, None)
    orders = list(itertools.permutations(y))
    extreme = sum(abs(scipy.stats.spearmanr(x, order).statistic) >= abs(rho) - 1e-9 for order in orders)
    assert found.p == pytest.approx(extreme / len(orders))
    many = [*x, 7.0, 8.0, 9.0], [*y, 9.0, 7.0, 8.0]
    t = (rho := spearman(*many).rho) * (7 / (1 - rho**2)) ** 0.5
    assert spearman(*many).p == pytest.approx(2 * scipy.stats.t.sf(t, 7))
    assert spearman([1.0, 2.0], [3.0, 2.0]).rho is None
    assert spearman([1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]).rho is None


def test_spearman_covers() -> None:
    generator, hits = np.random.default_rng(8), 0
    for _ in range(200):
        x, noise = generator.normal(size=(2, 40))
        found = spearman(x.tolist(), (0.6 * x + 0.8 * noise).tolist())
        hits += found.low <= 6 / math.pi * math.asin(0.6 / 2) <= found.high
    assert 180 <= hits <= 200
