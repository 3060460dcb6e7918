"""RaBitQ: its search against all points of the grid, and what its estimate is over random rotations."""

import itertools

import pytest
import torch

from kvq.codecs import Codec, RandomRotation, TokenNorm
from kvq_zoo.rabitq import RabitqQuantizer, best_steps
from tests.methods.held import states


@pytest.mark.parametrize(("bits", "dim"), [(1, 6), (2, 7), (3, 5), (4, 4)])
def test_no_point_of_the_grid_has_a_larger_cosine(bits, dim):
    sizes = states(dim=dim)[0].flatten(0, 1).abs()
    sizes[::5, 1] = sizes[::5, 0]  # crossings at one rescaling
    sizes[::7, 2] = 0
    points = torch.tensor(list(itertools.product(range(2 ** (bits - 1)), repeat=dim)), dtype=torch.float64) + 0.5
    best = (torch.nn.functional.normalize(points) @ sizes.T).amax(0)
    found = best_steps(sizes, 2 ** (bits - 1)) + torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close((torch.nn.functional.normalize(found) * sizes).sum(-1), best, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("gain", ["parallel", "l2"])
def test_the_estimate_is_unbiased_over_rotations(bits, gain):
    """<x, x̂> is exact for each rotation, any other product in the mean; the scale of least error makes both smaller."""
    generator = torch.Generator().manual_seed(0)
    x, q = (torch.randn(1, 1, 1, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    q = q + x  # the product is large beside its error
    decoded = []
    for seed in range(400):
        stages = {"norm": TokenNorm("head"), "rotation": RandomRotation(seed)}
        codec = Codec(stages, ["norm", "rotation"], RabitqQuantizer(bits, gain))
        decoded.append(codec.decode(codec.encode(x)))
    found = torch.cat(decoded)
    products = (found * q).sum(-1).flatten() / (x * q).sum()
    off = float((products.mean() - 1) / (products.std() / 20))
    assert abs(off) < 3 if gain == "parallel" else off < -5
    itself = (found * x).sum(-1) / x.square().sum()
    assert bool(((itself - 1).abs() < 1e-3).all() if gain == "parallel" else (itself < 1).all())
