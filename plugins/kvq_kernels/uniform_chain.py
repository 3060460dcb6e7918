"""The chain of a codec in the form that fused encoding supports; statistics from ranges, gains from inner products."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvq.codecs import Codec, Gain, Hadamard, TokenNorm, UniformQuantizer, VectorQuantizer, plane_widths
from kvq.codecs.quantizers import Parts, to_stored
from kvq.codecs.stages import Stage
from kvq.codecs.uniform import scale_for_integer_zero
from kvq.kernels.linear_chain import is_rotation

ROWS = 2048
"""Tokens of a head that are encoded together: 1 MiB at 128 channels."""


@dataclass(frozen=True)
class UniformChain:
    """At most one rotation and one norm per head and token, in either order, before a uniform grid of 1-8 bits.

    Attributes:
        rotation: None: none.
        norm: its name; None: none.
        rms: the norm is divided by the square root of the head dim.
    """

    rotation: Stage | None
    norm: str | None
    rms: bool
    quantizer: UniformQuantizer

    @property
    def per_channel(self) -> bool:
        """Whether statistics are per channel and group of tokens, not per token."""
        return self.quantizer.axis == "per_channel"

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the planes."""
        return plane_widths(self.quantizer.bits)

    @property
    def top(self) -> int:
        """The highest code."""
        return 2**self.quantizer.bits - 1 - self.quantizer.symmetric

    @property
    def gain_name(self) -> str | None:
        """The stored part that holds the gain: the norm, or a part of its own; None: there is no gain."""
        if self.quantizer.gain == "none":
            return None
        return "gain" if self.norm is None else f"{self.norm}.scale"

    def group(self, tokens: int, head_dim: int) -> tuple[int, int]:
        """Size of a group, and number of groups of a block: along its `tokens` tokens, or along a token's channels."""
        along = tokens if self.per_channel else head_dim
        size = min(self.quantizer.group_size or along, along)
        return size, -(-along // size)

    def matrix(self, head_dim: int, like: Tensor) -> Float[Tensor, "dim dim"] | None:
        """The rotation in the dtype of `like`."""
        return None if self.rotation is None else self.rotation.matrix(head_dim, like)  # type: ignore[attr-defined]

    @property
    def signs(self) -> bool:
        """Whether all entries of the rotation have one magnitude, so that its signs are exact in any dtype."""
        return isinstance(self.rotation, Hadamard) and self.rotation.block is None


def uniform_chain_of(codec: Codec) -> UniformChain | None:
    """The chain of a codec; None: it has stages or a quantizer that fused encoding does not support."""
    rotation, norm, rms = None, None, False
    for name, stage in codec.stages:
        if type(stage) is TokenNorm and norm is None and stage.scope == "head" and stage.double_quant is None:
            norm, rms = name, stage.rms
        elif is_rotation(stage) and rotation is None:
            rotation = stage
        else:
            return None
    quantizer = codec.quantizer
    if type(quantizer) is not UniformQuantizer or quantizer.bits > 8 or not quantizer.is_plain:
        return None
    return UniformChain(rotation, norm, rms, quantizer)


@dataclass(frozen=True)
class Grids:
    """Groups' statistics, all of one shape: `code = clamp(round((y - base) / step) + zero)`.

    Attributes:
        stored: `scale` and, when asymmetric, `zero_point`, as a codec stores them.
        step, base, zero: in fp32, with unrounded statistics.
        low, scale: in fp32, from the stored statistics: a code decodes to `low + (code - zero) · scale`.
    """

    stored: dict[str, Tensor]
    step: Tensor
    base: Tensor
    zero: Tensor
    low: Tensor
    scale: Tensor


def fit_grids(quantizer: UniformQuantizer, low: Tensor, high: Tensor) -> Grids:
    """The statistics of groups between `low` and `high` (fp32), by the formulas of `UniformQuantizer`."""
    nothing = torch.zeros_like(low)
    if quantizer.symmetric:
        top = 2 ** (quantizer.bits - 1) - 1
        step = torch.maximum(low.abs(), high.abs()) * quantizer.clip / top
        stored = to_stored(step, torch.float16)
        used = step.masked_fill(step == 0, 1)
        return Grids({"scale": stored}, used, nothing, nothing + top, nothing, stored.float())
    if quantizer.clip != 1:
        low, high = low * quantizer.clip, high * quantizer.clip
    step = (high - low) / (2**quantizer.bits - 1)
    if quantizer.zero_point == "float":
        stored, offset = to_stored(step, torch.float16), to_stored(low, torch.float16)
        parts = {"scale": stored, "zero_point": offset}
        return Grids(parts, step.masked_fill(step == 0, 1), low, nothing, offset.float(), stored.float())
    step = scale_for_integer_zero(step, low)
    zero = low.neg().div_(step).round_()
    stored = to_stored(step, torch.float16)
    return Grids({"scale": stored, "zero_point": zero.to(torch.int16)}, step, nothing, zero, nothing, stored.float())


def gain_of(gain: Gain, xx: Tensor, xh: Tensor, hh: Tensor) -> Tensor:
    """`kvq.codecs.gain_factor` from inner products of tokens `x` and their decoded form `h`."""
    top, bottom = {
        "unit": (torch.ones_like(hh), hh.sqrt()),
        "norm": (xx.sqrt(), hh.sqrt()),
        "l2": (xh, hh),
        "parallel": (xx, xh),
    }[gain]
    return torch.where(bottom == 0, torch.ones_like(top), top / bottom.masked_fill(bottom == 0, 1))


def parts_of_search(
    quantizer: VectorQuantizer,
    y: Float[Tensor, "*lead tokens dim"],
    codes: UInt8[Tensor, "planes vectors"],
    scores: Float[Tensor, " vectors"],
) -> tuple[Parts, Float[Tensor, "*lead tokens 1"] | None]:
    """The parts of `VectorQuantizer.encode`, and the gain of each token (None: the quantizer has none).

    `scores` are `v·c - |c|²/2` of each vector v and its nearest entry c.
    """
    shape = (*y.shape[:-1], -1)
    parts = {f"codes.{index}": plane.view(shape) for index, plane in enumerate(codes)}
    if quantizer.gain == "none":
        return parts, None
    # Of a vector and its entry, the product is the score and half of the entry's square.
    halves = book_columns(quantizer.codebook, quantizer.bits, y.device)[-1].neg()
    half = halves.index_select(0, codes[0].int()).view(shape)
    product = scores.view(shape) + half
    sums = (y.square().sum(-1), product.sum(-1), 2 * half.sum(-1))
    return parts, gain_of(quantizer.gain, *sums)[..., None]


@functools.cache
def book_columns(codebook: str, bits: int, device: torch.device) -> Float[Tensor, "9 256"]:
    """The 256 entries c of a codebook as columns: 8 channels, then -|c|²/2."""
    entries, _, _ = VectorQuantizer(bits, codebook).tables()
    half = entries.square().sum(-1, keepdim=True) / -2
    return torch.cat([entries, half], 1).T.contiguous().to(device)
