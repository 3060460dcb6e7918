"""Shrinkage of moments that were summed up on the way, against scikit-learn on the states themselves."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf, ledoit_wolf_shrinkage

from kvq.calibration.budget import Sums
from kvq.codecs import FisherTransform
from kvq.codecs.second_moments import ledoit_wolf as share_of
from kvq.errors import ConfigError
from tests.properties import examples


def drawn(heads: int, tokens: int, dim: int, seed: int, spread: float) -> torch.Tensor:
    """`[1, heads, tokens, dim]` in fp64: correlated channels of different sizes, tails as heavy as `spread` says."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, dim, generator=generator, dtype=torch.float64)
    x = x * (spread * torch.randn(1, 1, tokens, 1, generator=generator, dtype=torch.float64)).exp()
    return x @ torch.randn(dim, dim, generator=generator, dtype=torch.float64)


def summed(states: torch.Tensor, gradients: torch.Tensor, lengths: list[int]) -> Sums:
    sums = Sums()
    for x, g in zip(states.split(lengths, 2), gradients.split(lengths, 2), strict=True):
        sums.see(x, None, torch.arange(x.shape[2]))
        sums.see_gradient(g, None, torch.arange(x.shape[2]))
    return sums


def rows(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1).flatten(1)


@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(
    heads=st.integers(1, 3),
    dim=st.integers(1, 9),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) > 1),
    mean=st.sampled_from([0.0, 1.0, -300.0]),
    spread=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_shares_are_those_of_scikit_learn(
    heads: int, dim: int, lengths: list[int], mean: float, spread: float, seed: int
) -> None:
    """States about their mean, gradients about 0, also where means are large and windows are empty."""
    x, g = drawn(heads, sum(lengths), dim, seed, spread) + mean, drawn(heads, sum(lengths), dim, seed + 1, spread)
    moments = summed(x, g, lengths).moments
    assert moments.fourth is not None
    assert moments.fisher_fourth is not None
    expected = ledoit_wolf_shrinkage(rows(x).numpy())
    assert share_of(moments.covariance, moments.fourth, moments.tokens) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    expected = ledoit_wolf_shrinkage(rows(g).numpy(), assume_centered=True)
    assert share_of(moments.fisher, moments.fisher_fourth, moments.tokens) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("together", [None, 1])
def test_the_transform_is_that_of_shrunk_matrices(together: int | None) -> None:
    """Eigenvalues of S F, both from scikit-learn; each group of heads has its blocks of them."""
    x, g = drawn(3, 60, 4, 0, 0.3) + 2, drawn(3, 60, 4, 1, 0.3)
    moments = summed(x, g, [25, 35]).moments
    found = FisherTransform("full", together, ridge="ledoit_wolf", mixing="ledoit_wolf").fit_joint(moments)["spectrum"]
    covariance, _ = ledoit_wolf(rows(x).numpy())
    fisher, _ = ledoit_wolf(rows(g).numpy(), assume_centered=True)
    blocks = torch.arange(12).split(12 if together is None else 4)
    expected = [
        torch.linalg.eigvals(torch.from_numpy(covariance[own][:, own] @ fisher[own][:, own])).real for own in blocks
    ]
    torch.testing.assert_close(
        found[0].double(), torch.cat(expected).sort(descending=True).values, rtol=1e-5, atol=1e-9
    )
    plain = FisherTransform("full", together).fit_joint(moments)["spectrum"]
    assert not torch.allclose(found, plain, rtol=1e-2)


def test_other_words_are_refused() -> None:
    for given in ({"ridge": "oas"}, {"mixing": "oas"}):
        with pytest.raises(ConfigError, match=r"=oas: .*, or ledoit_wolf"):
            FisherTransform(**given)  # type: ignore[arg-type]
