"""4-bit floats with a byte of scale per group of channels (NVFP4, FP4 of SGLang and UltraQuant), and integers alike."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvq.codecs.block_formats import in_groups, times_scale
from kvq.codecs.levels import look_up
from kvq.codecs.packed import pack_parts, unpack_parts
from kvq.codecs.quantizers import CodeQuantizer, Parts, checked_choice
from kvq.codecs.uniform import Rounding
from kvq.errors import ConfigError, at_least, require

_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_NEGATIVE = 8  # the bit of the sign
_LEAST = 1e-10  # of a scale that is a power of two
_LEAST_E4M3 = 2.0**-9  # the smallest positive number of e4m3
_NEAR = 0.156  # of the largest magnitude: least squared error for UltraQuant's authors
_LEAST_E8M0 = 2.0**-126  # of byte 1; byte 0 is a group of zeros


BlockScale = Literal["e4m3", "e4m3_up", "e8m0", "e8m0_near"]
"""The byte of a group's scale: e4m3, the same rounded up, or an exponent of 2 with bias 127 (e8m0), up or near."""


class BlockFloatQuantizer(CodeQuantizer):
    """e2m1 numbers (0, .5, 1, 1.5, 2, 3, 4, 6 and a sign), with one byte of scale per group of a token's channels.

    e4m3: S = e4m3(max|x| (1/6)), code = e2m1(x (1 / S)), all 0 where S is 0. e4m3_up: S is the least e4m3 number not
    below max|x| / 6 and 2^-9, so that no value is clipped. e8m0: S = 2^ceil(log2(max|x| / 6)), with a quotient of at
    least 1e-10. e8m0_near: S = 2^floor(log2(.156 max|x|) + 1/2), which clips where it is below max|x| / 6; a group of
    zeros has byte 0. Groups of 16 take 4 + 8/16 bits. NVFP4's number per layer is the stage `LayerScale`.

    Args:
        group_size: channels that share a scale. A short last group has its own.
        scale: see `BlockScale`.
        rounding: of codes halfway between two: `even` (the even code, IEEE), `up` (the larger magnitude) or `down` (the
            lower number, and no negative zero).
        four_over_six: also try S = e4m3(max|x| / 4) and keep it where the sum of squared errors is smaller.

    Raises:
        ConfigError: an unknown name, a group size below 1, settings that do not belong together.

    Source: NVFP4 as in vLLM's nvfp4_kv_cache_kernels.cu, rounded up as in its nvfp4_ds_mla_cache_kernels.cu, FP4 as in
    SGLang's `kvfp4_tensor`; e8m0_near and `down` as in `ultraquant_store` of vLLM's pull request 57057.
    """

    version: ClassVar[int] = 2
    token_group = 1
    bits = 4
    attended_as = "states"

    def __init__(
        self,
        group_size: int = 16,
        scale: BlockScale | str = "e4m3",
        rounding: Rounding | str = "even",
        four_over_six: bool = False,
    ) -> None:
        at_least("group_size", group_size, 1)
        self.group_size, self.four_over_six = group_size, four_over_six
        self.scale: BlockScale = checked_choice(BlockScale, scale, "scale")
        self.rounding: Rounding = checked_choice(Rounding, rounding, "rounding")
        require(rounding in ("even", "up", "down"), "rounding", rounding, "even, up or down")
        if four_over_six and self.scale != "e4m3":
            raise ConfigError(f"four_over_six=true: with scale=e4m3; given scale={self.scale}")

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.0`) and `scale` `[..., heads, tokens, groups]`, one byte each."""
        groups = in_groups(x, self.group_size)
        largest = groups.abs().amax(-1, keepdim=True)
        if self.scale == "e8m0":
            exponent = (largest / 6).clamp_min_(_LEAST).log2_().ceil_()
            scale, stored = torch.exp2(exponent), exponent.add(127).to(torch.uint8)
        elif self.scale == "e8m0_near":
            exponent = (largest * _NEAR).clamp_min_(_LEAST_E8M0).log2_().add_(0.5).floor_()
            scale, stored = torch.exp2(exponent), exponent.add(127).masked_fill_(largest == 0, 0).to(torch.uint8)
        elif self.scale == "e4m3_up":
            stored = _round_up_to_e4m3((largest / 6).clamp_min_(_LEAST_E4M3))
            scale = stored.to(x.dtype)
        else:
            stored = _round_to_e4m3(largest * (1 / 6))
            if self.four_over_six:
                other = _round_to_e4m3(largest / 4)
                closer = _squared_errors(groups, other, self.rounding) < _squared_errors(groups, stored, self.rounding)
                stored = torch.where(closer, other.to(x.dtype), stored.to(x.dtype)).to(torch.float8_e4m3fn)
            scale = stored.to(x.dtype)
        codes = _encode_e2m1(groups, scale, self.rounding).flatten(-2)[..., : x.shape[-1]]
        return pack_parts(codes, self.bits) | {"scale": stored.squeeze(-1)}

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The e2m1 number of each code times the scale of its group."""
        scale = parts["scale"].to(dtype)
        if self.scale in ("e8m0", "e8m0_near"):
            scale = torch.exp2(scale - 127)
        return times_scale(_decode_e2m1(unpack_parts(parts, self.bits, shape[-2]), dtype), scale, self.group_size)


class ScaledIntegerQuantizer(CodeQuantizer):
    """Integers around 0, with an e4m3 scale per group of a token's channels, by which codes are chosen.

    S = e4m3(max|x| / m) with m = 2^(b-1) - 1, code = round(x / S) within -m to m, halves to even; all 0 where S is 0.
    Groups of 32 at 4 bits take 4 + 8/32 bits.

    Args:
        bits: bits per code, 2-8.
        group_size: channels that share a scale. A short last group has its own.

    Raises:
        ConfigError: bits or a group size out of range.

    Source: SGLang's pull request 38301 (int4 latents of DeepSeek V4).
    """

    version: ClassVar[int] = 1
    token_group = 1
    attended_as = "states"

    def __init__(self, bits: int, group_size: int = 32) -> None:
        require(2 <= bits <= 8, "bits", bits, "2 to 8")
        at_least("group_size", group_size, 1)
        self.bits, self.group_size = bits, group_size
        self._most = 2 ** (bits - 1) - 1

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.<plane>`) and `scale` `[..., heads, tokens, groups]`, one byte each."""
        groups = in_groups(x, self.group_size)
        stored = _round_to_e4m3(groups.abs().amax(-1, keepdim=True) / self._most)
        scale = stored.to(x.dtype)
        codes = (groups / scale.masked_fill(scale == 0, torch.inf)).round_().clamp_(-self._most, self._most)
        codes = codes.add_(self._most).flatten(-2)[..., : x.shape[-1]]
        return pack_parts(codes, self.bits) | {"scale": stored.squeeze(-1)}

    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * (code - m)`."""
        steps = unpack_parts(parts, self.bits, shape[-2]).to(dtype).sub(self._most)
        return times_scale(steps, parts["scale"].to(dtype), self.group_size)


