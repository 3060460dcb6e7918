"""Formats of inference engines: llama.cpp's q4_0, q8_0 and IQ4_NL, 8-bit floats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.levels import look_up
from kvq.codecs.packed import MAX_BITS, pack_parts, unpack_parts
from kvq.codecs.quantizers import CodeQuantizer, Parts, Quantizer, check_group, checked_choice, to_stored
from kvq.codecs.uniform import ScaleDtype, UniformQuantizer
from kvq.errors import ConfigError, Unsupported, at_least


def in_groups(x: Float[Tensor, "*lead dim"], size: int | None) -> Float[Tensor, "*lead groups size"]:
    """The channels in groups of `size` (None: all); a short last group gets zeros, which are never the largest."""
    size = min(size or x.shape[-1], x.shape[-1])
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def times_scale(
    values: Float[Tensor, "*lead dim"], scale: Float[Tensor, "*_lead groups"], size: int | None
) -> Float[Tensor, "*lead dim"]:
    """The channels of each group of `size` (None: all) times the group's scale."""
    groups = in_groups(values, size) * scale.unsqueeze(-1)
    return groups.flatten(-2)[..., : values.shape[-1]]


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return scale.reciprocal().masked_fill_(scale == 0, 0)


class SignedMaxQuantizer(CodeQuantizer):
    """Round to nearest with a signed scale that gives a group's largest value by magnitude the lowest code.

    Per token and group of `group_size` channels, with m the group's value of largest magnitude (the first of them):
    d = -m / 2^(b-1), code = clamp(floor(x (1 / d) + 1/2) + 2^(b-1), 0, 2^b - 1), x̂ = d (code - 2^(b-1)). Codes use the
    reciprocal of the unrounded d; d is stored in fp16. 4 bits and groups of 32 are llama.cpp's q4_0 (4.5 bits), 5 bits
    its q5_0.

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
    """Symmetric, per token in groups of channels, with halves rounded away from zero as C's `roundf` does.

    d = max|x| / (2^(b-1) - 1), code = roundf(x (1 / d)), x̂ = d code; codes use the unrounded d and its reciprocal, d is
    stored in fp16. 8 bits and groups of 32 are llama.cpp's q8_0 (8.5 bits). Elsewhere halves go to the even code.

    Args:
        bits: bits per code, 2-16.
        group_size: channels that share a scale; None = the whole head_dim. A short last group has its own scale.

    Source: `quantize_row_q8_0_ref` and `dequantize_row_q8_0` of ggml.
    """

    version: ClassVar[int] = 1

    def __init__(self, bits: int, group_size: int | None = None) -> None:
        super().__init__(bits, "per_token", group_size, symmetric=True, rounding="away", reciprocal=True)


Float8 = Literal["e4m3", "e5m2"]
"""8-bit floats: e4m3 (3 mantissa bits, largest 448, no infinities) and e5m2 (2 mantissa bits, largest 57344)."""
FloatScale = Literal["block", "token", "none"]
"""The values that share the scale of an 8-bit float.

`block`: all heads, tokens and channels of a block, so that no sequence of a batch depends on its neighbours.
`token`: the channels of a token in a head. `none`: there is no scale, values are cast as they are.
"""


class Float8Quantizer(Quantizer):
    """8-bit floating point, with scale max|x| / (largest number of the format).

    Args:
        format: see `Float8`.
        scale: see `FloatScale`. With a scale per block of H heads, T tokens and D channels in fp16 an element takes
            8 + 16 / (H T D) bits, with one per token and head in fp32 8 + 32 / D, without any 8.
        group_size: with `scale: token`, channels that share a scale; None = all of the head.
        min_scale: scales below it become it.
        saturate: clamp to the largest number before the cast; else overflow is torch's: e4m3 saturates, e5m2 becomes
            infinite.
        scale_dtype: dtype of stored scales, see `ScaleDtype`. Codes use the unrounded scale.
        reciprocal: multiply by the reciprocal of the scale (vLLM) instead of dividing by the scale.

    A scale that is fixed, per layer or per head is a stage before this quantizer with `scale: none`.

    Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), Table 1.
    """

    version: ClassVar[int] = 1
    attended_as = "states"

    def __init__(
        self,
        format: Float8 | str = "e4m3",  # noqa: A002 - the name of the setting
        scale: FloatScale | str = "block",
        min_scale: float = 0.0,
        saturate: bool = True,
        scale_dtype: ScaleDtype | str = "float16",
        reciprocal: bool = False,
        group_size: int | None = None,
    ) -> None:
        self.scale: FloatScale = checked_choice(FloatScale, scale, "scale")
        self.scale_dtype: ScaleDtype = checked_choice(ScaleDtype, scale_dtype, "scale_dtype")
        self._dtype = torch.float8_e4m3fn if checked_choice(Float8, format, "format") == "e4m3" else torch.float8_e5m2
        if group_size is not None and (group_size < 1 or self.scale != "token"):
            raise ConfigError(f"group_size={group_size}: at least 1, with scale=token")
        at_least("min_scale", min_scale, 0)
        self.min_scale, self.saturate, self.reciprocal, self.group_size = min_scale, saturate, reciprocal, group_size

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """None where a block shares a scale, else 1."""
        return None if self.scale == "block" else 1

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`values` in the format's dtype, as `x`, and `scale`: `[..., 1, 1, 1]` or `[..., heads, tokens, groups]`."""
        limit = torch.finfo(self._dtype).max
        side: Parts = {}
        groups = in_groups(x, self.group_size)
        if self.scale != "none":
            over = (-4, -3, -2, -1) if self.scale == "block" else (-1,)
            scale = groups.abs().amax(over, keepdim=True) / limit
            if self.min_scale:
                scale = scale.clamp_min(self.min_scale)
            groups = groups * _reciprocal(scale) if self.reciprocal else groups / scale.masked_fill(scale == 0, 1)
            side = {"scale": to_stored(scale.squeeze(-1), getattr(torch, self.scale_dtype))}
        values = groups.flatten(-2)[..., : x.shape[-1]]
        values = values.clamp(-limit, limit) if self.saturate else values
        return {"values": values.to(self._dtype), **side}

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * value`, from the stored scale."""
        values = parts["values"].to(dtype)
        return times_scale(values, parts["scale"].to(dtype), self.group_size) if "scale" in parts else values


class LevelsQuantizer(CodeQuantizer):
    """The nearest of fixed levels, with a signed scale that maps a group's largest value by magnitude to the first one.

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
        self, levels: Sequence[float], group_size: int | None = None, refit: bool = True, least: float = 1e-15
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
