"""Formats of inference engines: llama.cpp's q4_0, q8_0 and IQ4_NL, 8-bit floats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.levels import look_up
from kvq.codecs.packed import MAX_BITS, pack_parts, unpack_parts
from kvq.codecs.quantizers import CodeQuantizer, Parts, Quantizer, check_group, to_stored
from kvq.codecs.uniform import UniformQuantizer
from kvq.errors import ConfigError, Unsupported


def in_groups(x: Float[Tensor, "*lead dim"], size: int | None) -> Float[Tensor, "*lead groups size"]:
    """Split the channels into groups of `size` (None: one group); a short last group is padded with zeros."""
    size = min(size or x.shape[-1], x.shape[-1])
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def times_scale(
    values: Float[Tensor, "*lead dim"], scale: Float[Tensor, "*_lead groups"], size: int | None
) -> Float[Tensor, "*lead dim"]:
    """Multiply the channels of each group of `size` (None: one group) by the group's scale."""
    groups = in_groups(values, size) * scale.unsqueeze(-1)
    return groups.flatten(-2)[..., : values.shape[-1]]


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return scale.reciprocal().masked_fill_(scale == 0, 0)


class SignedMaxQuantizer(CodeQuantizer):
    """Round to nearest with a signed scale that gives a group's largest value by magnitude the lowest code.

    Per token and group of `group_size` channels, with m the group's value of largest magnitude (the first of them):
    d = -m / 2^(b-1), code = clamp(floor(x (1 / d) + 1/2) + 2^(b-1), 0, 2^b - 1), x̂ = d (code - 2^(b-1)). Codes use the
    reciprocal of the unrounded d; d is stored in fp16. 4 bits in groups of 32 are llama.cpp's q4_0, 5 bits its q5_0.

    Args:
        bits: bits per code, 2-16.
        group_size: channels that share a scale; None = the whole head_dim. A short last group has its own scale.

    Source: `quantize_row_q4_0_ref` and `dequantize_row_q4_0` of ggml.
    """

    version: ClassVar[int] = 2
    token_group = 1
    attended_as = "states"

    def __init__(self, bits: int, group_size: int | None = None) -> None:
        if not 2 <= bits <= MAX_BITS:
            raise Unsupported(f"bits={bits}: a grid with a signed scale has 2 to {MAX_BITS} bits")
        check_group("group_size", group_size, "the whole head_dim")
        self.bits, self.group_size = bits, group_size
        self._middle = 2 ** (bits - 1)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.<plane>`) and `scale` `[..., heads, tokens, groups]`, signed, in fp16."""
        groups = in_groups(x, self.group_size)
        scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -self._middle
        # Halves go up, as in ggml, not to the even code.
        codes = groups.mul(_reciprocal(scale)).add_(self._middle + 0.5).floor_()
        codes = codes.clamp_(0, 2**self.bits - 1).flatten(-2)[..., : x.shape[-1]]
        return pack_parts(codes, self.bits) | {"scale": to_stored(scale.squeeze(-1), torch.float16)}

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * (code - 2^(b-1))`, from the stored scale."""
        steps = unpack_parts(parts, self.bits, shape[-2]).to(dtype).sub(self._middle)
        return times_scale(steps, parts["scale"].to(dtype), self.group_size)


class HalfAwayQuantizer(UniformQuantizer):
    """Symmetric round to nearest per token and group of channels; halves go away from zero, as C's `roundf` rounds.

    d = max|x| / (2^(b-1) - 1), code = roundf(x (1 / d)), x̂ = d code; codes use the unrounded d and its reciprocal, d is
    stored in fp16. 8 bits and groups of 32 are llama.cpp's q8_0 (8.5 bits).

    Args:
        bits: bits per code, 2-16.
        group_size: channels that share a scale; None = the whole head_dim. A short last group has its own scale.

    Source: `quantize_row_q8_0_ref` and `dequantize_row_q8_0` of ggml.
    """

    version: ClassVar[int] = 1

    def __init__(self, bits: int, group_size: int | None = None) -> None:
        super().__init__(bits, "per_token", group_size, symmetric=True, rounding="away", reciprocal=True)


class Float8Quantizer(Quantizer):
    """8-bit floating point (e4m3), with scale max|x| / 448 of all heads, tokens and channels of a block.

    Each sequence has its scale in fp16: 8 + 16 / (H T D) bits per element of H heads, T tokens and D channels.

    Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), Table 1.
    """

    version: ClassVar[int] = 1

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`values` in e4m3, of the shape of `x`, and `scale` `[..., 1, 1, 1]` in fp16."""
        limit = torch.finfo(torch.float8_e4m3fn).max
        scale = x.abs().amax((-3, -2, -1), keepdim=True) / limit
        values = (x / scale.masked_fill(scale == 0, 1)).clamp(-limit, limit)
        return {"values": values.to(torch.float8_e4m3fn), "scale": to_stored(scale, torch.float16)}

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * value`, from the stored scale."""
        return parts["values"].to(dtype) * parts["scale"].to(dtype)


class LevelsQuantizer(CodeQuantizer):
    """Round to the nearest of fixed levels; a signed scale maps a group's value of largest magnitude to the first one.

    Per token and group, with m the value of largest magnitude (the first of them) and v the levels: d = m / v_0, code =
    the nearest v to x (1 / d) (of two, the higher). With `refit`, the stored scale is then the one of least squared
    error weighted with x²: d = Σ x² v x / Σ x² v². IQ4_NL of ggml has 16 levels, groups of 32 and 4.5 bits.

    Args:
        levels: 2 to 256 ascending numbers, the first of them negative.
        group_size: channels that share a scale; None = the whole head_dim. A short last group has its own scale.
        refit: see above; the codes are not chosen again.
        least: a group whose values are all smaller in magnitude is stored as zeros.

    Source: `quantize_row_iq4_nl_ref` of ggml.
    """

    version: ClassVar[int] = 2
    token_group = 1
    attended_as = "states"

    def __init__(
        self, levels: Sequence[float | int], group_size: int | None = None, refit: bool = True, least: float = 1e-15
    ) -> None:
        ascending = all(low < high for low, high in itertools.pairwise(levels))
        if not (2 <= len(levels) <= 256 and ascending and levels[0] < 0):
            raise ConfigError(f"levels={list(levels)}: 2 to 256 ascending numbers, the first of them negative")
        check_group("group_size", group_size, "the whole head_dim")
        self.levels, self.group_size, self.refit, self.least = tuple(map(float, levels)), group_size, refit, least
        self.bits = (len(levels) - 1).bit_length()

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        groups = in_groups(x, self.group_size)
        levels = groups.new_tensor(self.levels)
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = (largest / levels[0]).masked_fill(largest.abs() < self.least, 0)
        steps = groups.mul(_reciprocal(scale)).contiguous()
        codes = torch.bucketize(steps, (levels[1:] + levels[:-1]) / 2, right=True)
        if self.refit:
            chosen, weight = look_up(levels, codes), groups.square()
            top = (weight * chosen * groups).sum(-1, keepdim=True)
            bottom = (weight * chosen.square()).sum(-1, keepdim=True)
            scale = (top / bottom.masked_fill(bottom == 0, 1)).masked_fill(scale == 0, 0)
        stored = {"scale": to_stored(scale.squeeze(-1), torch.float16)}
        return pack_parts(codes.flatten(-2)[..., : x.shape[-1]], self.bits) | stored

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * level`, from the stored scale."""
        codes = unpack_parts(parts, self.bits, shape[-2])
        values = look_up(torch.tensor(self.levels, dtype=dtype, device=codes.device), codes)
        return times_scale(values, parts["scale"].to(dtype), self.group_size)
