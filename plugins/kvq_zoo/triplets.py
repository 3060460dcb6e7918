"""Triplets of channels as a norm and a direction, and 8 channels as a lattice point."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from scipy.interpolate import CubicSpline
from torch import Size, Tensor

from kvq.codecs.levels import Array, fixed_point, look_up, nearest_level
from kvq.codecs.packed import pack_parts, unpack_parts
from kvq.codecs.quantizers import Parts, Quantizer, to_stored
from kvq.errors import Unsupported, require

_DIRECTION_BITS = 7
_SQUARE_NODES, _SQUARE_WEIGHTS = np.polynomial.legendre.leggauss(128)
_GRID = np.linspace(0, 1, 2001)


def _to_square(t: Float[Tensor, "*lead 3"]) -> Float[Tensor, "*lead 2"]:
    """The point of [-1, 1]^2 of a direction: projected to |x| + |y| + |z| = 1, its lower half folded outwards."""
    point = t / t.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(t.dtype).tiny)
    upper = point[..., :2]
    folded = (1 - upper.abs().flip(-1)) * torch.where(upper < 0, -1.0, 1.0)
    return torch.where(point[..., 2:] < 0, folded, upper)


def _to_direction(xi: Tensor, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The unit vector of a point of the square: the inverse of `_to_square`."""
    z = 1 - xi.abs() - eta.abs()
    x, y = (
        torch.where(z < 0, (1 - other.abs()) * torch.where(own < 0, -1.0, 1.0), own)
        for own, other in ((xi, eta), (eta, xi))
    )
    length = (x * x + y * y + z * z).sqrt()
    return x / length, y / length, z / length


@lru_cache(maxsize=1)
def _square_splines() -> tuple[CubicSpline, CubicSpline]:
    """Distribution and first moment, up to a point, of |xi|, a coordinate of a uniform direction's point in the square.

    The density of the point is 1 / |p|^3 of its octahedron point p, over 4 pi; the other coordinate is integrated out.
    """

    def inner(low: Array, high: Array, a: Array, inside: bool) -> Array:
        half = (high - low)[:, None] / 2
        b = low[:, None] + half * (1 + _SQUARE_NODES)
        a = a[:, None]
        p = (a, b, 1 - a - b) if inside else (1 - b, 1 - a, a + b - 1)
        found: Array = (half * _SQUARE_WEIGHTS * (p[0] ** 2 + p[1] ** 2 + p[2] ** 2) ** -1.5).sum(-1)
        return found

    zero, one = np.zeros_like(_GRID), np.ones_like(_GRID)
    density = (inner(zero, 1 - _GRID, _GRID, True) + inner(1 - _GRID, one, _GRID, False)) / np.pi
    return tuple(CubicSpline(_GRID, part).antiderivative() for part in (density, _GRID * density))


@lru_cache(maxsize=16)
def square_levels(bits: int) -> tuple[float, ...]:
    """The 2^bits levels of least squared error of a coordinate of the square, ascending, symmetric about 0."""
    mass, moment = _square_splines()

    def centroids(levels: Array) -> Array:
        ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        found: Array = np.diff(moment(ends)) / np.diff(mass(ends))
        return found

    count = 2 ** (bits - 1)
    half = fixed_point(centroids, (np.arange(count) + 0.5) / count)
    return tuple(np.concatenate([-half[::-1], half]))


@lru_cache(maxsize=64)
def norm_levels(bits: int, dim: int) -> tuple[float, ...]:
    """The 2^bits levels of least squared error of the norm of 3 channels of a uniform unit vector in `dim` dimensions.

    Its square has the distribution Beta(3/2, (dim - 3) / 2).
    """
    rest = (dim - 3) / 2
    mean = special.beta(2, rest) / special.beta(1.5, rest)

    def centroids(levels: Array) -> Array:
        ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]]) ** 2
        found: Array = mean * np.diff(special.betainc(2, rest, ends)) / np.diff(special.betainc(1.5, rest, ends))
        return found

    if not bits:
        return (float(mean),)
    start = np.sqrt(special.betaincinv(1.5, rest, (np.arange(2**bits) + 0.5) / 2**bits))
    return tuple(fixed_point(centroids, start))


