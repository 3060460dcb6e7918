"""Scalar codebooks for a coordinate of a random unit vector (Lloyd-Max and others); TurboQuant's inner-product form."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from torch import Size, Tensor

from kvq.codecs.levels import Array, fixed_point, look_up, nearest_level
from kvq.codecs.packed import ByToken, Queries, pack, pack_parts, unpack, unpack_parts
from kvq.codecs.quantizers import CodeQuantizer, Gain, Parts, Quantizer, checked_choice, more_bits, to_stored
from kvq.codecs.rotations import per_block, rotation
from kvq.errors import Unsupported, at_least, check_seed, require

MAX_BITS = 8
_TIE = 2.0**-11  # of the states' machine epsilon: far above the rounding of a rotation, far below that of the states
_SAMPLES = 100_000  # of a coordinate, as in print
Start = Literal["even", "quantile", "kmeans_plus_plus"]
"""Levels to begin with: evenly spaced or equally probable ones, or draws by squared distance."""
Sketch = Literal["gaussian", "orthogonal"]
"""Rows of the sketch: independent Gaussians (QJL, TurboQuant), or orthogonal directions of the same length."""


def tail(t: Array, dim: float | int) -> Array:
    """P(T > t) of a coordinate T of a uniform unit vector in `dim` dimensions: f ∝ (1 - t²)^((dim-3)/2).

    Here and below, `dim=inf` is the limit of T √dim: N(0, 1).
    """
    if math.isinf(dim):
        return special.ndtr(-t)
    upper = special.betainc((dim - 1) / 2, 0.5, 1 - t**2) / 2
    return np.where(t < 0, 1 - upper, upper)


def partial_mean(t: Array, dim: float | int) -> Array:
    """E[T; T > t]."""
    if math.isinf(dim):
        return density(t, dim)
    return (1 - t**2) ** ((dim - 1) / 2) * density(np.zeros(1), dim) / (dim - 1)


def density(t: Array, dim: float | int) -> Array:
    """f(t) = (1 - t²)^((dim-3)/2) / B(1/2, (dim-1)/2)."""
    if math.isinf(dim):
        return np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    return (1 - t**2) ** ((dim - 3) / 2) / special.beta(0.5, (dim - 1) / 2)


def optimal_levels(bits: int, dim: float | int) -> Array:
    """The positive half of the least-error codebook with 2^bits levels, ascending; the other half is its mirror image.

    Every level is the mean of its cell and every threshold the middle of two levels. Cell probabilities and means are
    closed forms, and the solver starts from the optimal point density f^(1/3). `dim` >= 3, or `inf`: of N(0, 1).

    Source: TurboQuant (arXiv 2504.19874), section 3.1; Max 1960 (Table I: N(0, 1)), Lloyd 1982.
    """
    half = 2 ** (bits - 1)
    centers = (np.arange(half) + 0.5) / half  # quantiles of the density proportional to f^(1/3) (Panter-Dite)
    start = quantile(centers, dim) * 3**0.5 if math.isinf(dim) else quantile(centers, (dim - 3) / 3 + 3)
    return fixed_point(lambda levels: np.divide(*cells(levels, dim)[::-1]), start)


def cells(levels: Array, dim: float | int, lowest: float = 0.0) -> tuple[Array, Array]:
    """P(cell) and E[T; cell] of ascending levels whose first cell begins at `lowest`: 0 for the positive levels."""
    ends = np.concatenate([[lowest], (levels[1:] + levels[:-1]) / 2, [math.inf if math.isinf(dim) else 1.0]])
    return -np.diff(tail(ends, dim)), -np.diff(partial_mean(ends, dim))


def quantile(p: Array, dim: float | int) -> Array:
    """t >= 0 with P(|T| < t) = p."""
    if math.isinf(dim):
        return special.ndtri((1 + p) / 2)
    return np.sqrt(special.betaincinv(0.5, (dim - 1) / 2, p))


def codebook(bits: int, dim: float | int) -> Array:
    """The least-error codebook with 2^bits levels, ascending, of a coordinate of a uniform unit vector."""
    half = optimal_levels(bits, dim)
    return np.concatenate([-half[::-1], half])


@lru_cache(maxsize=128)
def _tables(
    make: Callable[..., Array], arguments: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Levels and thresholds of the codebook `make(*arguments)`."""
    levels = make(*arguments)
    middles = (levels[1:] + levels[:-1]) / 2
    return tuple(torch.from_numpy(part).to(device, dtype) for part in (levels, middles))  # type: ignore[return-value]