def _round_to_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 number, saturating."""
    return x.clamp(max=torch.finfo(torch.float8_e4m3fn).max).to(torch.float8_e4m3fn)


def _round_up_to_e4m3(x: Tensor) -> Tensor:
    """The least e4m3 number that is not below `x`, which is positive; the largest number above that."""
    near = _round_to_e4m3(x)
    code = near.view(torch.uint8)  # of positive numbers, in their order
    below = (near.to(x.dtype) < x) & (code < _round_to_e4m3(torch.full_like(x, torch.inf)).view(torch.uint8))
    return (code + below.to(torch.uint8)).view(torch.float8_e4m3fn)


def _encode_e2m1(x: Tensor, scale: Tensor, rounding: Rounding) -> UInt8[Tensor, "*shape"]:
    """Index of the nearest e2m1 number to the magnitude of x / scale, 8 more where x < 0; 0 where the scale is 0."""
    magnitude = x.abs().mul_(scale.masked_fill(scale == 0, torch.inf).reciprocal_())
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    negative = (x < 0) & (scale != 0)
    for index, middle in enumerate(_MIDDLES):
        if rounding == "down":
            codes += (magnitude > middle) | (negative & (magnitude == middle))
            continue
        up = rounding == "up" or index % 2  # the even neighbour is the higher one
        codes += magnitude >= middle if up else magnitude > middle
    if rounding == "down":
        negative &= codes != 0
    return codes + _NEGATIVE * negative.to(torch.uint8)


def _decode_e2m1(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The e2m1 numbers that 4-bit codes stand for, before the scale."""
    levels = (*_LEVELS, *(-level for level in _LEVELS))
    return look_up(torch.tensor(levels, dtype=dtype, device=codes.device), codes)


def _squared_errors(groups: Tensor, stored: Tensor, rounding: Rounding) -> Tensor:
    """Sum of squared errors of each group `[..., groups, 1]` quantized with the scales `stored` (e4m3)."""
    scale = stored.to(groups.dtype)
    decoded = _decode_e2m1(_encode_e2m1(groups, scale, rounding), groups.dtype) * scale
    return (groups - decoded).square().sum(-1, keepdim=True)
