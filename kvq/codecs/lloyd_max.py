"""TurboQuant's scalar codebooks: least squared error for one coordinate of a random unit vector (Lloyd-Max)."""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from torch import Size, Tensor
from typing_extensions import override

from kvq.codecs.levels import Array, fixed_point, looked_up, nearest_level
from kvq.codecs.packing import pack_parts, unpack_parts
from kvq.codecs.quantizers import Gain, Parts, Quantizer, choice
from kvq.errors import Unsupported

MAX_BITS = 8


def tail(t: Array, dim: int) -> Array:
    """P(T > t), t >= 0, of a coordinate T of a uniform unit vector in `dim` dimensions: f ∝ (1 - t²)^((dim-3)/2)."""
    return special.betainc((dim - 1) / 2, 0.5, 1 - t**2) / 2


def partial_mean(t: Array, dim: int) -> Array:
    """E[T; T > t], t >= 0."""
    return (1 - t**2) ** ((dim - 1) / 2) * density(np.zeros(1), dim) / (dim - 1)


def density(t: Array, dim: int) -> Array:
    """f(t) = (1 - t²)^((dim-3)/2) / B(1/2, (dim-1)/2)."""
    return (1 - t**2) ** ((dim - 3) / 2) / special.beta(0.5, (dim - 1) / 2)


class Marginal(enum.Enum):
    """The distribution of a coordinate: of the uniform unit vector, or N(0, 1/D), its limit (vLLM, LMDeploy)."""

    sphere = "sphere"
    normal = "normal"


def normal_levels(bits: int) -> Array:
    """`optimal_levels` of N(0, 1).

    Source: Max 1960, Table I.
    """
    half = 2 ** (bits - 1)

    def centroids(levels: Array) -> Array:
        ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        return np.diff(np.exp(-(ends**2) / 2)) / (np.diff(special.erfc(ends / 2**0.5)) * (np.pi / 2) ** 0.5)

    # The optimal point density is the cube root of the density: a normal one of variance 3.
    return fixed_point(centroids, 3**0.5 * special.ndtri(0.5 + (np.arange(half) + 0.5) / (2 * half)))


def optimal_levels(bits: int, dim: int) -> Array:
    """The positive half of the least-error codebook with 2^bits levels, ascending; the other half is its mirror image.

    Every level is the mean of its cell and every threshold the middle of two levels. Cell probabilities and means are
    closed forms, and the solver starts from the optimal point density f^(1/3). `dim` >= 3.

    Source: TurboQuant (arXiv 2504.19874), section 3.1; Max 1960, Lloyd 1982.
    """
    half = 2 ** (bits - 1)
    # f^(1/3) is the density of the same family in another dimension.
    start = _quantile((np.arange(half) + 0.5) / half, (dim - 3) / 3 + 3)

    def centroids(levels: Array) -> Array:
        mass, mean = _cells(levels, dim)
        return mean / mass

    return fixed_point(centroids, start)


def _cells(levels: Array, dim: int) -> tuple[Array, Array]:
    """P(cell) and E[T; cell] of each positive level."""
    ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
    return -np.diff(tail(ends, dim)), -np.diff(partial_mean(ends, dim))


def _quantile(p: Array, dim: float) -> Array:
    """t >= 0 with P(|T| < t) = p."""
    return np.sqrt(special.betaincinv(0.5, (dim - 1) / 2, p))


def cell_probabilities(levels: Array, dim: int) -> Array:
    """Probability of each level of the whole codebook, lowest level first."""
    half, _ = _cells(levels, dim)
    return np.concatenate([half[::-1], half])


def relative_mse(levels: Array, dim: int) -> float:
    """E|x - x̂|² / E|x|² of unit vectors whose coordinates take these levels: 1 - dim · Σ p c²."""
    half = len(levels)
    return float(1 - 2 * dim * (cell_probabilities(levels, dim)[half:] * levels**2).sum())


@lru_cache(maxsize=128)
def _tables(bits: int, dim: int, marginal: Marginal, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Levels and thresholds of the whole codebook."""
    half = optimal_levels(bits, dim) if marginal is Marginal.sphere else normal_levels(bits) / dim**0.5
    levels = np.concatenate([-half[::-1], half])
    middles = (levels[1:] + levels[:-1]) / 2
    return tuple(torch.from_numpy(part).to(device, dtype) for part in (levels, middles))  # type: ignore[return-value]


class LloydMaxQuantizer(Quantizer):
    """Rounds each coordinate of a rotated unit vector to the nearest level of `optimal_levels`.

    Args:
        bits: bits per code, 1-8.
        extra_bits: added to `bits`, for codecs of outlier channels with one bit more than the rest.
        gain: see `Gain`; folds into the token norm before this quantizer.
        marginal: see `Marginal`.
        unit: decoded tokens are scaled to norm 1 (vLLM's "norm correction"); the stored norm stays that of the token.

    Stores `codes.<plane>`; expects tokens of norm 1 (`TokenNorm`) whose direction is random (a rotation).

    Raises:
        ConfigError: unknown gain or marginal.
        Unsupported: other bits.

    Source: TurboQuant (arXiv 2504.19874), algorithm 1.
    """

    version: ClassVar[int] = 1

    token_group = 1

    def __init__(
        self,
        bits: int,
        extra_bits: int = 0,
        gain: Gain | str = Gain.none,
        marginal: Marginal | str = Marginal.sphere,
        unit: bool = False,
    ) -> None:
        self.bits = bits + extra_bits
        if not 1 <= self.bits <= MAX_BITS:
            raise Unsupported(f"bits={self.bits}: a Lloyd-Max codebook has 1 to {MAX_BITS} bits")
        self.gain = choice(Gain, gain, "gain")
        self.marginal = choice(Marginal, marginal, "marginal")
        self.unit = unit

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: fewer than 3 channels, where the density of a coordinate has no peak."""
        if head_dim < 3:
            raise Unsupported(f"head_dim={head_dim}: a Lloyd-Max codebook of the sphere needs at least 3 channels")

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`codes.<plane>`: index of the nearest level."""
        self.check(x.shape[-1])
        _, middles = _tables(self.bits, x.shape[-1], self.marginal, x.dtype, x.device)
        return pack_parts(nearest_level(x, middles), self.bits)

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The levels."""
        codes = unpack_parts(parts, self.bits, shape[-2])
        x = looked_up(_tables(self.bits, shape[-1], self.marginal, dtype, codes.device)[0], codes)
        return torch.nn.functional.normalize(x, dim=-1) if self.unit else x
