"""Scales and rounding of uniform grids: what differs between methods and engines whose grids are otherwise equal."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

_INT16_MAX = 32767
_FP16_TINY = 2.0**-24  # the smallest positive number


class Halves(enum.Enum):
    """The whole number that a value becomes.

    `even`, `up` and `away` are the nearest one, and differ where a value is halfway between two: IEEE's default,
    floor(x + 1/2), and C's `roundf`. `truncate` drops the fraction, as a cast to an integer does.
    """

    even = "even"
    up = "up"
    away = "away"
    truncate = "truncate"


class Levels(enum.Enum):
    """Levels of a symmetric grid, with m = 2^(b-1).

    `odd`: scale max|x| / (m - 1), codes ±(m - 1). `full`: scale max|x| / m, codes -m to m - 1, so that a largest value
    that is positive is clipped. `midpoint`: scale max|x| and levels (code + 1/2) / m, of which none is 0.
    """

    odd = "odd"
    full = "full"
    midpoint = "midpoint"


class SideDtype(enum.Enum):
    """Dtype in which scales and offsets are stored."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"

    @property
    def torch(self) -> torch.dtype:
        """The dtype of torch."""
        return _DTYPES[self]


_DTYPES = {
    SideDtype.float16: torch.float16,
    SideDtype.bfloat16: torch.bfloat16,
    SideDtype.float32: torch.float32,
}


def whole(steps: Tensor, halves: Halves) -> Tensor:
    """`steps` as whole numbers; may overwrite its argument."""
    if halves is Halves.even:
        return steps.round_()
    if halves is Halves.up:
        return steps.add_(0.5).floor_()
    cut = steps.trunc()
    if halves is Halves.truncate:
        return cut
    # Not trunc(x + 1/2): the largest number below 1/2 would go up.
    return cut + (steps - cut).abs().ge(0.5) * steps.sign()


def scale_for_integer_zero(scale: Tensor, low: Tensor) -> Tensor:
    """Enlarge the scale of groups so narrow (or constant) that `low / scale` does not fit 16 bits.

    Their scale becomes a power of two, which fp16 stores exactly; a large zero point would multiply a rounding error.
    """
    least = low.abs() / _INT16_MAX
    return torch.where(scale < least, torch.exp2(torch.log2(least).ceil()), scale).clamp_min(_FP16_TINY)


def scale_from_edge(scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """MLX's grid: a scale with a sign, and the end of larger magnitude as offset, so that 0 is a level.

    With `edge` that end, the scale becomes edge / round(edge / scale); where that quotient is 0, the offset is 0.
    """
    scale = scale.clamp_min(1e-7)
    from_low = low.abs() > high.abs()
    scale, edge = torch.where(from_low, scale, -scale), torch.where(from_low, low, high)
    steps = edge.div(scale).round_()
    exact = steps != 0
    return torch.where(exact, edge / steps.masked_fill(~exact, 1), scale), edge.masked_fill(~exact, 0)


def with_code(scale: Tensor, code: Tensor, bits: int) -> Tensor:
    """Scales in fp32 whose last `bits` mantissa bits hold a code."""
    stored = torch.empty_like(scale, dtype=torch.float32).copy_(scale).view(torch.int32)
    return (stored & -(1 << bits) | code.to(torch.int32)).view(torch.float32)


def without_code(scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scales, with zeros in place of the codes, and the codes."""
    stored = scale.view(torch.int32)
    return (stored & -(1 << bits)).view(torch.float32), stored & ((1 << bits) - 1)
