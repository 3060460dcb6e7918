"""What every method is held against: the same states, and the measure of a difference."""

from __future__ import annotations

import torch
from torch import Tensor

HEADS, TOKENS, DIM = 4, 128, 128


def states(seed: int = 0, tokens: int = TOKENS, heads: int = HEADS, dim: int = DIM) -> Tensor:
    """Random states `[1, heads, tokens, dim]` in fp64 as keys have them: channel offsets, outlier channels, low norms.

    Four channels per head are 8 times larger than the others, every ninth token has a hundredth of the norm.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(1, heads, tokens, dim) + normal(1, heads, 1, dim) / 2
    for head in range(heads):
        x[:, head, :, torch.randperm(dim, generator=generator)[:4]] *= 8
    x[:, :, ::9] /= 100
    return x


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest distance of a token's decoded states from the expected ones, over the expected norm of the token."""
    apart = (found - expected).norm(dim=-1)
    return float((apart / expected.norm(dim=-1).clamp_min(1e-300)).max())
