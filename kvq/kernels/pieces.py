"""Cutting a packed prefix into pieces of a few thousand tokens that fit a core's cache, for any block size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kvq.codecs import Packed, Rope, UniformQuantizer
from kvq.codecs.packing import plane_widths
from kvq.codecs.quantizers import Axis
from kvq.kernels.form import Form, PackedStates

TILE = 2048
"""Tokens per piece."""


@dataclass(frozen=True)
class Piece:
    """Whole blocks of equal length, or a part of one block.

    Attributes:
        start: the first token, counted from the first of the prefix.
        blocks: stored parts `[batch, blocks, heads or 1, rows, columns]`: codes and statistics of the tokens
            `inner` of each block, everything else of the whole blocks.
        length: tokens of each block.
        inner: the tokens of each block that belong to the piece.
        rope: the rotations of the tokens `inner`, cut into blocks.
    """

    start: int
    blocks: dict[str, Tensor]
    length: int
    inner: slice
    rope: Rope | None

    @property
    def count(self) -> int:
        """Blocks."""
        return next(iter(self.blocks.values())).shape[1]

    @property
    def tokens(self) -> int:
        """Number of tokens of each block that belong to the piece."""
        return self.inner.stop - self.inner.start

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.count * self.tokens


def pieces(states: PackedStates, form: Form, first: int = 0) -> Iterator[Piece]:
    """The packed prefix in pieces of about `TILE` tokens; those that hold tokens from `first` on."""
    start = 0
    for packed in states.packed:
        for run, parts in packed.by_run():
            for piece in _run(packed, form, run.blocks(parts), run.tokens, run.count, start, states.rope):
                if piece.stop > first:
                    yield piece
            start += run.tokens * run.count


def _run(
    packed: Packed, form: Form, views: dict[str, Tensor], length: int, count: int, start: int, rope: Rope | None
) -> Iterator[Piece]:
    if length <= TILE:
        together = TILE // length
        for block in range(0, count, together):
            number = min(together, count - block)
            blocks = {name: view.narrow(1, block, number) for name, view in views.items()}
            at = start + block * length
            turned = None if rope is None else rope.narrow(at, length * number).blocks(length, number)
            yield Piece(at, blocks, length, slice(0, length), turned)
        return
    step = _step(form)
    for block in range(count):
        for begin in range(0, length, step):
            inner = slice(begin, min(begin + step, length))
            at = start + block * length + begin
            blocks = {
                name: _cut(form, name, view.narrow(1, block, 1), inner, packed.head_dim) for name, view in views.items()
            }
            size = inner.stop - inner.start
            turned = None if rope is None else rope.narrow(at, size).blocks(size, 1)
            yield Piece(at, blocks, length, inner, turned)


def _step(form: Form) -> int:
    """Tokens of a part of a block: whole groups, whole bytes."""
    quantizer = form.codec.quantizer
    grouped = isinstance(quantizer, UniformQuantizer) and quantizer.axis is Axis.per_channel and quantizer.group_size
    group = math.lcm(8, grouped or 1)
    return max(1, TILE // group) * group


def _cut(form: Form, name: str, part: Tensor, inner: slice, head_dim: int) -> Tensor:
    """Rows of a quantizer's part that belong to the tokens `inner`; side information of stages stays whole."""
    if name == "gain" or ("." in name and not name.startswith("codes.")):
        return part
    quantizer = form.codec.quantizer
    if name.startswith("codes.") and part.shape[-1] == head_dim:
        width = plane_widths(quantizer.bits)[int(name.removeprefix("codes."))]  # type: ignore[attr-defined]
        return part[..., inner.start * width // 8 : -(-inner.stop * width // 8), :]
    if isinstance(quantizer, UniformQuantizer) and quantizer.axis is Axis.per_channel:
        if quantizer.group_size is None:
            return part
        size = quantizer.group_size
        return part[..., inner.start // size : -(-inner.stop // size), :]
    return part[..., inner, :]
