"""TurboQuant's scalar codebooks: least squared error for one coordinate of a random unit vector (Lloyd-Max)."""

from __future__ import annotations

import enum
import math
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
from kvq.codecs.quantizers import Gain, Parts, Quantizer, choice, more_bits
from kvq.errors import Unsupported, at_least, check_seed

MAX_BITS = 8
_SAMPLES = 100_000  # of a coordinate, from which k-means++ draws
_NEAR = 200  # Lloyd's steps from a start that may be far from the levels, before the solver


class Start(enum.Enum):
    """Levels to begin with: the optimal point density, even or equally probable ones, or draws by squared distance."""

    density = "density"
    even = "even"
    quantile = "quantile"
    kmeans_plus_plus = "kmeans_plus_plus"


class Marginal(enum.Enum):
    """The density of a coordinate: of the uniform unit vector, or N(0, 1/head_dim), its limit (vLLM, LMDeploy)."""

    sphere = "sphere"
    normal = "normal"


def tail(t: Array, dim: float | int) -> Array:
    """P(T > t), t >= 0, of a coordinate T of a uniform unit vector in `dim` dimensions: f ∝ (1 - t²)^((dim-3)/2).

    Here and below, `dim=inf` is the limit of T √dim: N(0, 1).
    """
    if math.isinf(dim):
        return special.ndtr(-t)
    return special.betainc((dim - 1) / 2, 0.5, 1 - t**2) / 2


def partial_mean(t: Array, dim: float | int) -> Array:
    """E[T; T > t], t >= 0."""
    if math.isinf(dim):
        return density(t, dim)
    return (1 - t**2) ** ((dim - 1) / 2) * density(np.zeros(1), dim) / (dim - 1)


def density(t: Array, dim: float | int) -> Array:
    """f(t) = (1 - t²)^((dim-3)/2) / B(1/2, (dim-1)/2)."""
    if math.isinf(dim):
        return np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    return (1 - t**2) ** ((dim - 3) / 2) / special.beta(0.5, (dim - 1) / 2)


def levels_from(
    bits: int,
    dim: float | int,
    start: Start = Start.density,
    steps: int | None = None,
    seed: int = 0,
    marginal: Marginal = Marginal.sphere,
) -> Array:
    """As `optimal_levels`, from another start or for another density, after `steps` of Lloyd's steps (None: all).

    All starts lead to the same levels, because the density has one optimum; `steps=0` is the start itself. Draws of
    k-means++ (Arthur and Vassilvitskii 2007) are those of KVQuant++: from samples of a coordinate, both halves folded.
    Even levels reach to the largest magnitude of as many samples.
    """
    if marginal is Marginal.normal:
        return levels_from(bits, math.inf, start, steps, seed) / dim**0.5
    if start is Start.density and steps is None:
        return optimal_levels(bits, dim)
    half = 2 ** (bits - 1)
    if start is Start.kmeans_plus_plus:
        levels = _drawn(half, dim, seed)
    elif start is Start.even:
        levels = float(np.abs(_samples(dim, seed)[0]).max()) * (2 * np.arange(half) + 1) / (2 * half - 1)
    else:
        levels = _quantile(_centers(half), dim) if start is Start.quantile else _of_density(half, dim)
    for _ in range(_NEAR if steps is None else steps):
        levels = _centroids(levels, dim)
    return fixed_point(lambda found: _centroids(found, dim), levels) if steps is None else levels


def _drawn(half: int, dim: float | int, seed: int) -> Array:
    """2 half samples of a coordinate drawn by k-means++, folded: means of neighbours among their magnitudes."""
    samples, generator = _samples(dim, seed)
    chosen = [generator.choice(samples)]
    distance = (samples - chosen[0]) ** 2
    while len(chosen) < 2 * half:
        chosen.append(generator.choice(samples, p=distance / distance.sum()))
        distance = np.minimum(distance, (samples - chosen[-1]) ** 2)
    return np.sort(np.abs(chosen)).reshape(half, 2).mean(1)


def _samples(dim: float | int, seed: int) -> tuple[Array, np.random.Generator]:
    """Samples of a coordinate, and the generator behind them."""
    generator = np.random.default_rng([seed, _SAMPLES])  # no other part draws from this stream
    return _quantile(generator.random(_SAMPLES), dim) * generator.choice([-1.0, 1.0], _SAMPLES), generator


def _centroids(levels: Array, dim: float | int) -> Array:
    """The mean of each level's cell."""
    mass, mean = _cells(levels, dim)
    return mean / mass


def optimal_levels(bits: int, dim: float | int) -> Array:
    """The positive half of the least-error codebook with 2^bits levels, ascending; the other half is its mirror image.

    Every level is the mean of its cell and every threshold the middle of two levels. Cell probabilities and means are
    closed forms, and the solver starts from the optimal point density f^(1/3). `dim` >= 3, or `inf`: of N(0, 1).

    Source: TurboQuant (arXiv 2504.19874), section 3.1; Max 1960 (Table I: N(0, 1)), Lloyd 1982.
    """
    return fixed_point(lambda levels: _centroids(levels, dim), _of_density(2 ** (bits - 1), dim))


def _centers(half: int) -> Array:
    return (np.arange(half) + 0.5) / half


