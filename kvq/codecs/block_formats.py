"""Formats with one scale per block of values: llama.cpp's q4_0 and q8_0, and 8-bit floating point."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs.packing import MAX_BITS, pack_parts, unpack_parts
from kvq.codecs.quantizers import Axis, Parts, Quantizer, UniformQuantizer, to_stored
from kvq.errors import ConfigError, Unsupported

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


class SignedMaxQuantizer(Quantizer):
    """Round to nearest with a signed scale that gives a group's largest value by magnitude the lowest code.

    Per token and group of `group_size` channels, with m the group's value of largest magnitude (the first of them):
    d = -m / 2^(b-1), code = clamp(floor(x / d + 1/2) + 2^(b-1), 0, 2^b - 1), x̂ = d (code - 2^(b-1)). Codes use the
    unrounded d; d is stored in fp16. 4 bits and groups of 32 are llama.cpp's q4_0 (4.5 bits), 5 bits its q5_0.

    Args:
        bits: bits per code, 2-16.
        group_size: channels that share a scale; None = the whole head_dim. A short last group has its own scale.

    Raises:
        ConfigError: a group size below 1.
        Unsupported: bits the grid cannot have.

    Source: `quantize_row_q4_0_ref` and `dequantize_row_q4_0` of ggml.
    """

    version: ClassVar[int] = 1

    token_group = 1

    def __init__(self, bits: int, group_size: int | None = None) -> None:
        if not 2 <= bits <= MAX_BITS:
            raise Unsupported(f"bits={bits}: a grid with a signed scale has 2 to {MAX_BITS} bits")
        if group_size is not None and group_size < 1:
            raise ConfigError(f"group_size={group_size}: at least 1, or null for the whole head_dim")
        self.bits, self.group_size = bits, group_size
        self._middle = 2 ** (bits - 1)

    @property
    @override
    def indices(self) -> dict[str, int]:
        return {"codes": self.bits}

    def _grouped(self, x: Tensor) -> Tensor:
        """View `[..., groups, group_size]`; a short last group gets zeros, which never are its largest value."""
        size = min(self.group_size or x.shape[-1], x.shape[-1])
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.<plane>`) and `scale` `[..., heads, tokens, groups]`, signed, in fp16."""
        groups = self._grouped(x)
        scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -self._middle
        # Halves go up, as in ggml, not to the even code.
        codes = groups.div(scale.masked_fill(scale == 0, 1)).add_(self._middle + 0.5).floor_()
        codes = codes.clamp_(0, 2**self.bits - 1).flatten(-2)[..., : x.shape[-1]]
        return pack_parts(codes, self.bits) | {"scale": to_stored(scale.squeeze(-1), torch.float16)}

    @override
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * (code - 2^(b-1))`, from the stored scale."""
        groups = self._grouped(unpack_parts(parts, self.bits, shape[-2]).to(dtype))
        out = groups.sub(self._middle).mul_(parts["scale"].to(dtype).unsqueeze(-1))
        return out.flatten(-2)[..., : shape[-1]]


class HalfAwayQuantizer(UniformQuantizer):
    """Symmetric, per token in groups of channels, with halves rounded away from zero as C's `roundf` does.

    d = max|x| / (2^(b-1) - 1), code = roundf(x (1 / d)), x̂ = d code; codes use the unrounded d and its reciprocal, d is
    stored in fp16. 8 bits and groups of 32 are llama.cpp's q8_0 (8.5 bits). Elsewhere halves go to the even code.

    Args:
        bits: bits per code, 2-16.
        group_size: channels that share a scale; None = the whole head_dim. A short last group has its own scale.

    Raises:
        ConfigError, Unsupported: as `UniformQuantizer`.

    Source: `quantize_row_q8_0_ref` and `dequantize_row_q8_0` of ggml.
    """

    version: ClassVar[int] = 1

    def __init__(self, bits: int, group_size: int | None = None) -> None:
        super().__init__(bits, Axis.per_token, group_size, symmetric=True)

    @staticmethod
    @override
    def _rounded(x: Tensor, scale: Tensor) -> Tensor:
        steps = x * scale.reciprocal().masked_fill(scale == 0, 0)
        whole = steps.trunc()
        # Not trunc(x + 1/2): the largest number below 1/2 would go up.
        return whole + (steps - whole).abs().ge(0.5) * steps.sign()


class Float8Quantizer(Quantizer):
    """8-bit floating point (e4m3: 4 exponent and 3 mantissa bits, largest 448) with one scale per tensor.

    The tensor is a block: all heads, tokens and channels of one batch entry, so that no sequence of a batch depends on
    its neighbours. scale = max|x| / 448; codes use the unrounded scale, which is stored in fp16, so a block of H heads,
    T tokens and D channels has 8 + 16 / (H T D) bits per element.

    Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), Table 1.
    """

    version: ClassVar[int] = 1

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`values` in float8_e4m3fn, shaped as `x`, and `scale` `[..., 1, 1, 1]` in fp16."""
        scale = x.abs().amax((-3, -2, -1), keepdim=True) / _FP8_MAX
        values = x.div(scale.masked_fill(scale == 0, 1)).clamp_(-_FP8_MAX, _FP8_MAX)
        return {"values": values.to(_FP8), "scale": to_stored(scale, torch.float16)}

    @override
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """`scale * value`, from the stored scale."""
        return parts["values"].to(dtype) * parts["scale"].to(dtype)
