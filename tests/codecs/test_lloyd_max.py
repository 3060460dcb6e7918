"""Scalar codebooks of the sphere's marginal: optimality and the published errors."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from kvq.codecs import (
    CalibratedChannelSplit,
    Codec,
    LloydMaxQuantizer,
    RandomizedHadamard,
    RandomRotation,
    TokenNorm,
    optimal_levels,
)
from kvq.codecs.lloyd_max import Start, codebook, density, levels_from, partial_mean, tail
from tests.calibrated import fitted
from tests.codecs.oracles import block, level_error
from tests.properties import examples

MSE_128 = {1: 0.3609, 2: 0.1160, 3: 0.03397, 4: 0.009315, 5: 0.002451, 6: 0.000630, 7: 0.0001598, 8: 0.0000402}
"""Relative MSE at D=128 by an independent quadrature."""


@pytest.mark.parametrize("bits", MSE_128)
def test_errors_at_128_channels(bits):
    error = level_error(optimal_levels(bits, 128), 128)
    assert error == pytest.approx(MSE_128[bits], rel=0.005)
    assert error <= math.sqrt(3) * math.pi / 2 * 4.0**-bits


@given(bits=st.integers(1, 8), dim=st.sampled_from([3, 4, 7, 16, 32, 64, 96, 128, 200, 256, 512]))
@settings(max_examples=examples(30))
def test_lloyds_conditions_hold_under_numerical_integration(bits, dim):
    """Each level is the mean of its cell: integrals by quadrature against the closed forms."""
    levels, f = optimal_levels(bits, dim), curve(dim)
    ends = [0.0, *((levels[1:] + levels[:-1]) / 2), 1.0]
    for level, (low, high) in list(zip(levels, itertools.pairwise(ends), strict=True))[:: max(1, len(levels) // 4)]:
        mass = integrate.quad(f, low, high, epsabs=0, epsrel=1e-9)[0]
        mean = integrate.quad(lambda t: t * f(t), low, high, epsabs=0, epsrel=1e-9)[0]
        assert level == pytest.approx(mean / mass, rel=1e-6)


def curve(dim):
    return lambda t: float(density(np.array([t]), dim)[0])


def test_three_dimensions_are_uniform():
    """On the sphere in space every coordinate is uniform: levels in the middle of equal cells (Archimedes)."""
    np.testing.assert_allclose(optimal_levels(3, 3), [1 / 8, 3 / 8, 5 / 8, 7 / 8], atol=1e-12)


def test_tails():
    for dim in (3, 16, 128):
        assert tail(np.zeros(1), dim) == pytest.approx([0.5])
        t = np.array([0.05, 0.1])
        mass, mean = -np.diff(tail(t, dim))[0], -np.diff(partial_mean(t, dim))[0]
        f = curve(dim)
        assert mass == pytest.approx(integrate.quad(f, *t)[0])
        assert mean == pytest.approx(integrate.quad(lambda v, f=f: v * f(v), *t)[0])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_codes_are_the_nearest_levels(bits):
    codec = LloydMaxQuantizer(bits)
    x = torch.nn.functional.normalize(block(2, 30, 64), dim=-1)
    half = optimal_levels(bits, 64)
    levels = torch.from_numpy(np.concatenate([-half[::-1], half]))
    nearest = levels[(x[..., None] - levels).abs().argmin(-1)]
    out = codec.decode(codec.encode(x, x.dtype), x.shape, x.dtype)
    torch.testing.assert_close(out, nearest, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_measured_error_of_rotated_tokens(bits):
    """Any tokens, once rotated, have the error of the codebook."""
    codec = Codec({"norm": TokenNorm(), "rotation": RandomRotation()}, ["norm", "rotation"], LloydMaxQuantizer(bits))
    x = block(8, 256, 128)
    error = (codec.decode(codec.encode(x)) - x).square().sum(-1) / x.square().sum(-1)
    assert float(error.mean()) == pytest.approx(MSE_128[bits], rel=0.02)


def states(*shape, seed=901):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("start", get_args(Start))
def test_every_start_leads_to_the_optimal_levels(start, bits):
    np.testing.assert_allclose(levels_from(bits, 64, start, 3000), codebook(bits, 64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("bits", "printed"), [(1, 0.097), (2, 0.006), (4, 0.000241)])
def test_even_levels_have_the_printed_errors(bits, printed):
    """KVQuant++, section 2.2.1: mean squared error of a coordinate before Lloyd's steps, D=64, by 100,000 samples.

    The printed numbers lie within two standard errors of a quantile of so many samples.
    """
    levels = levels_from(bits, 64, "even")
    end = levels[-1:]
    assert 2 * float(tail(end, 64)[0]) == pytest.approx(0.001)
    spread = 2 * (0.001 * 0.999 / 100_000) ** 0.5 / (2 * float(density(end, 64)[0])) / float(end[0])
    low, here, high = (relative_error(levels * (1 + by), 64) / 64 for by in (-spread, 0, spread))
    print(f"{bits} bits: {here:.6f} ({low:.6f} to {high:.6f}), printed {printed}")
    assert low < printed < high


@pytest.mark.long
def test_draws_are_not_folded():
    """Levels of k-means++ are samples as drawn, on both sides; over seeds the printed error (0.024) is a common one."""
    drawn = [levels_from(1, 64, "kmeans_plus_plus", seed=seed) for seed in range(200)]
    assert not any(np.isclose(low, -high) for low, high in drawn)
    errors = [relative_error(levels, 64) / 64 for levels in drawn[:60]]
    print(f"k-means++ at 1 bit: quartiles of error {np.quantile(errors, [0.25, 0.5, 0.75]).round(4)}, printed 0.024")
    assert np.quantile(errors, 0.02) < 0.024 < np.quantile(errors, 0.98)


def relative_error(levels, dim):
    """Of levels that need not be centroids, by a sum over a fine grid of the density of a coordinate."""
    t = (np.arange(40_000) - 19_999.5) / 20_000
    weight = (1 - t**2) ** ((dim - 3) / 2)
    middles = (levels[1:] + levels[:-1]) / 2
    return float((weight * (t - levels[np.searchsorted(middles, t)]) ** 2).sum() / (weight * t**2).sum())


def test_quantiles_are_equally_probable():
    """The start `quantile` by samples: each level has as many samples between it and its neighbours' quantiles."""
    levels = levels_from(3, 64, "quantile")[4:]
    samples = torch.nn.functional.normalize(states(200_000, 64), dim=-1)[:, 0].abs().numpy()
    expected = np.quantile(samples, (np.arange(4) + 0.5) / 4)
    np.testing.assert_allclose(levels, expected, rtol=0.02)


