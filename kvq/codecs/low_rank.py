"""Low-rank approximation of a block's quantization error, for any codec and for GEAR with its exact extremes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, Moments, States, Tables, bind_codec, calibrated_parts, fit_codec
from kvq.codecs.codec import Codec, check_nested
from kvq.codecs.quantizers import Parts, Quantizer, checked_choice, to_stored, with_prefix, without_prefix
from kvq.codecs.uniform import UniformQuantizer
from kvq.errors import Unsupported, at_least, check_seed, require

Blocks = Float[Tensor, "blocks tokens dim"]
Factors = tuple[Float[Tensor, "blocks tokens rank"], Float[Tensor, "blocks rank dim"]]
RANDOMIZED_FROM = 64
"""Tokens of a block from which on a randomized decomposition is used (KVQuant++)."""
_PREFIX = "base."


Svd = Literal["exact", "randomized"]
"""How the largest singular vectors are found: LAPACK's full decomposition, or `torch.svd_lowrank`."""


class LowRankCorrection(Calibrated, Quantizer):
    """A codec, and for each head of a block the largest singular vectors of its error R = x - x̂.

    Decodes to x̂ + U V for U = U_r Σ_r and V = V_rᵀ, both in fp16, from the truncated decomposition of R. It is
    calibrated where the codec is: the codec's tables are its tables.

    Args:
        base: codec whose error is corrected, its stages included.
        rank: singular vectors per head, at most as many as tokens or channels.
        svd: `exact`, or `randomized` (in blocks of 64 tokens or more; shorter ones have `exact`).
        oversample: vectors that the randomized decomposition finds beside those that are kept.
        iterations: its power iterations.
        seed: of its start, independent of data seeds and of the seeds of rotations.
        below: a base of so many bits or more is not corrected (KVQuant++, section 5.3: 4); None: every base is.

    Stores the codec's parts as `base.<name>`, `left` and `right` (fp16): `[..., heads, tokens * rank, 1]` and
    `[..., heads, rank, head_dim]`, 16 rank (1/tokens + 1/head_dim) bits per element.

    Source: KVQuant++, section 3.4. Halko, Martinsson and Tropp 2011 for the randomized decomposition.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        base: Codec,
        rank: int = 4,
        svd: Svd | str = "randomized",
        oversample: int = 10,
        iterations: int = 2,
        seed: int = 3,
        below: float | int | None = None,
    ) -> None:
        check_nested(base, "low-rank correction", binds=True)
        own = calibrated_parts(base)
        if any(part.learned for part in own.values()):
            raise Unsupported("a low-rank correction takes no learned part inside of it, where no training finds it")
        self.is_calibrated, self.wants_gradients = bool(own), any(part.wants_gradients for part in own.values())
        self.wants_moments = any(part.wants_moments for part in own.values())
        for setting, given, least in (("rank", rank, 1), ("oversample", oversample, 0), ("iterations", iterations, 0)):
            at_least(setting, given, least)
        check_seed("seed", seed)
        self.base, self.rank, self.oversample, self.iterations, self.seed = base, rank, oversample, iterations, seed
        self.svd: Svd = checked_choice(Svd, svd, "svd")
        self.below = below

    @property
    def bits(self) -> float | None:
        """Bits per code of the base codec's quantizer; None: it has none."""
        return getattr(self.base.quantizer, "bits", None)

    @property
    def corrects(self) -> bool:
        """Whether the base's error is corrected."""
        return self.below is None or self.bits is None or self.bits < self.below

    @property
    def indices(self) -> dict[str, int]:
        return {f"{_PREFIX}{name}": bits for name, bits in self.base.quantizer.indices.items()}

    def check(self, head_dim: int) -> None:
        self.base.check(head_dim)

    def fit(self, x: States, gradients: States | None, seed: int, moments: Moments | None = None) -> Tables:
        return fit_codec(self.base, x, gradients, None, seed, moments)

    def bind(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        other = super().bind(tables, heads, head_dim)
        assert isinstance(other, LowRankCorrection)
        other.base = bind_codec(self.base, tables, heads, head_dim)
        return other

    def _factors(self, rest: Blocks) -> Factors:
        rank = min(self.rank, *rest.shape[-2:])
        if self.svd == "exact" or rest.shape[-2] < RANDOMIZED_FROM:
            return exact_svd(rest, rank)
        return randomized_svd(rest, rank, self.oversample, self.iterations, self.seed)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        found = self.base.encode_block(x, dtype=dtype)
        if not self.corrects:
            return with_prefix(found, _PREFIX)
        rest = x - self.base.decode_block(found, x.shape, x.dtype)
        return with_prefix(found, _PREFIX) | stored_factors(self._factors(rest.flatten(0, -3)), x.shape)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        out = self.base.decode_block(without_prefix(parts, _PREFIX), shape, dtype)
        return out + product(parts, shape, dtype) if self.corrects else out


def stored_factors(factors: Factors, shape: Size) -> Parts:
    """`left` and `right` in fp16, as parts of blocks of `shape` `[..., heads, tokens, head_dim]`."""
    left, right = (to_stored(factor, torch.float16) for factor in factors)
    return {"left": left.reshape(*shape[:-2], -1, 1), "right": right.reshape(*shape[:-2], -1, shape[-1])}


def product(parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
    """The approximation that `stored_factors` holds."""
    left = parts["left"].to(dtype).reshape(shape[:-2].numel(), shape[-2], -1)
    right = parts["right"].to(dtype).reshape(left.shape[0], -1, shape[-1])
    return torch.bmm(left, right).view(shape)


def exact_svd(x: Blocks, rank: int) -> Factors:
    """U_r Σ_r and V_rᵀ of the decomposition of each block."""
    left, right = [], []
    for block in x:  # in memory of its own, as where a block lies may decide the last bits
        u, s, vh = torch.linalg.svd(block.clone(), full_matrices=False)
        left.append(u[:, :rank] * s[:rank])
        right.append(vh[:rank])
    return torch.stack(left), torch.stack(right)


def randomized_svd(x: Blocks, rank: int, oversample: int, iterations: int, seed: int) -> Factors:
    """The same by `torch.svd_lowrank`, block by block from the same start, so that a block's bits are its own.

    `torch.svd_lowrank` draws from the global generator, whose state is restored.
    """
    most = min(rank + oversample, *x.shape[-2:])
    left, right = [], []
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for block in x:
            (torch.cuda if x.is_cuda else torch.default_generator).manual_seed(seed)
            u, s, v = torch.svd_lowrank(block, most, niter=iterations)
            left.append(u[:, :rank] * s[:rank])
            right.append(v[:, :rank].mT)
    return torch.stack(left), torch.stack(right)


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


_HALF = 2**15  # indices are stored in 16 bits, from -_HALF on


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
    def indices(self) -> dict[str, int]:
        return self.backbone.indices

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
