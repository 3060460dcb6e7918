"""Strings of bits with fields of different widths, and trellises for N(0, 1) whose states such a string runs through.

A token's components share a string, padded to a byte. Bits are written from the most significant bit of each byte on,
so the bits before any place are the end of a number: a trellis of 2^L states reads its state there.

State s is the last L bits of the string, so a component of k bits moves it to (s 2^k + code) mod 2^L, whose value it
decodes to; Viterbi's search finds the string. There is one table of values for each k. Bits before a string are zeros.

Source: trellis-coded quantization, Marcellin and Fischer 1990; the bit-shift trellis with a table, QTIP
(arXiv 2406.11235). Tables are trained by `experiments/models/trellises.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Integer, UInt8
from safetensors.torch import load_file
from torch import Tensor

FRONT = 2
"""Bytes of zeros before a string while it is read: a state of up to 16 bits begins there."""
BACK = 3
"""Bytes of zeros behind a string while it is read."""
WIDEST = 8
"""Bits of a field at most."""
Books = Float[Tensor, "widths entries"]
"""The values of each code, or of each state of a trellis, for fields of 1, 2, ... bits."""
Rows = Float[Tensor, "rows components"]
Strings = UInt8[Tensor, "rows nbytes"]
FILE = Path(__file__).parent / "trellis.safetensors"
LEAST_MEMORY, MOST_MEMORY = 6, 12


@dataclass(frozen=True)
class Layout:
    """The fields of a bit string: the width of each in bits, 0 to 8, first to last."""

    widths: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Number of bits from the start of the string to the end of each field."""
        return tuple(itertools.accumulate(self.widths))

    @property
    def bits(self) -> int:
        return self.ends[-1] if self.widths else 0

    @property
    def nbytes(self) -> int:
        return -(-self.bits // 8)


def write(codes: Integer[Tensor, "*lead fields"], layout: Layout) -> UInt8[Tensor, "*lead _nbytes"]:
    """Pack codes into bit strings, code i in `layout.widths[i]` bits, highest bit first; zeros fill the last byte."""
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
    padded = torch.nn.functional.pad(strings, (FRONT, BACK)).int()
    place, shift, mask = (part.to(strings.device) for part in places(layout, tuple(lengths)))
    word = torch.zeros((), dtype=torch.int32, device=strings.device)
    for offset in range(3):
        word = (word << 8) | padded.index_select(-1, place + offset)
    return (word >> shift) & mask


@functools.lru_cache(maxsize=256)
def places(layout: Layout, lengths: tuple[int, ...]) -> tuple[Int[Tensor, " fields"], ...]:
    """How `read` finds the bits of each field: the first of three bytes that hold them, right shift and mask."""
    starts = [8 * FRONT + end - length for end, length in zip(layout.ends, lengths, strict=True)]
    shifts = [24 - start % 8 - length for start, length in zip(starts, lengths, strict=True)]
    parts = ([start // 8 for start in starts], shifts, [(1 << length) - 1 for length in lengths])
    return tuple(torch.tensor(part, dtype=torch.int32) for part in parts)


def values_of(
    strings: UInt8[Tensor, "*lead nbytes"], layout: Layout, lengths: Sequence[int], books: Books
) -> Float[Tensor, "*lead fields"]:
    """`levels_of` the numbers that `read` returns, in the dtype of `books`; in fp32 by a plugin's loops if any."""
    loops = loops_for(strings.device.type) if books.dtype is torch.float32 else None
    if loops is None:
        return levels_of(read(strings, layout, lengths), layout.widths, books)
    first, book = entries_of(layout, books)
    padded = torch.nn.functional.pad(strings.reshape(strings.shape[:-1].numel(), strings.shape[-1]), (FRONT, BACK))
    starts, shifts, masks = (part.to(strings.device) for part in places(layout, tuple(lengths)))
    values = loops.values_of(padded, starts, shifts, masks, first.to(strings.device), book)
    return values.view(*strings.shape[:-1], len(layout.widths))


def entries_of(layout: Layout, books: Books) -> tuple[Int[Tensor, " fields"], Float[Tensor, " entries_in_all"]]:
    """Index of each field's book in the flattened books, and these, with a last book of zeros for fields of 0 bits."""
    rows = [width - 1 if width else len(books) for width in layout.widths]
    first = torch.tensor(rows, dtype=torch.int32) * books.shape[1]
    return first, torch.nn.functional.pad(books, (0, 0, 0, 1)).flatten()


def levels_of(
    numbers: Integer[Tensor, "*lead fields"], widths: Sequence[int], books: Books
) -> Float[Tensor, "*lead fields"]:
    """`books[width - 1, number]` of each field; 0 where the width is 0."""
    width = torch.tensor([max(one - 1, 0) for one in widths], device=numbers.device)
    values = books.flatten().index_select(0, (numbers.long() + width * books.shape[1]).flatten()).view(numbers.shape)
    none = torch.tensor([one == 0 for one in widths], device=numbers.device)
    return values.masked_fill(none, 0)


class LongTrellis:
    """Version of the tables of more than 2^8 states, raised when they are retrained (`kvq.results.record`)."""

    version: ClassVar[int] = 2


@runtime_checkable
class Loops(Protocol):
    """Compiled versions of this module's loops from a plugin (extension point `trellis`); results are bit-identical."""

    def codes_of(self, x: Tensor, widths: tuple[int, ...], weights: Tensor, books: Tensor) -> Tensor:
        """The codes `[rows, components]` in uint8 that `_search` returns; computed in fp32."""

    def values_of(
        self, strings: Tensor, starts: Tensor, shifts: Tensor, masks: Tensor, entries: Tensor, books: Tensor
    ) -> Tensor:
        """Values `[rows, fields]` in fp32 of strings `[rows, bytes]`, each between bytes of zeros.

        Field i is `(word >> shifts[i]) & masks[i]`, word the three bytes from `starts[i]` on; its value is the entry
        `entries[i]` + field of the flattened `books`.
        """


@functools.cache
def loops_for(device: str) -> Loops | None:
    """A plugin's compiled loops for a type of device; None: there are none, and torch is ten to forty times slower."""
    from kvq.config.plugins import import_modules

    found = (module.trellis_loops(device) for module in import_modules("trellis"))
    return next((loops for loops in found if loops is not None), None)


@functools.cache
def _file() -> dict[str, Tensor]:
    return load_file(FILE)


@functools.lru_cache(maxsize=32)
def books(memory: int, dtype: torch.dtype, device: torch.device) -> Books:
    """Values of the 2^`memory` states for components of 1, 2, ... bits; widths above `memory` have none."""
    count = min(memory, WIDEST)
    return torch.stack([_file()[f"{memory}.{width}"] for width in range(1, count + 1)]).to(device, dtype)


def mean_squared_errors(memory: int) -> tuple[float, ...]:
    """MSE on N(0, 1) at 1, 2, ... bits per component with 2^`memory` states, measured when the tables were trained."""
    return tuple(_file()[f"{memory}.errors"][: min(memory, WIDEST)].tolist())


def encode(x: Rows, weights: Float[Tensor, " components"], layout: Layout, memory: int) -> Strings:
    """The bit string of least weighted squared error for each row; ties go to the lowest earlier state.

    In fp32, token by token: a row's bits do not depend on the others.
    """
    loops = loops_for(x.device.type)
    search = _search if loops is None else loops.codes_of
    return write(search(x.float(), layout.widths, weights.float(), books(memory, torch.float32, x.device)), layout)


def _search(
    x: Rows, widths: Sequence[int], weights: Float[Tensor, " components"], books: Books
) -> UInt8[Tensor, "rows components"]:
    """Viterbi's search in torch: the codes. Costs are `[states, rows]`, so that operations run along memory."""
    states = books.shape[1]
    rows = max(1, 2**24 // (states * max(1, len(widths))))  # costs of paths held at once
    if len(x) > rows:
        return torch.cat([_search(piece, widths, weights, books) for piece in x.split(rows)])
    cost = torch.full((states, len(x)), torch.inf, device=x.device)
    cost[0] = 0
    back: list[Tensor] = []
    for column, width, weight in zip(x.T.contiguous(), widths, weights, strict=True):
        if width:
            ways = cost.view(2**width, -1, len(x))
            least, number = ways.amin(0), ways.argmin(0)  # the first way of those that cost least
            back.append(number.to(torch.uint8))
            error = column - books[width - 1, :, None]
            cost = ((error * error * weight).view(-1, 2**width, len(x)) + least[:, None]).view(cost.shape)
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    state = cost.argmin(0)
    for place in reversed(range(len(widths))):
        if width := widths[place]:
            codes[:, place] = state & (2**width - 1)
            prefix = state >> width
            state = prefix | (back.pop().gather(0, prefix[None])[0].long() << (states.bit_length() - 1 - width))
    return codes


def decode(strings: Strings, layout: Layout, memory: int, dtype: torch.dtype) -> Rows:
    """The values of the states that each string runs through."""
    return values_of(strings, layout, [memory] * len(layout.widths), books(memory, dtype, strings.device))