def test_channels_of_largest_variance_of_differences():
    """Channels that jump from token to token, not those that go far, slowly."""
    x = states(1, 1, 200, 16).float().cumsum(2)
    x[..., :4] = torch.linspace(-50, 50, 200)[:, None] + 0.01 * x[..., :4]
    x[..., 4:8] += 5 * states(1, 1, 200, 4, seed=903).float()
    groups = split(rotation=RandomRotation).quantizer
    for differences, chosen in ((False, range(4)), (True, range(4, 8))):
        codec = Codec({}, [], CalibratedChannelSplit(groups.high, groups.low, differences=differences))
        mask = fitted(codec, x).quantizer.tables["mask"]
        assert mask.flatten().nonzero().flatten().tolist() == list(chosen)


@pytest.mark.parametrize(("dim", "gap"), [(8, 0.01), (128, 1e-4)])
def test_the_sphere_has_less_error_than_its_normal_limit(dim, gap):
    """The levels of N(0, 1/D) in place of the exact ones cost more where there are few channels."""
    half = optimal_levels(2, math.inf) / dim**0.5
    exact, normal = (relative_error(book, dim) for book in (codebook(2, dim), np.concatenate([-half[::-1], half])))
    print(f"2 bits, D={dim}: sphere {exact:.5f}, normal {normal:.5f}")
    assert normal - exact > 0
    assert (normal / exact - 1 > gap) == (dim == 8)


def split(outliers=None, rotation=RandomizedHadamard, bits=3):
    def codec(seed, extra, **bounds):
        stages = {"norm": TokenNorm(), "rotation": rotation(seed)}
        return Codec(stages, list(stages), LloydMaxQuantizer(bits, extra, **bounds))

    return Codec({}, [], CalibratedChannelSplit(codec(0, 1, most=4), codec(2, -1, least=1), outliers))


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_channels_of_largest_variance(data):
    """By hand: variances of a head's channels; the largest through one codec, the others through the other."""
    heads, dim = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 32]))
    outliers = data.draw(st.sampled_from([None, 3, 5]))
    x = states(1, heads, 40, dim, seed=data.draw(st.integers(1000, 1100)))
    x = (x * torch.exp(states(1, heads, 1, dim, seed=data.draw(st.integers(1101, 1200)))) + 5).float()
    codec = fitted(split(outliers, RandomRotation), x)
    test = states(2, heads, 20, dim, seed=1300).float()
    out = codec.decode(codec.encode(test, 8))
    count = dim // 4 if outliers is None else outliers
    for head in range(heads):
        variance = [np.var(x[0, head, :, channel].double().numpy()) for channel in range(dim)]
        chosen = sorted(np.argsort(variance)[-count:].tolist())
        others = [channel for channel in range(dim) if channel not in chosen]
        for part, picked in ((codec.quantizer.high, chosen), (codec.quantizer.low, others)):
            piece = test[:, head : head + 1, :, picked].contiguous()
            torch.testing.assert_close(
                out[:, head : head + 1][..., picked], part.decode(part.encode(piece, 8)), rtol=1e-4, atol=1e-5
            )