def _of_density(half: int, dim: float | int) -> Array:
    """Levels of the optimal point density f^(1/3): f of another dimension, or N(0, 3)."""
    if math.isinf(dim):
        return _quantile(_centers(half), dim) * 3**0.5
    return _quantile(_centers(half), (dim - 3) / 3 + 3)


def _cells(levels: Array, dim: float | int) -> tuple[Array, Array]:
    """P(cell) and E[T; cell] of each positive level."""
    ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [math.inf if math.isinf(dim) else 1.0]])
    return -np.diff(tail(ends, dim)), -np.diff(partial_mean(ends, dim))


def _quantile(p: Array, dim: float | int) -> Array:
    """t >= 0 with P(|T| < t) = p."""
    if math.isinf(dim):
        return special.ndtri((1 + p) / 2)
    return np.sqrt(special.betaincinv(0.5, (dim - 1) / 2, p))


def cell_probabilities(levels: Array, dim: int) -> Array:
    """Probability of each level of the whole codebook, lowest level first."""
    half, _ = _cells(levels, dim)
    return np.concatenate([half[::-1], half])


def relative_mse(levels: Array, dim: int) -> float:
    """E|x - x̂|² / E|x|² of unit vectors whose coordinates take these levels: 1 - dim · Σ p c²."""
    half = len(levels)
    return float(1 - 2 * dim * (cell_probabilities(levels, dim)[half:] * levels**2).sum())


_Built = tuple[Start, int | None, int, Marginal]
_OPTIMAL: _Built = (Start.density, None, 0, Marginal.sphere)


@lru_cache(maxsize=128)
def _tables(
    bits: int, dim: int, dtype: torch.dtype, device: torch.device, built: _Built = _OPTIMAL
) -> tuple[Tensor, Tensor]:
    """Levels and thresholds of the whole codebook."""
    half = levels_from(bits, dim, *built)
    levels = np.concatenate([-half[::-1], half])
    middles = (levels[1:] + levels[:-1]) / 2
    return tuple(torch.from_numpy(part).to(device, dtype) for part in (levels, middles))  # type: ignore[return-value]


class LloydMaxQuantizer(Quantizer):
    """Rounds each coordinate of a rotated unit vector to the nearest level of `optimal_levels`.

    Args:
        bits: bits per code, 1-8.
        extra_bits: added to `bits`, for codecs of outlier channels with one bit more than the rest.
        gain: see `Gain`; folds into the token norm before this quantizer.
        least, most: bounds of the sum of both (None: none).
        start, steps, seed, marginal: of the codebook, see `levels_from`; by default the optimal one of the sphere.
        unit: decoded tokens are scaled to norm 1 (vLLM's "norm correction"); the stored norm stays that of the token.

    Stores `codes.<plane>`; expects tokens of norm 1 (`TokenNorm`) whose direction is random (a rotation).

    Raises:
        ConfigError: unknown gain, start or marginal; negative steps or seed.
        Unsupported: other bits.

    Source: TurboQuant (arXiv 2504.19874), algorithm 1; KVQuant++, section 2.2.1.
    """

    version: ClassVar[int] = 1

    token_group = 1

    def __init__(
        self,
        bits: int,
        extra_bits: int = 0,
        gain: Gain | str = Gain.none,
        least: int | None = None,
        most: int | None = None,
        start: Start | str = Start.density,
        steps: int | None = None,
        seed: int = 5,
        marginal: Marginal | str = Marginal.sphere,
        unit: bool = False,
    ) -> None:
        self.bits = bits + extra_bits
        if least is not None:
            self.bits = max(self.bits, least)
        if most is not None:
            self.bits = min(self.bits, most)
        if not 1 <= self.bits <= MAX_BITS:
            raise Unsupported(f"bits={self.bits}: a Lloyd-Max codebook has 1 to {MAX_BITS} bits")
        self.gain = choice(Gain, gain, "gain")
        at_least("steps", steps, 0)
        check_seed("seed", seed)
        self.start, self.marginal = choice(Start, start, "start"), choice(Marginal, marginal, "marginal")
        self._built: _Built = (self.start, steps, seed, self.marginal)
        self.unit = unit

    @override
    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        return more_bits(self, extra, most)

    @property
    @override
    def indices(self) -> dict[str, int]:
        return {"codes": self.bits}

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: fewer than 3 channels, where the density of a coordinate of the sphere has no peak."""
        if head_dim < 3 and self.marginal is Marginal.sphere:
            raise Unsupported(f"head_dim={head_dim}: a Lloyd-Max codebook of the sphere needs at least 3 channels")

    def levels(self, dim: int, dtype: torch.dtype) -> Float[Tensor, " levels"]:
        """All levels for `dim` channels, ascending; the lower half is the mirror image of the upper one."""
        return _tables(self.bits, dim, dtype, torch.device("cpu"), self._built)[0]

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`codes.<plane>`: index of the nearest level."""
        self.check(x.shape[-1])
        _, middles = _tables(self.bits, x.shape[-1], x.dtype, x.device, self._built)
        return pack_parts(nearest_level(x, middles), self.bits)

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The levels."""
        codes = unpack_parts(parts, self.bits, shape[-2])
        x = looked_up(_tables(self.bits, shape[-1], dtype, codes.device, self._built)[0], codes)
        return torch.nn.functional.normalize(x, dim=-1) if self.unit else x
