from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from kvq.codecs import RandomizedHadamard
from kvq.tasks.distribution import (
    channel_kl,
    correlation_in_groups,
    hadamard,
    lemma_range,
    moments,
    nsn,
    oracle,
    synthetic_cosine,
    vector_cosine,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_papers_oracle() -> None:
    """Table 1: 4096 standard normal samples give .0096; the mean over 1000 draws is known to .0002."""
    assert oracle(1000) == pytest.approx(0.0096, abs=2e-4)


def test_kl_of_a_histogram_in_closed_form() -> None:
    x = torch.tensor([[0.05], [0.05], [0.15], [-9.0]])
    q = [stats.norm.cdf(0.1) - 0.5, stats.norm.cdf(0.2) - stats.norm.cdf(0.1), stats.norm.cdf(-4.9)]
    expected = sum(p * math.log(p / mass) for p, mass in zip((0.5, 0.25, 0.25), q, strict=True))
    assert float(channel_kl(x)) == pytest.approx(expected)


def test_steps_of_nsn() -> None:
    x = normal(1, 2, 128, 16) * 3 + 7
    n, ns, both = (nsn(x, step) for step in ("N", "NS", "NSN"))
    for y in (n, both):
        assert torch.allclose(y.square().sum(-1), torch.full((1, 2, 128), 16.0, dtype=torch.float64))
    assert float(ns.unflatten(2, (2, 64)).mean(3).abs().max()) < 1e-12
    assert torch.equal(nsn(x, "NS", None), n - n.mean(2, keepdim=True))
    assert not nsn(torch.zeros(1, 1, 4, 8), "NSN").any()


def test_nsn_and_hadamard_make_channels_normal() -> None:
    """The paper's point on made-up states: outlier channels and a common mean, both undone by NSN and a rotation."""
    x = normal(1, 1, 4096, 64) * torch.linspace(0.2, 2, 64) + 3
    kl = {step: float(channel_kl(hadamard(nsn(x, step))[0, 0]).mean()) for step in ("N", "NS", "NSN")}
    assert kl["NSN"] < 0.03 < kl["N"]
    assert float(channel_kl(nsn(x, "NSN")[0, 0]).mean()) > 3 * kl["NSN"]


def test_moments_in_closed_form() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 10.0]])[None, None]
    found = moments(x)
    assert found.mean.tolist() == [[3, 6]]
    assert found.deviation[0].tolist() == pytest.approx([(8 / 3) ** 0.5, (32 / 3) ** 0.5])
    assert float(found.off_diagonal) == pytest.approx(2**0.5 * 16 / 3)
    assert found.highest[0].tolist() == pytest.approx([16 / 3, 16 / 3])
    assert found.lowest[0].tolist() == [0, 0]  # no covariance is negative


def test_lemma_holds_on_correlated_channels() -> None:
    mix = torch.eye(32, dtype=torch.float64) + 0.2 * normal(32, 32, seed=1)
    x = nsn(normal(1, 1, 4096, 32) @ mix, "NSN", None)
    found = moments(x)
    limits = lemma_range(found.mean[0], float(found.off_diagonal), 0.05, 0.125)
    assert limits.high - 1 == pytest.approx(float(found.off_diagonal) * math.sqrt(math.log(40) / 0.125) / 32)
    variances = torch.stack([moments(RandomizedHadamard(seed).forward(x)[0]).deviation.square() for seed in range(20)])
    inside = ((variances >= limits.low) & (variances <= limits.high)).double().mean()
    assert float(inside) >= 0.95
    assert float(variances.mean()) == pytest.approx(1 - limits.epsilon, abs=1e-9)  # a rotation keeps their mean


def test_correlation_counts_pairs_within_groups_alone() -> None:
    base = normal(1, 1, 2000, 1)
    x = torch.cat([base.expand(-1, -1, -1, 8), normal(1, 1, 2000, 8, seed=1)], -1)
    assert float(correlation_in_groups(x)) == pytest.approx(0.5, abs=0.02)  # 1 in the first group, about 0 in the other
    assert float(correlation_in_groups(torch.ones(1, 1, 10, 8))) == 0


def test_normal_states_lie_on_the_synthetic_line() -> None:
    line = synthetic_cosine(512, 64, 2, "finetuned")
    assert 0.9 < line < 1
    assert float(vector_cosine(normal(1, 1, 512, 64, seed=9), 2, "finetuned")) == pytest.approx(line, abs=3e-3)
    assert synthetic_cosine(512, 64, 1, "finetuned") < line
