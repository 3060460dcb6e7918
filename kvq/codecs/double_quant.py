"""Quantization of a stage's side information: scales and means in a few bits (double quantization)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.packing import MAX_BITS, pack_parts, unpack_parts
from kvq.codecs.quantizers import Axis, Parts, choice, to_stored
from kvq.errors import ConfigError, Unsupported


class DoubleQuant:
    """Round to nearest of side information `[..., rows, columns]`, one fp16 step per group.

    Args:
        bits: bits per code, 2-16.
        axis: `per_channel`: a group is `group_size` rows of one column (scales of tokens); `per_token`: that many
            columns of a row (means of channels). Codes pack along the same axis.
        group_size: None = all of it. A short last group has its own step.
        signed: step max|x| / (2^(b-1) - 1), codes ±(2^(b-1) - 1); else x >= 0, step max / (2^b - 1) and codes from 1
            up: code 0 is a true zero, so a value far below its group's maximum never becomes one.

    Raises:
        ConfigError: unknown axis or a group size below 1.
        Unsupported: bits that a code cannot have.

    Source: NSNQuant (arXiv 2505.18231), section 3.5; QLoRA (arXiv 2305.14314), section 3.
    """

    version: ClassVar[int] = 1

    def __init__(self, bits: int, axis: Axis | str, group_size: int | None = None, signed: bool = False) -> None:
        if not 2 <= bits <= MAX_BITS:
            raise Unsupported(f"double_quant.bits={bits}: 2 to {MAX_BITS}")
        if group_size is not None and group_size < 1:
            raise ConfigError(f"double_quant.group_size={group_size}: at least 1, or null for one group")
        self.bits, self.group_size, self.signed = bits, group_size, signed
        self.axis = choice(Axis, axis, "double_quant.axis")
        self._top = 2 ** (bits - 1) - 1 if signed else 2**bits - 1

    def _turned(self, x: Tensor) -> Tensor:
        """The grouped axis as rows; its own inverse."""
        return x if self.axis is Axis.per_channel else x.mT

    def encode(self, x: Float[Tensor, "*lead rows columns"]) -> Parts:
        """`codes.<plane>` (uint8) and `step` (fp16)."""
        x = self._turned(x)
        length = x.shape[-2]
        size = min(self.group_size or length, length)
        groups = torch.nn.functional.pad(x, (0, 0, 0, -length % size)).unflatten(-2, (-1, size))
        step = groups.abs().amax(-2, keepdim=True) / self._top
        codes = groups.div(step.masked_fill(step == 0, 1)).round_()
        if self.signed:
            codes = codes.clamp_(-self._top, self._top).add_(self._top)
        else:
            codes = codes.clamp_(1, self._top).masked_fill_(groups == 0, 0)
        parts = pack_parts(codes.flatten(-3, -2)[..., :length, :], self.bits)
        parts["step"] = to_stored(step.squeeze(-2), torch.float16)
        return {name: self._turned(part) for name, part in parts.items()}

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`step * code` as `[..., rows, columns]`, from the stored step."""
        length = rows if self.axis is Axis.per_channel else columns
        parts = {name: self._turned(part) for name, part in parts.items()}
        codes = unpack_parts(parts, self.bits, length).to(dtype)
        if self.signed:
            codes = codes.sub_(self._top)
        size = min(self.group_size or length, length)
        step = parts["step"].to(dtype).repeat_interleave(size, -2)[..., :length, :]
        return self._turned(codes * step)
