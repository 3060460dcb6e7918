"""Strings of bits with fields of different widths: what a token's components share, padded to a byte.

Bits are written from the most significant bit of each byte on, so the bits before any place of a string are the end of
a number: a trellis reads its state there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

FRONT = 2
"""Bytes of zeros before a string while it is read: a state of up to 16 bits begins there."""
MOST = 8
"""Bits of a field at most."""


@dataclass(frozen=True)
class Layout:
    """The fields of a string: `widths` in bits, 0 to 8, in their order."""

    widths: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Bits up to the end of each field."""
        found, at = [], 0
        for width in self.widths:
            at += width
            found.append(at)
        return tuple(found)

    @property
    def bits(self) -> int:
        """Bits of all fields."""
        return self.ends[-1] if self.widths else 0

    @property
    def nbytes(self) -> int:
        """Bytes of a string."""
        return -(-self.bits // 8)


def write(codes: Integer[Tensor, "*lead fields"], layout: Layout) -> UInt8[Tensor, "*lead _nbytes"]:
    """The strings of codes, each below 2^width of its field."""
    fields = [field for field, width in enumerate(layout.widths) for _ in range(width)]
    shifts = [place for width in layout.widths for place in range(width - 1, -1, -1)]
    short = 8 * layout.nbytes - layout.bits
    field, shift = (torch.tensor(part, dtype=torch.long, device=codes.device) for part in (fields, shifts))
    bits = (codes.to(torch.uint8).index_select(-1, field) >> shift.to(torch.uint8)) & 1
    slots = torch.nn.functional.pad(bits, (0, short)).unflatten(-1, (-1, 8))
    out = slots[..., 0].clone()
    for place in range(1, 8):
        out = (out << 1) | slots[..., place]
    return out


def read(
    strings: UInt8[Tensor, "*lead nbytes"], layout: Layout, lengths: Sequence[int]
) -> Integer[Tensor, "*lead fields"]:
    """The last `lengths[i]` bits, at most 16, up to the end of field i, as int32; zeros stand before a string.

    With the widths of the fields these are the codes; with L bits, the states of a trellis.
    """
    padded = torch.nn.functional.pad(strings, (FRONT, 3)).int()
    starts = [8 * FRONT + end - length for end, length in zip(layout.ends, lengths, strict=True)]
    place = torch.tensor([start // 8 for start in starts], dtype=torch.long, device=strings.device)
    shifts = [24 - start % 8 - length for start, length in zip(starts, lengths, strict=True)]
    shift, mask = (
        torch.tensor(part, dtype=torch.int32, device=strings.device)
        for part in (shifts, [(1 << length) - 1 for length in lengths])
    )
    word = torch.zeros((), dtype=torch.int32, device=strings.device)
    for offset in range(3):
        word = (word << 8) | padded.index_select(-1, place + offset)
    return (word >> shift) & mask


def levels_of(
    numbers: Integer[Tensor, "*lead fields"], widths: Sequence[int], books: Float[Tensor, "widths entries"]
) -> Float[Tensor, "*lead fields"]:
    """`books[width - 1, number]` of each field; 0 where the width is 0."""
    width = torch.tensor([max(one - 1, 0) for one in widths], device=numbers.device)
    found = books.flatten().index_select(0, (numbers.long() + width * books.shape[1]).flatten()).view(numbers.shape)
    none = torch.tensor([one == 0 for one in widths], device=numbers.device)
    return found.masked_fill(none, 0)