@lru_cache(maxsize=64)
def _levels_and_middles(levels: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Levels, and the middle of each two neighbours, as tensors of a dtype on a device."""
    found = torch.tensor(levels, dtype=torch.float64)
    return found.to(device, dtype), ((found[1:] + found[:-1]) / 2).to(device, dtype)


class OctahedralQuantizer(Quantizer):
    """Triplets of channels of a rotated unit vector as a norm and a direction, 3 `bits` + 1 in all.

    The norm has `bits` - 1, each of the direction's two coordinates `bits` + 1. A direction is a point (xi, eta) of the
    square that the octahedron unfolds to. Of the nearest levels of xi and eta and their neighbours, the encoder takes
    the direction n with the largest t·n, and the level nearest to t·n as norm.

    Args:
        bits: 1 to 7.

    Stores `xi.<plane>`, `eta.<plane>` and, from 2 bits on, `norm.<plane>`, `[..., heads, tokens, ceil(head_dim / 3)]`.
    A last triplet is filled up with zeros.

    Raises:
        Unsupported: other bits.

    Source: OCTOPUS (arXiv 2605.21226), section 3: its split of bits and joint rounding. Levels are solved here.
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(self, bits: int) -> None:
        if not 1 <= bits <= _DIRECTION_BITS:
            raise Unsupported(f"bits={bits}: OctahedralQuantizer takes 1 to {_DIRECTION_BITS}")
        self.bits = bits

    @property
    def index_bits(self) -> dict[str, int]:
        """Bits of each stored index; `norm` has none at 1 bit."""
        widths = {"xi": self.bits + 1, "eta": self.bits + 1, "norm": self.bits - 1}
        return {name: width for name, width in widths.items() if width}

    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: fewer than 4 channels."""
        require(head_dim >= 4, "head_dim", head_dim, "OctahedralQuantizer takes 4 channels and more", Unsupported)

    def _tables(self, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
        """Levels and middles of a direction's coordinates, then those of the norm of 3 of `dim` channels."""
        levels = square_levels(self.bits + 1), norm_levels(self.bits - 1, dim)
        return tuple(_levels_and_middles(own, dtype, device) for own in levels)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes `xi`, `eta` and `norm` of triplets, as the class stores them."""
        self.check(x.shape[-1])
        (levels, middles), (_, between) = self._tables(x.shape[-1], x.dtype, x.device)
        t = torch.nn.functional.pad(x, (0, -x.shape[-1] % 3)).unflatten(-1, (-1, 3))
        square = _to_square(t)
        seeds = [nearest_level(square[..., axis], middles).int() for axis in range(2)]
        best = torch.full_like(t[..., 0], -torch.inf)
        codes = [torch.zeros_like(seed) for seed in seeds]
        for moves in itertools.product((0, -1, 1), repeat=2):  # of equal ones, the nearest levels
            tried = [(seed + move).clamp(0, len(levels) - 1) for seed, move in zip(seeds, moves, strict=True)]
            direction = _to_direction(*(look_up(levels, code) for code in tried))
            along = sum(part * t[..., axis] for axis, part in enumerate(direction))
            better = along > best
            best = torch.where(better, along, best)
            codes = [torch.where(better, new, old) for new, old in zip(tried, codes, strict=True)]
        parts = {"xi": codes[0], "eta": codes[1], "norm": nearest_level(best, between)}
        out: Parts = {}
        for name, width in self.index_bits.items():
            out |= pack_parts(parts[name], width, name)
        return out

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        found = {name: unpack_parts(parts, width, shape[-2], name) for name, width in self.index_bits.items()}
        (levels, _), (norms, _) = self._tables(shape[-1], dtype, found["xi"].device)
        direction = torch.stack(_to_direction(look_up(levels, found["xi"]), look_up(levels, found["eta"])), -1)
        norm = look_up(norms, found["norm"]).unsqueeze(-1) if "norm" in found else norms
        return (direction * norm).flatten(-2)[..., : shape[-1]]


DIM = 8
_CHUNK = 16


class LatticeQuantizer(Quantizer):
    """8 neighbouring channels as the nearer of an integer point with an even sum and a half-integer point.

    A token of a head is divided by its largest magnitude over 2^(bits-1), and points are cut to that range. As in the
    released code, half-integer points have no parity, so the set is larger than E8; what a cut leaves may lie in
    neither part. A point is stored as one number: which of the two parts, and 8 digits of 2^bits + 1 values.

    Args:
        bits: 2 to 4. A point takes 20, 27 or 34 bits: 2.5, 3.375 or 4.25 per channel, without the scale.

    Stores `codes.<i>.<plane>` `[..., heads, tokens, head_dim / 8]`, 16 bits of the number each, and `scale`
    `[..., heads, tokens, 1]` in fp16.

    Raises:
        Unsupported: other bits.

    Source: the code of jagmarques/nexusquant (core/e8_lattice.py, `quantize_perhead`).
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(self, bits: int) -> None:
        require(2 <= bits <= 4, "bits", bits, "LatticeQuantizer takes 2, 3 or 4", Unsupported)
        self.bits = bits

    @property
    def point_bits(self) -> int:
        """Bits of the index that stores one lattice point of 8 channels."""
        return math.ceil(math.log2(2 * self._values**DIM))

    @property
    def _values(self) -> int:
        """Values that one coordinate of a point may have: 2^bits + 1."""
        return int(2**self.bits + 1)

    @property
    def index_bits(self) -> dict[str, int]:
        """Bits of each piece of a point's index, 16 in all pieces but the last."""
        widths = [min(_CHUNK, self.point_bits - start) for start in range(0, self.point_bits, _CHUNK)]
        return {f"codes.{place}": width for place, width in enumerate(widths)}

    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a head dim that is no multiple of 8."""
        require(head_dim % DIM == 0, "head_dim", head_dim, f"lattice points are of {DIM} channels", Unsupported)

    def _points(self, x: Float[Tensor, "*lead 8"]) -> tuple[Tensor, Tensor]:
        """The nearest integer point of even sum and the nearest half-integer point, before they are cut."""
        whole = x.round()
        gap = x - whole
        odd = whole.sum(-1, keepdim=True) % 2 != 0
        worst = gap.abs().argmin(-1, keepdim=True)  # as released: the coordinate nearest to an integer moves
        step = torch.where(gap.gather(-1, worst) >= 0, 1.0, -1.0).to(x.dtype)
        whole = torch.where(odd, whole.scatter_add(-1, worst, step), whole)
        return whole, (x - 0.5).round() + 0.5

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Pieces `codes.<i>` of each point's index, and `scale`, as the class stores them."""
        self.check(x.shape[-1])
        top = 2 ** (self.bits - 1)
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / top
        vectors = (x / scale).unflatten(-1, (-1, DIM))
        whole, half = self._points(vectors)
        nearer = (vectors - half).square().sum(-1) < (vectors - whole).square().sum(-1)
        cut = torch.where(nearer[..., None], half, whole).clamp(-top, top)
        # Digits: an integer point -top to top; a half-integer point counts its values up, the cut ones as the last.
        digits = torch.where(nearer[..., None], (cut + top - 0.5).ceil(), cut + top).long()
        number = nearer.long()
        for place in range(DIM):
            number = number * self._values + digits[..., place]
        parts: Parts = {"scale": to_stored(scale, torch.float16)}
        for place, (name, width) in enumerate(self.index_bits.items()):
            parts |= pack_parts((number >> (_CHUNK * place)) & ((1 << width) - 1), width, name)
        return parts

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        chunks = [unpack_parts(parts, width, shape[-2], name).long() for name, width in self.index_bits.items()]
        number = sum((chunk << (_CHUNK * place) for place, chunk in enumerate(chunks)), torch.zeros_like(chunks[0]))
        digits = []
        for _ in range(DIM):
            digits.append(number % self._values)
            number = number // self._values
        top, found = 2 ** (self.bits - 1), torch.stack(digits[::-1], -1).to(dtype)
        half = (found - top + 0.5).clamp(-top, top)
        cut = torch.where((number == 1)[..., None], half, found - top)
        return cut.flatten(-2) * parts["scale"].to(dtype)
