"""Low-rank approximation of a block's quantization error, for any codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, Moments, States, Tables, bind_codec, calibrated_parts, fit_codec
from kvq.codecs.codec import Codec, check_nested
from kvq.codecs.quantizers import Parts, Quantizer, checked_choice, to_stored, with_prefix, without_prefix
from kvq.errors import Unsupported, at_least, check_seed

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
