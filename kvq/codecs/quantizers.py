"""Quantizers: the last element of a codec, where values become codes."""

from __future__ import annotations

import abc
import copy
import enum
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs.grids import (
    Halves,
    Levels,
    SideDtype,
    scale_for_integer_zero,
    scale_from_edge,
    whole,
    with_code,
    without_code,
)
from kvq.codecs.packing import MAX_BITS, pack_parts, unpack_parts
from kvq.errors import ConfigError, Unsupported, did_you_mean

Parts = dict[str, Tensor]
_Kind = TypeVar("_Kind", bound=enum.Enum)
_Bits = TypeVar("_Bits", bound="_HasBits")


@runtime_checkable
class _HasBits(Protocol):
    bits: int


class Axis(enum.Enum):
    """The group that shares statistics: tokens of one channel, or channels of one token."""

    per_channel = "per_channel"
    per_token = "per_token"


class ZeroPoint(enum.Enum):
    """What is kept besides the scale of an asymmetric grid.

    `float`: the group's minimum lo (KIVI, nsn). `integer`: round(-lo / scale) in 16 bits (QuaRot, OScaR). `ratio`:
    -lo / scale, not rounded (LMDeploy). `code`: -lo / scale rounded and clamped to a code, in place of the last bits of
    the fp32 scale (vLLM). `edge`: the end of larger magnitude; the scale has a sign and 0 is on the grid (MLX).
    """

    float = "float"
    integer = "integer"
    ratio = "ratio"
    code = "code"
    edge = "edge"


class Gain(enum.Enum):
    """One factor per head and token, computed from x and its reconstruction x̂.

    `l2` (x·x̂)/(x̂·x̂), `norm` |x|/|x̂| and `parallel` |x|²/(x·x̂) are NSNQuant's strategies 1-3; `unit` is 1/|x̂| (nsn).
    """

    none = "none"
    l2 = "l2"
    norm = "norm"
    parallel = "parallel"
    unit = "unit"


def choice(kind: type[_Kind], value: object, setting: str) -> _Kind:
    """The member of `kind` named by `value`. Raises: ConfigError: naming the setting and the allowed values."""
    if isinstance(value, kind):
        return value
    names = [member.name for member in kind]
    if value not in names:
        raise ConfigError(f"{setting}={value}: one of {', '.join(names)}.{did_you_mean(str(value), names)}")
    return kind[str(value)]


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to `dtype`; fp16, whose range other dtypes exceed, saturates instead of overflowing to infinity."""
    if dtype is torch.float16:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


class Quantizer(abc.ABC):
    """Maps `[..., heads, tokens, head_dim]` to stored parts and back; the parts' rows (dim -2) run along tokens.

    Attributes:
        token_group: tokens that share statistics; 1: each token on its own, None: the whole block.
        varies: the number of rows of some part depends on the block, so that blocks are stored one by one.
    """

    gain: Gain = Gain.none
    token_group: int | None = None
    varies = False

    @property
    def indices(self) -> dict[str, int]:
        """Bits of each kind of index that is stored for all tokens of a block, by the name of its `pack_parts`."""
        return {}

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        """This quantizer with `extra` bits more, but not above `most`. Raises: Unsupported: it has no such setting."""
        raise Unsupported(
            f"{type(self).__name__}: has no bits to add; a Uniform, LloydMax or InnerProductQuantizer has"
        )

    def check(self, head_dim: int) -> None:  # noqa: B027 - most quantizers work on any head dim
        """Raise `Unsupported` when the quantizer cannot work on `head_dim` channels."""

    @abc.abstractmethod
    def encode(self, x: Tensor, dtype: torch.dtype) -> Parts:
        """Stored parts of `x` (in the compute dtype); `dtype` is that of the tensor the codec was given."""

    @abc.abstractmethod
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The reconstruction, `shape` = `[..., heads, tokens, head_dim]`, in the compute dtype `dtype`."""