class CodebookQuantizer(CodeQuantizer):
    """Rounds each coordinate of a rotated unit vector to the nearest of 2^bits levels.

    Args:
        bits, gain: as `LloydMaxQuantizer`.
        unit: decoded tokens are scaled to norm 1.
        make, arguments: `make(bits, channels, *arguments)` gives the levels, ascending.

    Stores `codes.<plane>`; expects tokens of norm 1 (`TokenNorm`) whose direction is random (a rotation). A coordinate
    midway between two levels, or below the middle by a rounding error (`_TIE`), gets the higher one: the order of a
    rotation's sums, which depends on the number of tokens, then changes no code.
    """

    token_group = 1

    def __init__(
        self, bits: int, gain: Gain | str, make: Callable[..., Array], arguments: tuple[Any, ...], unit: bool = False
    ) -> None:
        require(1 <= bits <= MAX_BITS, "bits", bits, f"a Lloyd-Max codebook has 1 to {MAX_BITS} bits", Unsupported)
        self.bits, self.gain, self.unit = bits, checked_choice(Gain, gain, "gain"), unit
        self._make, self._arguments = make, arguments

    def _tables(self, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Levels and thresholds for the current `bits`, which `with_more_bits` raises in copies."""
        return _tables(self._make, (self.bits, dim, *self._arguments), dtype, device)

    def check(self, head_dim: int) -> None:
        if head_dim < 3:
            raise Unsupported(f"head_dim={head_dim}: a Lloyd-Max codebook of the sphere needs at least 3 channels")

    def levels(self, dim: int, dtype: torch.dtype) -> Float[Tensor, " levels"]:
        """All levels for `dim` channels, ascending."""
        return self._tables(dim, dtype, torch.device("cpu"))[0]

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`codes.<plane>`: index of the nearest level."""
        self.check(x.shape[-1])
        _, middles = self._tables(x.shape[-1], x.dtype, x.device)
        return pack_parts(nearest_level(x, middles - torch.finfo(dtype).eps * _TIE), self.bits)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        codes = unpack_parts(parts, self.bits, shape[-2])
        x = look_up(self._tables(shape[-1], dtype, codes.device)[0], codes)
        return torch.nn.functional.normalize(x, dim=-1) if self.unit else x


class LloydMaxQuantizer(CodebookQuantizer):
    """Rounds each coordinate of a rotated unit vector to the nearest level of `optimal_levels`.

    Args:
        bits: bits per code, 1-8.
        extra_bits: added to `bits`, for codecs of outlier channels with one bit more than the rest.
        gain: see `Gain`; folds into the token norm before this quantizer.
        least, most: bounds of the sum of both (None: none).

    Source: TurboQuant (arXiv 2504.19874), algorithm 1.
    """

    version: ClassVar[int] = 1
    attended_as = "states"

    def __init__(
        self,
        bits: int,
        extra_bits: int = 0,
        gain: Gain | str = "none",
        least: int | None = None,
        most: int | None = None,
    ) -> None:
        bits = max(bits + extra_bits, least or 0)
        super().__init__(bits if most is None else min(bits, most), gain, codebook, ())

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        return more_bits(self, extra, most)


def levels_from(bits: int, dim: int, start: Start, steps: int = 0, seed: int = 5) -> Array:
    """2^bits ascending levels for a coordinate T of a uniform unit vector, after `steps` Lloyd iterations from `start`.

    `even` levels end at the 99.9% quantile of |T|, which reproduces the paper's errors (0.097 at 1 bit, D=64);
    k-means++ draws from 100,000 samples. All starts converge to `optimal_levels`, because the density has one optimum.

    Source: KVQuant++, section 2.2.1.
    """
    count = 2**bits
    if start == "kmeans_plus_plus":  # a sample by chance, each further one by its squared distance from the others
        generator = np.random.default_rng([seed, _SAMPLES])  # no other part draws from this stream
        samples = quantile(generator.random(_SAMPLES), dim) * generator.choice([-1.0, 1.0], _SAMPLES)
        chosen = [generator.choice(samples)]
        distance = (samples - chosen[0]) ** 2
        while len(chosen) < count:
            chosen.append(generator.choice(samples, p=distance / distance.sum()))
            distance = np.minimum(distance, (samples - chosen[-1]) ** 2)
        levels = np.sort(chosen)
    elif start == "even":
        end = quantile(np.array([0.999]), dim).item()  # of |T| lies within evenly spaced levels
        levels = np.linspace(-end, end, count)
    else:
        half = quantile((2 * np.arange(count // 2) + 1) / count, dim)
        levels = np.concatenate([-half[::-1], half])
    for _ in range(steps):
        levels = np.divide(*cells(levels, dim, lowest=-1.0)[::-1])
    return levels


class StartingCodebook(CodebookQuantizer):
    """Rounds each coordinate of a rotated unit vector to the nearest level of `levels_from`, few Lloyd iterations.

    Args:
        bits, gain: as `LloydMaxQuantizer`.
        start, steps, seed: see `levels_from`.

    Source: KVQuant++, section 2.2.1.
    """

    version: ClassVar[int] = 1
    attended_as = "states"

    def __init__(self, bits: int, start: Start | str, gain: Gain | str = "none", steps: int = 0, seed: int = 5) -> None:
        at_least("steps", steps, 0)
        check_seed("seed", seed)
        super().__init__(bits, gain, levels_from, (checked_choice(Start, start, "start"), steps, seed))


class InnerProductQuantizer(CodeQuantizer):
    """TurboQuant-prod: b-1 bits of `LloydMaxQuantizer`, one sign bit per coordinate of S·r for the error r, and |r|.

    Decoding adds |r| / (D c) · Sᵀ sign(S r), where c = E|s·u| for a unit vector u: √(2/π) for Gaussian rows. Over draws
    of S, <q, x̂> is an unbiased estimate of <q, x>; for one S, keys that share a mean share an error.

    Args:
        bits: bits per element, 2-8: b-1 for the codes, 1 for the signs.
        sketch: `gaussian`, or `orthogonal` rows of length √D.
        seed: seed of S, independent of data seeds and of the seed of a rotation before it.
        extra_bits: added to `bits`, for codecs of tokens or channels with more or fewer bits than others.

    Stores `codes.<plane>`, `signs` (one bit per coordinate) and `rest` (|r|, fp16). No gain: that would bias it.

    Source: TurboQuant (arXiv 2504.19874), algorithm 2; QJL (arXiv 2406.03482), definition 3.1.
    """

    version: ClassVar[int] = 1
    token_group = 1
    attended_as = "states"

    def __init__(self, bits: int, sketch: Sketch | str = "gaussian", seed: int = 1, extra_bits: int = 0) -> None:
        self.bits, self.seed = bits + extra_bits, seed
        allowed = f"the inner-product form has 2 to {MAX_BITS} bits, one of them for signs"
        require(2 <= self.bits <= MAX_BITS, "bits", self.bits, allowed, Unsupported)
        self.sketch: Sketch = checked_choice(Sketch, sketch, "sketch")
        self._codes = LloydMaxQuantizer(self.bits - 1)

    @property
    def index_bits(self) -> dict[str, int]:
        return self._codes.index_bits

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        other = more_bits(self, extra, most)
        other._codes = more_bits(self._codes, extra, most - 1)
        return other

    def check(self, head_dim: int) -> None:
        self._codes.check(head_dim)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`codes.<plane>`, `signs` and `rest` `[..., heads, tokens, 1]`."""
        parts = self._codes.encode(x, dtype)
        rest = x - self._codes.decode(parts, x.shape, x.dtype)
        norm = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        negative = per_block(rest, sketch_matrix(self.sketch, x.shape[-1], self.seed, x.dtype, x.device).mT) < 0
        return parts | {"signs": pack(negative.to(torch.uint8), 1)[0], "rest": to_stored(norm, torch.float16)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        signs, sketch, scale = self._rest(parts, shape[-2], shape[-1], dtype)
        return torch.addcmul(self._codes.decode(parts, shape, dtype), per_block(signs, sketch), scale)

    def _rest(self, parts: Parts, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The signs of S r as 1 and -1 `[..., tokens, dim]`, S, and |r| / (D c) `[..., tokens, 1]`."""
        signs = unpack([parts["signs"]], 1, tokens).to(dtype).mul_(-2).add_(1)
        scale = parts["rest"].to(dtype) / (dim * sketch_constant(self.sketch, dim))
        return signs, sketch_matrix(self.sketch, dim, self.seed, dtype, signs.device), scale

    def score(self, parts: Parts, query: Queries, tokens: int) -> ByToken:
        """`<q, codes> + |r| / (D c) <S q, signs>`: QJL's estimate, where S meets the query and no token."""
        signs, sketch, scale = self._rest(parts, tokens, query.shape[-1], query.dtype)
        return self._codes.score(parts, query, tokens) + (query @ sketch.mT) @ signs.mT * scale.mT


@lru_cache(maxsize=64)
def sketch_matrix(
    sketch: Sketch, dim: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "dim dim"]:
    """S, one direction per row."""
    if sketch == "orthogonal":
        return (rotation(dim, seed, torch.float64, torch.device("cpu")) * dim**0.5).to(device, dtype)
    matrix = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix.to(device, dtype)


def sketch_constant(sketch: Sketch, dim: int) -> float:
    """E|s·u| of a row s and a unit vector u: √(2/π); for rows of length √D, √D times E|coordinate of the sphere|."""
    if sketch == "gaussian":
        return math.sqrt(2 / math.pi)
    return math.sqrt(dim / math.pi) * math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2))
