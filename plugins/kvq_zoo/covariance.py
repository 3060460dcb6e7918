"""OSCAR's rotations by a covariance, and its clip by rank."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.codecs.calibrated import Moments, States, Tables
from kvq.codecs.fitted import TableRotation
from kvq.codecs.rotations import eigenvectors, hadamard_matrix
from kvq.codecs.stages import Side, Stage
from kvq.errors import require


def bit_reversed_ranks(order: int) -> Int[Tensor, " order"]:
    """The rank of each index from 0 to `order` - 1 by its bits in reverse; of a power of two, those bits themselves."""
    index, out = torch.arange(order), torch.zeros(order, dtype=torch.long)
    for _ in range((order - 1).bit_length()):
        out, index = 2 * out + index % 2, index // 2
    return out.argsort().argsort()


def covariance_rotation(moments: Moments) -> Moments:
    """R = U (H / √D) P for each second moment, in fp64; rows of states times R are quantized.

    The columns of U are the eigenvectors in ascending order of eigenvalues (`kvq.codecs.rotations`). P moves column
    D - 1 - j to the bit-reversed position of j.

    Args:
        moments: symmetric, `[heads, dim, dim]`, of a dim that has a Hadamard matrix.
    """
    dim = moments.shape[-1]
    vectors = eigenvectors((moments.double() + moments.double().mT) / 2)[1]
    turned = vectors @ (hadamard_matrix(dim).to(moments.device) / dim**0.5)
    order = torch.empty(dim, dtype=torch.long)
    order[bit_reversed_ranks(dim)] = torch.arange(dim - 1, -1, -1)
    return turned.index_select(-1, order.to(turned.device))


class CovarianceRotation(TableRotation):
    """A rotation per layer and KV head, or one per layer, from second moments of the calibration states.

    Keys: the moment of the queries that read them. Values: that of the values, each token weighted by its key's
    quadratic form in the moment of the queries (`kvq.calibration.collect`).

    Args:
        shared: one rotation for all KV heads of a layer, from the mean of their moments.

    Table: `rotation` `[heads, head_dim, head_dim]` (`shared`: `[1, head_dim, head_dim]`) in fp32.

    Source: OSCAR (arXiv 2605.17757) and its released `compute_kv_rotation.py` (composition r_h_pbr).
    """

    version: ClassVar[int] = 1
    wants_moments = True

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared

    def fit(self, x: States, gradients: States | None, seed: int, moments: Moments | None = None) -> Tables:
        """`rotation` (`covariance_rotation`) from second moments `[heads, dim, dim]`; the states are not used."""
        assert moments is not None
        return {"rotation": covariance_rotation(moments.mean(0, keepdim=True) if self.shared else moments).float()}


class RankClip(Stage):
    """Clips each token and head at ± an order statistic of its magnitudes; nothing is stored, nothing is undone.

    Args:
        share: the limit is the magnitude with index `int(share * head_dim)`, counted from 0 in ascending order; 1: the
            largest, so nothing is clipped.

    Raises:
        ConfigError: a share outside 0 to 1.

    Source: OSCAR (arXiv 2605.17757), as served: 0.96 for keys and 0.92 for values.
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(self, share: float | int) -> None:
        require(0 < share <= 1, "share", share, "above 0, at most 1")
        self.share = share

    def forward(self, x: Float[Tensor, "*lead tokens dim"]) -> tuple[Tensor, Side]:
        dim = x.shape[-1]
        limit = x.abs().kthvalue(min(int(self.share * dim), dim - 1) + 1, -1, keepdim=True).values
        return torch.minimum(torch.maximum(x, -limit), limit), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y
