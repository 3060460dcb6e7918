"""PolarQuant: the transform inverts, its codebooks fit the angles' distributions, and 3.875 bits are stored."""

import itertools
import math

import pytest
import torch
from scipy import integrate

from kvq_zoo.geometric import PolarQuantizer, angle_levels


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "angle_bits", [(8,), *(pytest.param((8,) * levels, marks=pytest.mark.long) for levels in (2, 4))]
)
def test_fine_angles_give_back_the_vectors(angle_bits):
    quantizer, x = PolarQuantizer(angle_bits), gaussian(1, 2, 24, 64)
    x[:, :, 3] = 0
    out = quantizer.decode(quantizer.encode(x, x.dtype), x.shape, x.dtype)
    assert float((out - x).norm() / x.norm()) < 0.02
    assert not out[:, :, 3].any()


@pytest.mark.parametrize("level", [2, 3, 4])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_levels_are_the_means_of_their_cells(level, bits):
    def density(angle):
        return math.sin(2 * angle) ** (2 ** (level - 1) - 1)

    levels = angle_levels(bits, level)
    ends = [0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.pi / 2]
    assert len(levels) == 2**bits
    for found, low, high in zip(levels, ends, ends[1:], strict=False):
        mass = integrate.quad(density, low, high)[0]
        assert found == pytest.approx(integrate.quad(lambda t: t * density(t), low, high)[0] / mass, abs=1e-9)
    assert [math.pi / 2 - angle for angle in levels[::-1]] == pytest.approx(levels, abs=1e-9)


def test_the_first_level_is_uniform_on_the_circle():
    levels = angle_levels(4, 1)
    assert levels == pytest.approx([(i + 0.5) * math.pi / 8 for i in range(16)])


def test_angles_of_gaussians_fall_into_cells_as_often_as_the_density_says():
    radius = gaussian(200_000, 16)
    for level in range(1, 5):
        first, second = radius.unflatten(-1, (-1, 2)).unbind(-1)
        angle = torch.atan2(second, first)
        if level > 1:
            shares = integrate.quad(lambda t, n=level: math.sin(2 * t) ** (2 ** (n - 1) - 1), 0, math.pi / 8)[0]
            whole = integrate.quad(lambda t, n=level: math.sin(2 * t) ** (2 ** (n - 1) - 1), 0, math.pi / 2)[0]
            found = (angle < math.pi / 8).double().mean()
            assert float(found) == pytest.approx(shares / whole, abs=4 * math.sqrt(0.25 / angle.numel()))
        radius = torch.hypot(first, second)
