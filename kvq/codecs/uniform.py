"""Uniform grids: rounding to nearest, and the scales and roundings in which methods and engines differ."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.packed import MAX_BITS, pack_parts, unpack_parts
from kvq.codecs.quantizers import (
    Axis,
    CodeQuantizer,
    Gain,
    Parts,
    Quantizer,
    check_group,
    checked_choice,
    more_bits,
    to_stored,
)
from kvq.errors import Unsupported, at_least, require

_FP16_TINY = 2.0**-24  # the smallest positive number
Rounding = Literal["even", "up", "down", "away", "truncate"]
"""The whole number that a value becomes.

`even`, `up`, `down` and `away` are the nearest one, and differ where a value is halfway between two: IEEE's
default, floor(x + 1/2), ceil(x - 1/2), and C's `roundf`. `truncate` drops the fraction, as a cast to an integer.
"""
ScaleDtype = Literal["float16", "bfloat16", "float32"]
"""Dtype in which scales and offsets are stored."""
ZeroPoint = Literal["float", "integer", "edge"]
"""What is kept besides the scale of an asymmetric grid.

`float`: the group's minimum lo (KIVI, nsn). `integer`: round(-lo / scale) in 16 bits (QuaRot, OScaR). `edge`: the end
of larger magnitude; the scale has a sign and 0 is on the grid (MLX).
"""


def round_steps(steps: Tensor, rounding: Rounding) -> Tensor:
    """Round `steps` to whole numbers by the rule `rounding`; may overwrite its argument."""
    if rounding == "even":
        return steps.round_()
    if rounding == "up":
        return steps.add_(0.5).floor_()
    if rounding == "down":
        return steps.sub_(0.5).ceil_()
    cut = steps.trunc()
    if rounding == "truncate":
        return cut
    # Not trunc(x + 1/2): the largest number below 1/2 would go up.
    return cut + (steps - cut).abs().ge(0.5) * steps.sign()


def scale_for_integer_zero(scale: Tensor, low: Tensor) -> Tensor:
    """Enlarge the scale of groups so narrow (or constant) that `low / scale` does not fit 16 bits.

    Their scale becomes a power of two, which fp16 stores exactly; a large zero point would multiply a rounding error.
    """
    least = low.abs() / 32767
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


class UniformQuantizer(CodeQuantizer):
    """Round to nearest on a uniform grid, with statistics per group.

    Args:
        bits: bits per code, 1-16 (symmetric: 2-16).
        axis: `per_channel`: a group is `group_size` tokens of one channel; `per_token`: that many channels of a token.
        group_size: None = the whole block (per channel) or the head_dim (per token). A short last group has its own.
        symmetric: a grid around 0, scale max|x| / (2^(b-1) - 1); else lo = min, scale (max - min) / (2^b - 1).
        zero_point: see `ZeroPoint`; of an asymmetric grid.
        clip: ratio applied to both ends of the range (QuaRot: 0.95).
        gain: see `Gain`.
        min_scale: scales below it become it.
        rounding: see `Rounding`.
        reciprocal: multiply by the reciprocal of the scale instead of dividing by the scale.
        scale_dtype: dtype of stored scales and offsets, see `ScaleDtype`.

    Codes are chosen in fp32 (fp64 for fp64 input) with unrounded statistics; decoding uses the stored values.
    """

    version: ClassVar[int] = 1
    attended_as = "states"

    def __init__(
        self,
        bits: int,
        axis: Axis | str,
        group_size: int | None = None,
        symmetric: bool = False,
        zero_point: ZeroPoint | str = "float",
        clip: float = 1.0,
        gain: Gain | str = "none",
        min_scale: float = 0.0,
        rounding: Rounding | str = "even",
        reciprocal: bool = False,
        scale_dtype: ScaleDtype | str = "float16",
    ) -> None:
        lowest = 2 if symmetric else 1
        if not lowest <= bits <= MAX_BITS:
            kind = "a symmetric" if symmetric else "an asymmetric"
            raise Unsupported(f"bits={bits}: {kind} uniform quantizer has {lowest} to {MAX_BITS} bits")
        check_group("group_size", group_size, "the whole block")
        require(0 < clip <= 1, "clip", clip, "above 0, at most 1")
        self.bits, self.group_size, self.symmetric, self.clip = bits, group_size, symmetric, clip
        self.axis: Axis = checked_choice(Axis, axis, "axis")
        self.zero_point: ZeroPoint = checked_choice(ZeroPoint, zero_point, "zero_point")
        require(zero_point != "edge" or bits in (2, 3, 4, 5, 6, 8), "bits", bits, "of MLX, 2 to 6 or 8", Unsupported)
        self.gain: Gain = checked_choice(Gain, gain, "gain")
        self.rounding: Rounding = checked_choice(Rounding, rounding, "rounding")
        self.scale_dtype: ScaleDtype = checked_choice(ScaleDtype, scale_dtype, "scale_dtype")
        self.min_scale, self.reciprocal = min_scale, reciprocal
        at_least("min_scale", min_scale, 0)

    @property
    def is_affine(self) -> bool:
        """Whether codes decode to `lo + scale * code` with an fp16 scale per group, as kernels need it."""
        return self.scale_dtype == "float16" and (self.symmetric or self.zero_point in ("float", "integer"))

    @property
    def is_plain(self) -> bool:
        """Whether the grid is affine, without `min_scale`, and codes are x divided by the scale, halves to even."""
        return self.is_affine and not self.reciprocal and not self.min_scale and self.rounding == "even"

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """Per channel, the tokens of a group; per token, 1."""
        return self.group_size if self.axis == "per_channel" else 1

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        own = type(self) is UniformQuantizer
        return more_bits(self, extra, most) if own else super().with_more_bits(extra, most)

    @property
    def _dim(self) -> int:
        return -2 if self.axis == "per_channel" else -1

    def _grouped(self, x: Tensor) -> Tensor:
        """View of `x` with an axis of groups before the grouped axis; a short last group repeats its last value."""
        dim, length = self._dim, x.shape[self._dim]
        size = min(self.group_size or length, length)
        short = -length % size
        if short:
            x = torch.cat([x, x.narrow(dim, length - 1, 1).repeat_interleave(short, dim)], dim)
        return x.unflatten(dim, (-1, size))

    def _per_element(self, stat: Tensor) -> Tensor:
        """Statistics with an axis that broadcasts over the elements of a group."""
        return stat.unsqueeze(self._dim)

    def _ungroup(self, grouped: Tensor, length: int) -> Tensor:
        return grouped.flatten(self._dim - 1, self._dim).narrow(self._dim, 0, length)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.<plane>`), `scale` and, when asymmetric, `zero_point` (integer zero points: int16)."""
        groups = self._grouped(x)
        stats, codes = self._symmetric(groups) if self.symmetric else self._asymmetric(groups)
        return pack_parts(self._ungroup(codes, x.shape[self._dim]), self.bits) | stats

    def _store_statistics(self, stat: Tensor) -> Tensor:
        """Scales or offsets of groups, without the axis within a group, cast to `scale_dtype`."""
        return to_stored(stat.squeeze(self._dim), getattr(torch, self.scale_dtype))

    def _steps(self, x: Tensor, scale: Tensor) -> Tensor:
        """How many times `scale` is in `x`, in a new tensor. A scale of 0 counts as 1."""
        if not self.reciprocal:
            return x.div(scale.masked_fill(scale == 0, 1))
        return x * scale.reciprocal().masked_fill(scale == 0, 0)

    def _rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        """Whole steps of `scale` in `x`, in a new tensor."""
        return round_steps(self._steps(x, scale), self.rounding)

    @property
    def _middle(self) -> int:
        """The code of the level 0 of a symmetric grid."""
        return 2 ** (self.bits - 1) - 1

    def _symmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        middle = self._middle
        largest = torch.linalg.vector_norm(groups, float("inf"), dim=self._dim, keepdim=True) * self.clip
        scale = self._at_least(largest / middle)
        codes = self._rounded(groups, scale).clamp_(-middle, middle).add_(middle)
        return {"scale": self._store_statistics(scale)}, codes

    def _at_least(self, scale: Tensor) -> Tensor:
        return scale.clamp_min(self.min_scale) if self.min_scale else scale

    def _clipped_range(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """The range of each group, clipped."""
        low, high = torch.aminmax(groups, dim=self._dim, keepdim=True)
        return (low, high) if self.clip == 1 else (low * self.clip, high * self.clip)

    def _asymmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        top = 2**self.bits - 1
        low, high = self._clipped_range(groups)
        scale = self._at_least((high - low) / top)
        if self.zero_point == "edge":
            scale, low = scale_from_edge(scale, low, high)
        if self.zero_point in ("float", "edge"):
            codes = self._rounded(groups.sub(low), scale).clamp_(0, top)
            offset = self._store_statistics(low)
        else:
            scale = scale_for_integer_zero(scale, low)
            zero = low.neg().div_(scale).round_()
            codes = self._rounded(groups, scale).add_(zero).clamp_(0, top)
            offset = zero.squeeze(self._dim).to(torch.int16)
        return {"scale": self._store_statistics(scale), "zero_point": offset}, codes

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * code + lo`, or `scale * (code - zero)`, from the stored statistics."""
        groups = self._grouped(unpack_parts(parts, self.bits, shape[-2]).to(dtype))
        scale = self._per_element(parts["scale"].to(dtype))
        if self.symmetric:
            out = groups.sub(self._middle).mul_(scale)
        elif self.zero_point in ("float", "edge"):
            out = torch.addcmul(self._per_element(parts["zero_point"].to(dtype)), groups, scale)
        else:
            out = groups.sub(self._per_element(parts["zero_point"].to(dtype))).mul_(scale)
        return self._ungroup(out, shape[self._dim])


class ClippedQuantizer(UniformQuantizer):
    """Asymmetric per token in groups of channels, with `clip_at_2` of the range at 2 bits, else all of it.

    Args:
        bits: bits per code.
        group_size: channels that share statistics; None = the whole head_dim.
        clip_at_2: ratio applied to both ends of the range at 2 bits.
        zero_point: as `UniformQuantizer`.

    Source: RotateKV (arXiv 2501.16383).
    """

    version: ClassVar[int] = 1
    attended_as = None  # type: ignore[assignment]

    def __init__(
        self, bits: int, group_size: int | None = 128, clip_at_2: float = 0.8, zero_point: ZeroPoint | str = "float"
    ) -> None:
        super().__init__(bits, "per_token", group_size, zero_point=zero_point, clip=clip_at_2 if bits == 2 else 1.0)