def more_bits(quantizer: _Bits, extra: int, most: int) -> _Bits:
    """A copy with `bits` raised by `extra`, but not above `most`."""
    other = copy.copy(quantizer)
    other.bits = max(quantizer.bits, min(quantizer.bits + extra, most))
    return other


class Passthrough(Quantizer):
    """Stores values unchanged. Under it every task must score exactly as in full precision."""

    version: ClassVar[int] = 1

    token_group = 1

    @override
    def encode(self, x: Tensor, dtype: torch.dtype) -> Parts:
        return {"values": x.to(dtype, copy=True)}  # copies: stored values must not change when a caller's tensor does

    @override
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return parts["values"].to(dtype, copy=True)


class Zero(Quantizer):
    """Stores nothing and decodes to zeros. Under it no task may score as in full precision."""

    version: ClassVar[int] = 1

    token_group = 1

    @override
    def encode(self, x: Tensor, dtype: torch.dtype) -> Parts:
        # A tensor with zero rows: it keeps the device and has no bytes.
        return {"nothing": x.new_empty(*x.shape[:-2], 0, 1)}

    @override
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=parts["nothing"].device)


class UniformQuantizer(Quantizer):
    """Round to nearest on a uniform grid, with statistics per group.

    Args:
        bits: bits per code, 1-16 (symmetric: 2-16).
        axis: `per_channel`: a group is `group_size` tokens of one channel; `per_token`: that many channels of a token.
        group_size: None = the whole block (per channel) or the whole head_dim (per token). A short last group has its
            own statistics.
        symmetric: a grid around 0, see `Levels`; else lo = min, scale (max - min) / (2^b - 1).
        zero_point: see `ZeroPoint`; of an asymmetric grid.
        clip: ratio applied to both ends of the range (QuaRot: 0.95).
        gain: see `Gain`.
        levels: see `Levels`; of a symmetric grid.
        fixed_scale: a scale for all groups of a symmetric grid, which is not stored (None: each group has its own).
        least_scale: scales below it become it.
        halves: see `Halves`.
        reciprocal: multiply by the reciprocal of the scale instead of dividing by the scale; of all grids but
            `integer` and `edge`.
        side_dtype: dtype of stored scales and offsets, see `SideDtype`.

    Codes are chosen in fp32 (fp64 for fp64 input) with unrounded statistics; decoding uses the stored values. A
    constant group of a `ratio` grid, where engines divide by zero, keeps its value.

    Raises:
        ConfigError: an unknown name, group size or clip out of range, settings that do not belong together.
        Unsupported: bits the grid cannot have.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        bits: int,
        axis: Axis | str,
        group_size: int | None = None,
        symmetric: bool = False,
        zero_point: ZeroPoint | str = ZeroPoint.float,
        clip: float = 1.0,
        gain: Gain | str = Gain.none,
        levels: Levels | str = Levels.odd,
        fixed_scale: float | None = None,
        least_scale: float = 0.0,
        halves: Halves | str = Halves.even,
        reciprocal: bool = False,
        side_dtype: SideDtype | str = SideDtype.float16,
    ) -> None:
        lowest = 2 if symmetric else 1
        if not lowest <= bits <= MAX_BITS:
            kind = "a symmetric" if symmetric else "an asymmetric"
            raise Unsupported(f"bits={bits}: {kind} uniform quantizer has {lowest} to {MAX_BITS} bits")
        if group_size is not None and group_size < 1:
            raise ConfigError(f"group_size={group_size}: at least 1, or null for the whole block")
        if not 0 < clip <= 1:
            raise ConfigError(f"clip={clip}: above 0, at most 1")
        self.bits, self.group_size, self.symmetric, self.clip = bits, group_size, symmetric, clip
        self.axis = choice(Axis, axis, "axis")
        self.zero_point = choice(ZeroPoint, zero_point, "zero_point")
        self.gain = choice(Gain, gain, "gain")
        self.levels = choice(Levels, levels, "levels")
        self.halves = choice(Halves, halves, "halves")
        self.side_dtype = choice(SideDtype, side_dtype, "side_dtype")
        self.fixed_scale, self.least_scale = fixed_scale, least_scale
        self.reciprocal = reciprocal
        self._check_together()

    def _check_together(self) -> None:
        if not self.symmetric and (self.levels is not Levels.odd or self.fixed_scale is not None):
            given = "fixed_scale" if self.fixed_scale is not None else f"levels={self.levels.name}"
            raise ConfigError(f"{given}: of a symmetric grid; symmetric=true")
        if self.fixed_scale is not None and not self.fixed_scale > 0:
            raise ConfigError(f"fixed_scale={self.fixed_scale}: above 0, or null for a scale of each group")
        if self.least_scale < 0:
            raise ConfigError(f"least_scale={self.least_scale}: at least 0")
        if self.zero_point is ZeroPoint.code and (self.side_dtype is not SideDtype.float32 or self.bits > 8):
            raise ConfigError(
                "zero_point=code: with side_dtype=float32 and at most 8 bits, which the scale has room for"
            )

    @property
    def is_affine(self) -> bool:
        """Codes decode to `lo + scale * code` with an fp16 scale for each group, which kernels fold into products."""
        if self.side_dtype is not SideDtype.float16:
            return False
        if self.symmetric:
            return self.levels is Levels.odd and self.fixed_scale is None
        return self.zero_point in (ZeroPoint.float, ZeroPoint.integer)

    @property
    def is_plain(self) -> bool:
        """Affine, with codes chosen as papers do: the nearest even one, by division by the unrounded scale."""
        exact = not (self.reciprocal or self.least_scale)
        return self.is_affine and exact and self.halves is Halves.even

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """Per channel, the tokens of a group; per token, 1."""
        return self.group_size if self.axis is Axis.per_channel else 1

    @property
    @override
    def indices(self) -> dict[str, int]:
        return {"codes": self.bits}

    @override
    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        """Raises: Unsupported: a subclass, whose grid follows from its bits."""
        if type(self) is not UniformQuantizer:
            return super().with_more_bits(extra, most)
        return more_bits(self, extra, most)

    @property
    def _dim(self) -> int:
        return -2 if self.axis is Axis.per_channel else -1

    def _grouped(self, x: Tensor) -> Tensor:
        """View with an axis of groups before the grouped one; a short last group repeats its last value."""
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

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.<plane>`), `scale` and, when asymmetric, `zero_point` (integer zero points: int16)."""
        groups = self._grouped(x)
        stats, codes = self._symmetric(groups) if self.symmetric else self._asymmetric(groups)
        return pack_parts(self._ungroup(codes, x.shape[self._dim]), self.bits) | stats

    @property
    def _divisor(self) -> int:
        """The scale of an asymmetric group is its range over this number of steps."""
        return 2**self.bits - 1

    def _side(self, stat: Tensor) -> Tensor:
        """Statistics of groups as they are stored."""
        return to_stored(stat.squeeze(self._dim), self.side_dtype.torch)

    def _steps(self, x: Tensor, scale: Tensor) -> Tensor:
        """How many times `scale` is in `x`, in a new tensor. A scale of 0 counts as 1."""
        if not self.reciprocal:
            return x.div(scale.masked_fill(scale == 0, 1))
        return x * scale.reciprocal().masked_fill(scale == 0, 0)

    def _rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        """Whole steps of `scale` in `x`, in a new tensor."""
        return whole(self._steps(x, scale), self.halves)

    @property
    def _middle(self) -> int:
        """The code of the level 0 of a symmetric grid; of `midpoint`, that of the level above 0."""
        return 2 ** (self.bits - 1) - (self.levels is Levels.odd)

    def _symmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        middle, top = self._middle, self._middle - (self.levels is not Levels.odd)
        if self.fixed_scale is not None:
            return {}, self._rounded(groups, groups.new_tensor(self.fixed_scale)).clamp_(-middle, top).add_(middle)
        scale = torch.linalg.vector_norm(groups, float("inf"), dim=self._dim, keepdim=True) * self.clip
        if self.levels is Levels.midpoint:
            scale = scale.clamp_min(self.least_scale)
            codes = self._steps(groups.mul(middle), scale).add_(middle).floor_().clamp_(0, middle + top)
            return {"scale": self._side(scale)}, codes
        scale = self._at_least(scale / middle)
        return {"scale": self._side(scale)}, self._rounded(groups, scale).clamp_(-middle, top).add_(middle)

    def _at_least(self, scale: Tensor) -> Tensor:
        return scale.clamp_min(self.least_scale) if self.least_scale else scale

    def _asymmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        top = 2**self.bits - 1
        low, high = torch.aminmax(groups, dim=self._dim, keepdim=True)
        if self.clip != 1:
            low, high = low * self.clip, high * self.clip
        scale = self._at_least((high - low) / self._divisor)
        if self.zero_point is ZeroPoint.float:
            codes = self._rounded(groups.sub(low), scale).clamp_(0, top)
            offset = self._side(low)
        elif self.zero_point is ZeroPoint.edge:
            scale, low = scale_from_edge(scale, low, high)
            codes = self._rounded(groups.sub(low), scale).clamp_(0, top)
            offset = self._side(low)
        elif self.zero_point is ZeroPoint.ratio:
            scale = torch.where(scale == 0, low.abs(), scale)
            zero = low.neg().div_(scale.masked_fill(scale == 0, 1))
            codes = whole(self._steps(groups, scale).add_(zero), self.halves).clamp_(0, top)
            offset = self._side(zero)
        elif self.zero_point is ZeroPoint.code:
            used = scale.masked_fill(scale == 0, 1)
            zero = whole(low.neg().div_(used), self.halves).clamp_(0, top)
            codes = whole(self._steps(groups, used).add_(zero), self.halves).clamp_(0, top)
            return {"scale": with_code(used.squeeze(self._dim), zero.squeeze(self._dim), self.bits)}, codes
        else:
            scale = scale_for_integer_zero(scale, low)
            zero = low.neg().div_(scale).round_()
            codes = self._rounded(groups, scale).add_(zero).clamp_(0, top)
            offset = zero.squeeze(self._dim).to(torch.int16)
        return {"scale": self._side(scale), "zero_point": offset}, codes

    @override
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * code + lo`, or `scale * (code - zero)`, from the stored statistics."""
        groups = self._grouped(unpack_parts(parts, self.bits, shape[-2]).to(dtype))
        if self.fixed_scale is not None:
            return self._ungroup(groups.sub(self._middle).mul_(self.fixed_scale), shape[self._dim])
        if self.zero_point is ZeroPoint.code and not self.symmetric:
            scale, zero = without_code(parts["scale"], self.bits)
            out = groups.sub(self._per_element(zero.to(dtype))).mul_(self._per_element(scale.to(dtype)))
            return self._ungroup(out, shape[self._dim])
        scale = self._per_element(parts["scale"].to(dtype))
        if self.symmetric and self.levels is Levels.midpoint:
            out = groups.sub(self._middle - 0.5).div_(self._middle).mul_(scale)
        elif self.symmetric:
            out = groups.sub(self._middle).mul_(scale)
        elif self.zero_point in (ZeroPoint.float, ZeroPoint.edge):
            out = torch.addcmul(self._per_element(parts["zero_point"].to(dtype)), groups, scale)
        else:
            out = groups.sub(self._per_element(parts["zero_point"].to(dtype))).mul_(scale)
        return self._ungroup(out, shape[self._dim])
