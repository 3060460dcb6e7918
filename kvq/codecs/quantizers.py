"""Quantizers: the last element of a codec, where values become codes."""

from __future__ import annotations

import abc
import copy
import enum
from typing import ClassVar, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs.packing import MAX_BITS, pack_parts, unpack_parts
from kvq.errors import ConfigError, Unsupported, did_you_mean

Parts = dict[str, Tensor]
_Kind = TypeVar("_Kind", bound=enum.Enum)
_Bits = TypeVar("_Bits", bound="_HasBits")
_INT16_MAX = 32767
_FP16_TINY = 2.0**-24  # the smallest positive number


class _HasBits(Protocol):
    bits: int


class Axis(enum.Enum):
    """The group that shares statistics: tokens of one channel, or channels of one token."""

    per_channel = "per_channel"
    per_token = "per_token"


class ZeroPoint(enum.Enum):
    """The offset of an asymmetric grid: the group's minimum (KIVI, nsn), or a rounded integer (QuaRot, OScaR)."""

    float = "float"
    integer = "integer"


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
        symmetric: scale max|x| / (2^(b-1) - 1) and codes ±(2^(b-1) - 1); else lo = min, scale (max - min) / (2^b - 1).
        zero_point: of an asymmetric grid: `float` keeps lo; `integer` keeps round(-lo / scale) in 16 bits.
        clip: ratio applied to both ends of the range (QuaRot: 0.95).
        gain: see `Gain`.

    Codes are chosen in fp32 (fp64 for fp64 input) with unrounded statistics; scale and lo are stored in fp16, and
    decoding uses the stored values.

    Raises:
        ConfigError: unknown axis, zero point or gain, group size or clip out of range.
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
        """Codes (`codes.<plane>`), `scale` and, when asymmetric, `zero_point`, in fp16 (integer zero points: int16)."""
        groups = self._grouped(x)
        stats, codes = self._symmetric(groups) if self.symmetric else self._asymmetric(groups)
        return pack_parts(self._ungroup(codes, x.shape[self._dim]), self.bits) | stats

    @property
    def _divisor(self) -> int:
        """The scale of an asymmetric group is its range over this number of steps."""
        return 2**self.bits - 1

    @staticmethod
    def _rounded(x: Tensor, scale: Tensor) -> Tensor:
        """Whole steps of `scale` in `x`, in a new tensor; halves go to the even one. A scale of 0 counts as 1."""
        return x.div(scale.masked_fill(scale == 0, 1)).round_()

    def _symmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        top = 2 ** (self.bits - 1) - 1
        scale = torch.linalg.vector_norm(groups, float("inf"), dim=self._dim, keepdim=True) * self.clip / top
        codes = self._rounded(groups, scale).clamp_(-top, top).add_(top)
        return {"scale": to_stored(scale.squeeze(self._dim), torch.float16)}, codes

    def _asymmetric(self, groups: Tensor) -> tuple[Parts, Tensor]:
        top = 2**self.bits - 1
        low, high = torch.aminmax(groups, dim=self._dim, keepdim=True)
        if self.clip != 1:
            low, high = low * self.clip, high * self.clip
        scale = (high - low) / self._divisor
        if self.zero_point is ZeroPoint.float:
            codes = self._rounded(groups.sub(low), scale).clamp_(0, top)
            offset = to_stored(low.squeeze(self._dim), torch.float16)
        else:
            scale = scale_for_integer_zero(scale, low)
            zero = low.neg().div_(scale).round_()
            codes = self._rounded(groups, scale).add_(zero).clamp_(0, top)
            offset = zero.squeeze(self._dim).to(torch.int16)
        return {"scale": to_stored(scale.squeeze(self._dim), torch.float16), "zero_point": offset}, codes

    @override
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * code + lo`, or `scale * (code - zero)`, from the stored statistics."""
        groups = self._grouped(unpack_parts(parts, self.bits, shape[-2]).to(dtype))
        scale = self._per_element(parts["scale"].to(dtype))
        if self.symmetric:
            out = groups.sub(2 ** (self.bits - 1) - 1).mul_(scale)
        elif self.zero_point is ZeroPoint.float:
            out = torch.addcmul(self._per_element(parts["zero_point"].to(dtype)), groups, scale)
        else:
            out = groups.sub(self._per_element(parts["zero_point"].to(dtype))).mul_(scale)
        return self._ungroup(out, shape[self._dim])


def scale_for_integer_zero(scale: Tensor, low: Tensor) -> Tensor:
    """Enlarge the scale of groups so narrow (or constant) that `low / scale` does not fit 16 bits.

    Their scale becomes a power of two, which fp16 stores exactly; a large zero point would multiply a rounding error.
    """
    least = low.abs() / _INT16_MAX
    return torch.where(scale < least, torch.exp2(torch.log2(least).ceil()), scale).clamp_min(_FP16_TINY)
