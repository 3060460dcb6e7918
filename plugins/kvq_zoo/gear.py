"""GEAR: a block's extremes kept exactly, and the error of its backbone at a low rank."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs import UniformQuantizer
from kvq.codecs.nested import Blocks, Factors, product, stored_factors
from kvq.codecs.quantizers import Parts, Quantizer, to_stored
from kvq.errors import Unsupported, at_least, require

_HALF = 2**15  # indices are stored in 16 bits, from -_HALF on


def power_iteration(x: Blocks, rank: int, iterations: int, seed: int) -> Factors:
    """Factors of an approximation of rank `rank`, by block power iteration from a fixed start (GEAR, section 3)."""
    right = _start(x.shape[-1], rank, seed, x.dtype, x.device).expand(x.shape[0], -1, -1)
    left = x[..., :rank]
    for _ in range(iterations):
        left = torch.linalg.qr(torch.bmm(x, right)).Q
        right = torch.bmm(x.mT, left)
    return left, right.mT


@lru_cache(maxsize=64)
def _start(dim: int, rank: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "dim rank"]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, rank, generator=generator, dtype=torch.float64).to(device, dtype)


class SparseLowRank(Quantizer):
    """Backbone, extremes and low-rank error of a block: x ≈ quantized(x without extremes) + L, extremes exact.

    Extremes are taken per channel over the block's tokens (keys) or per token over all heads and channels (values), by
    the backbone's axis: half of them the largest, half the smallest. They do not enter the quantization ranges.

    Args:
        backbone: quantizes the block without its extremes.
        sparsity: share of extremes, rounded to whole entries at either end, at least one (none of fewer than 2).
        rank: rank per head of the error's approximation, in blocks of more than `buffer` tokens (a prefill).
        buffer_rank: the same in shorter blocks (decoding).
        buffer: number of tokens.
        iterations: steps of the power iteration that finds the low-rank factors.
        seed: seed of its start, independent of data seeds.

    Stores the backbone's parts; `extremes` (fp16) and `extremes_at` (16-bit indices); `left` and `right` (fp16), the
    factors of L: `[..., heads, tokens * rank, 1]` and `[..., heads, rank, head_dim]`.

    Source: GEAR (arXiv 2403.05527), section 3.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        backbone: UniformQuantizer,
        sparsity: float | int = 0.02,
        rank: int = 4,
        buffer_rank: int = 2,
        buffer: int = 64,
        iterations: int = 3,
        seed: int = 0,
    ) -> None:
        require(0 <= sparsity < 1, "sparsity", sparsity, "a share, from 0 to below 1")
        at_least("rank", rank, 0)
        at_least("buffer_rank", buffer_rank, 0)
        at_least("buffer", buffer, 0)
        at_least("iterations", iterations, 1)
        self.backbone, self.sparsity, self.iterations, self.seed = backbone, sparsity, iterations, seed
        self.rank, self.buffer_rank, self.buffer = rank, buffer_rank, buffer

    @property
    def bits(self) -> int:
        """Bits per code of the backbone quantizer."""
        return self.backbone.bits

    @property
    def index_bits(self) -> dict[str, int]:
        return self.backbone.index_bits

    def check(self, head_dim: int) -> None:
        self.backbone.check(head_dim)

    @property
    def _per_channel(self) -> bool:
        return self.backbone.axis == "per_channel"

    def _rank(self, tokens: int, dim: int) -> int:
        return min(self.rank if tokens > self.buffer else self.buffer_rank, tokens, dim)

    def _vectors(self, x: Tensor) -> Tensor:
        """The vectors whose extremes are kept, along dim -2 (keys) or -1 (values, heads joined)."""
        return x if self._per_channel else x.transpose(-3, -2).flatten(-2).unsqueeze(-3)

    def _unflatten(self, vectors: Tensor, shape: Size) -> Tensor:
        if self._per_channel:
            return vectors
        return vectors.squeeze(-3).unflatten(-1, (shape[-3], shape[-1])).transpose(-3, -2)

    def _extremes(self, vectors: Tensor) -> Tensor:
        """Indices of the largest and of the smallest values."""
        dim = -2 if self._per_channel else -1
        length = vectors.shape[dim]
        if length > 2 * _HALF:
            raise Unsupported(f"gear: extremes of {length} values, whose indices have 16 bits (at most {2 * _HALF})")
        count = min(max(round(self.sparsity / 2 * length), 1 if self.sparsity else 0), length // 2)
        order = vectors.sort(dim=dim, stable=True).indices  # stable: distinct indices also in a constant vector
        return torch.cat([order.narrow(dim, 0, count), order.narrow(dim, length - count, count)], dim)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        dim = -2 if self._per_channel else -1
        vectors = self._vectors(x)
        at = self._extremes(vectors)
        values = to_stored(vectors.gather(dim, at), torch.float16)
        out = torch.zeros_like(vectors, dtype=torch.bool).scatter_(dim, at, True)
        others = vectors.masked_fill(out, 0)
        mean = others.sum(dim, keepdim=True) / max(vectors.shape[dim] - at.shape[dim], 1)
        kept = self._unflatten(torch.where(out, mean, vectors), x.shape).contiguous()
        parts = self.backbone.encode(kept, dtype)
        parts |= {"extremes": values, "extremes_at": (at - _HALF).to(torch.int16)}
        rank = self._rank(x.shape[-2], x.shape[-1])
        if not rank:
            return parts
        rest = (kept - self.backbone.decode(parts, x.shape, x.dtype)).masked_fill(self._unflatten(out, x.shape), 0)
        factors = power_iteration(rest.reshape(-1, *rest.shape[-2:]), rank, self.iterations, self.seed)
        return parts | stored_factors(factors, x.shape)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        out = self.backbone.decode(parts, shape, dtype)
        if "left" in parts:
            out = out + product(parts, shape, dtype)
        at = parts["extremes_at"].long() + _HALF
        vectors = self._vectors(out).scatter(-2 if self._per_channel else -1, at, parts["extremes"].to(dtype))
        return self._unflatten(vectors, shape)
