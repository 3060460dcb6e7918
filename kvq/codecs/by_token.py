"""Stored parts of tokens that are encoded independently of each other, with a row for each token, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvq.codecs.codec import Codec
from kvq.codecs.packed import Packed
from kvq.codecs.packing import pack, unpack

UNIT = 32
"""Tokens of a unit; a multiple of 8, because 8 one-bit codes share a byte."""
PLANES = (1, 2, 4)
"""Widths of planes in which consecutive tokens share bytes."""


def token_width(rows: int) -> int:
    """Bits of a token in a part that has `rows` rows per unit; 8 where a token has a row of its own, of any dtype."""
    return 8 * rows // UNIT


def token_widths(codec: Codec, heads: int, head_dim: int, like: Tensor) -> dict[str, int]:
    """`token_width` of every part that `codec` stores of `[heads, tokens, head_dim]`."""
    unit = torch.zeros(1, heads, UNIT, head_dim, dtype=like.dtype, device=like.device)
    return widths_in(codec.encode(unit, UNIT))


def widths_in(packed: Packed) -> dict[str, int]:
    """`token_width` of every part of whole units."""
    return {name: token_width(rows) for name, rows in packed.runs[0].rows.items()}


def by_token(parts: Mapping[str, Tensor], widths: Mapping[str, int], tokens: int) -> dict[str, Tensor]:
    """Every part with one row for each of `tokens` tokens: planes of 1, 2 or 4 bits are unpacked."""
    return {
        name: unpack([part], widths[name], tokens) if widths[name] in PLANES else part[..., :tokens, :]
        for name, part in parts.items()
    }


def together(parts: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Inverse of `by_token`: the codes of consecutive tokens share bytes again."""
    return {
        name: pack(part, widths[name])[0] if widths[name] in PLANES else part.clone() for name, part in parts.items()
    }
