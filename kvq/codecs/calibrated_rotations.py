"""Rotations and orders of channels from a calibration (SpinQuant, RotateKV)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.calibrated import Calibrated, States, Tables
from kvq.codecs.quantizers import checked_choice
from kvq.codecs.rotations import RandomizedHadamard, hadamard_matrix, has_hadamard, per_block, per_head
from kvq.codecs.stages import Side, Stage
from kvq.errors import Unsupported, at_least, require

RotationStart = Literal["random_hadamard", "hadamard"]
"""The starting point of learning: a Hadamard matrix, with random signs of its rows (as released) or without."""


class TableRotation(Calibrated, Stage):
    """Rotates by the table `rotation`: one matrix for all heads `[dim, dim]` or `[1, dim, dim]`, or one for each."""

    orthogonal = True
    token_group = 1

    def check(self, head_dim: int) -> None:
        if not has_hadamard(head_dim):
            raise Unsupported(f"head_dim={head_dim}: no Hadamard matrix of this order to begin with")
        super().check(head_dim)

    def _rotate(self, x: Float[Tensor, "*lead heads tokens dim"], rotation: Tensor) -> Tensor:
        if rotation.ndim == 2 or len(rotation) == 1:
            return per_block(x, rotation.view(rotation.shape[-2:]))
        return per_head(x, rotation)

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._rotate(x, self.table("rotation", x)), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return self._rotate(y, self.table("rotation", y).mT)


class LearnedRotation(TableRotation):
    """An orthogonal matrix per layer, learned against the loss from a Hadamard matrix by Cayley SGD.

    Args:
        steps: gradient steps, each on one sample.
        rate: of the first step; it falls to 0 along a cosine.
        start: where learning begins.
        seed: of the random signs, one draw that all layers begin with (the released code draws for each layer); the
            method's own, never a data seed.

    Table: `rotation` `[head_dim, head_dim]` in fp32.

    Source: SpinQuant (arXiv 2405.16406), R2; the step is that of Li et al. (arXiv 2002.01113), exact.
    """

    version: ClassVar[int] = 1
    learned = True

    def __init__(
        self,
        steps: int = 100,
        rate: float = 1.5,
        start: RotationStart | str = "random_hadamard",
        seed: int = 0,
    ) -> None:
        at_least("steps", steps, 1)
        require(rate > 0, "rate", rate, "above 0")
        self.steps, self.rate, self.seed = steps, rate, seed
        self.start: RotationStart = checked_choice(RotationStart, start, "start")

    def initial_rotation(self, head_dim: int) -> Float[Tensor, "dim dim"]:
        """The orthogonal matrix that learning starts from, in fp64."""
        if self.start == "random_hadamard":
            return RandomizedHadamard(self.seed).matrix(head_dim, torch.empty(0, dtype=torch.float64))
        return hadamard_matrix(head_dim).double() / head_dim**0.5

    def rate_at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        return self.rate * (1 + math.cos(math.pi * step / self.steps)) / 2


def cayley_step(
    rotation: Float[Tensor, "dim dim"], gradient: Float[Tensor, "dim dim"], rate: float
) -> Float[Tensor, "dim dim"]:
    """One step of descent that stays orthogonal: (I + rate/2 W)⁻¹ (I - rate/2 W) R, W the skew part of the gradient.

    The step is at most 1 / |Rᵀ W R|₁, as in SpinQuant's optimizer, which moves the transpose.
    """
    skew = gradient @ rotation.mT - rotation @ (rotation.mT @ gradient) @ rotation.mT / 2
    skew = skew - skew.mT
    rate = min(rate, 1 / (float(torch.linalg.matrix_norm(rotation.mT @ skew @ rotation, 1)) + 1e-8))
    one = torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device)
    moved = torch.linalg.solve(one + rate / 2 * skew, (one - rate / 2 * skew) @ rotation)
    q, r = torch.linalg.qr(moved)  # keeps rounding errors from accumulating over steps
    return q * torch.sign(torch.diagonal(r))


class GroupedHadamard(Stage):
    """A Hadamard matrix over the channels of `heads` neighbouring KV heads of a token joined.

    Args:
        heads: number of heads joined; where it does not divide the number of KV heads, the largest smaller divisor.

    Source: RotateKV (arXiv 2501.16383): grouped-head rotation of 4 heads.
    """

    version: ClassVar[int] = 1
    token_group = 1
    rotates_tokens = True

    def __init__(self, heads: int = 4) -> None:
        at_least("heads", heads, 1)
        self.heads = heads

    def _group_heads(self, heads: int) -> int:
        return max(count for count in range(1, self.heads + 1) if heads % count == 0)

    def _matrix(self, x: Tensor) -> Tensor:
        order = self._group_heads(x.shape[-3]) * x.shape[-1]
        if not has_hadamard(order):
            raise Unsupported(
                f"head_dim={x.shape[-1]}: no Hadamard matrix of order {order} ({order // x.shape[-1]} heads)"
            )
        return (hadamard_matrix(order) / order**0.5).to(x.device, x.dtype)

    def _apply(self, x: Tensor, matrix: Tensor) -> Tensor:
        count = len(matrix) // x.shape[-1]
        joined = x.unflatten(-3, (-1, count)).transpose(-3, -2).flatten(-2)
        return per_block(joined.contiguous(), matrix).unflatten(-1, (count, -1)).transpose(-3, -2).flatten(-4, -3)

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._apply(x, self._matrix(x)), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return self._apply(y, self._matrix(y).mT)


class ChannelOrder(Calibrated, Stage):
    """The channels of all KV heads in the ascending order of their sums over the calibration tokens.

    Neighbours, which share a scale per token, are then alike in size and sign. Table: `order` `[heads * head_dim]`.

    Source: RotateKV (arXiv 2501.16383): outlier-aware rotation; the released calibration sorts signed sums.
    """

    version: ClassVar[int] = 1
    token_group = 1
    rotates_tokens = True

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`order`: indices of the channels, that with the smallest sum first."""
        return {"order": x.double().sum(-2).flatten().argsort(stable=True).int()}

    def _order(self, x: Tensor) -> Tensor:
        # Exact in fp32 and fp64, the dtypes of computation: an index has at most 24 bits.
        return self.table("order", x).long()

    def _permute(self, x: Tensor, order: Tensor) -> Tensor:
        flat = x.transpose(-3, -2).flatten(-2).index_select(-1, order)
        return flat.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2).contiguous()

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._permute(x, self._order(x)), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return self._permute(y, self._order(y).argsort())
