"""Random rotations of blocks of channels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.rotations import Rotation
from kvq.errors import ConfigError, require


class BlockRotation(Rotation):
    """A random rotation of each block of neighbouring channels: PlanarQuant (2), RotorQuant (3), IsoQuant (4).

    Blocks of 2 turn by a uniform angle; of 3 by a uniform angle around a random axis; of 4 by the quaternion product
    `q x p*` with random unit quaternions, or by `q x` alone. Channels that fill no block stay as they are.

    Args:
        size: channels of a block.
        seed: of the draws, the same for all layers and heads; independent of data seeds.
        one_sided: blocks of 4 are multiplied from the left only (IsoQuant-Fast).

    Raises:
        ConfigError: another size, `one_sided` with blocks that are not of 4.

    Source: the code of scrya-com/rotorquant (planarquant.py, rotorquant.py, isoquant.py).
    """

    version: ClassVar[int] = 1

    def __init__(self, size: int, seed: int = 0, one_sided: bool = False) -> None:
        require(size in (2, 3, 4), "size", size, "blocks of 2, 3 or 4 channels")
        if one_sided and size != 4:
            raise ConfigError(f"one_sided=true: with size=4, not {size}")
        self.size, self.seed, self.one_sided = size, seed, one_sided

    def matrix(self, head_dim: int, like: Tensor) -> Tensor:
        """The block-diagonal rotation `[head_dim, head_dim]` that rows are multiplied by, in the dtype of `like`."""
        return _block_rotation(head_dim, self.size, self.seed, self.one_sided, like.dtype, like.device)


@lru_cache(maxsize=64)
def _block_rotation(
    dim: int, size: int, seed: int, one_sided: bool, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "dim dim"]:
    """Block-diagonal; rows are turned, `x @ matrix`, so each block is the transpose of what turns a column."""
    generator = torch.Generator().manual_seed(seed)
    count = dim // size
    if size == 4:
        left, right = torch.randn(2, count, 4, generator=generator, dtype=torch.float64)
        blocks = _product_matrix(left / left.norm(dim=-1, keepdim=True))
        if not one_sided:
            right = right / right.norm(dim=-1, keepdim=True)
            conjugate = right * torch.tensor([1, -1, -1, -1], dtype=torch.float64)
            blocks = _product_matrix(conjugate, from_right=True) @ blocks
    else:
        axes = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        angles = 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
        axes = (
            axes / axes.norm(dim=-1, keepdim=True) if size == 3 else axes.new_tensor([0.0, 0.0, 1.0]).expand(count, 3)
        )
        x, y, z = (axes * angles[:, None]).unbind(-1)
        zero = torch.zeros_like(x)
        skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).view(count, 3, 3)
        blocks = torch.linalg.matrix_exp(skew)[:, :size, :size]
    rest = torch.eye(dim - count * size, dtype=torch.float64)
    return torch.block_diag(*blocks.mT, rest).to(device=device, dtype=dtype)


def _product_matrix(q: Float[Tensor, "count 4"], from_right: bool = False) -> Float[Tensor, "count 4 4"]:
    """The matrix of Hamilton's product `q x`, or `x q`, on columns (w, x, y, z)."""
    w, x, y, z = q.unbind(-1)
    if from_right:
        rows = [w, -x, -y, -z, x, w, z, -y, y, -z, w, x, z, y, -x, w]
    else:
        rows = [w, -x, -y, -z, x, w, -z, y, y, z, w, -x, z, -y, x, w]
    return torch.stack(rows, -1).unflatten(-1, (4, 4))
