"""Scalar codebooks of the sphere's marginal: optimality and the published errors."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from kvq.codecs import Codec, LloydMaxQuantizer, RandomRotation, TokenNorm, optimal_levels
from kvq.codecs.lloyd_max import density, partial_mean, relative_mse, tail
from tests.codecs.oracles import block
from tests.properties import examples

MSE_128 = {1: 0.3609, 2: 0.1160, 3: 0.03397, 4: 0.009315, 5: 0.002451, 6: 0.000630, 7: 0.0001598, 8: 0.0000402}
"""Relative MSE at D=128 by an independent quadrature."""


@pytest.mark.parametrize("bits", MSE_128)
def test_errors_at_128_channels(bits):
    error = relative_mse(optimal_levels(bits, 128), 128)
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
