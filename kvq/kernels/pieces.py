"""A packed prefix as the kernels take it: in pieces of some thousand tokens that fit a core's cache, and its shifts.

NSNQuant's shifts are one vector per block, outside the loops over codes: they add `q · o` times a factor of each token
to its scores, and the sum of a block's weights times `o` to the output. RoPE that follows a shift turns it by each
token's angle, for which all heads share one matrix product.

Codes of a transform of all heads together are taken in smaller pieces: decoded to components of all heads, then keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Rope, UniformQuantizer
from kvq.codecs.nested import CORRECTED
from kvq.codecs.packed import BlockRun
from kvq.codecs.stages import decode_side
from kvq.kernels.linear_chain import LinearChain, PackedStates, Shift, side_of

TILE = 2048
"""Tokens per piece."""
_WHOLE = ("gain", "right", "codebook")
JOINT_TILE = 2**18
"""Components of all heads and some tokens that are decoded at once, 1 MiB of fp32."""


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
        """Number of blocks."""
        return next(iter(self.blocks.values())).shape[1]

    @property
    def tokens(self) -> int:
        """Number of tokens of each block that belong to the piece."""
        return self.inner.stop - self.inner.start

    def low_rank_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """`[..., tokens, rank]` and `[..., rank, dim]`, whose product corrects the tokens; None: they are as coded."""
        if "left" not in self.blocks:
            return None
        left, right = (self.blocks[name].to(dtype) for name in ("left", "right"))
        return left.unflatten(-2, (self.tokens, right.shape[-2])).squeeze(-1), right

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.count * self.tokens


def iter_pieces(states: PackedStates, chain: LinearChain) -> Iterator[Piece]:
    """The packed prefix in pieces of about `TILE` tokens."""
    for start, run, blocks in iter_runs(states):
        own = {name.removeprefix(CORRECTED): part for name, part in blocks.items()} if chain.low_rank else blocks
        yield from _cut_run(chain, own, run.tokens, run.count, start, states.rope)


def _cut_run(
    chain: LinearChain, views: dict[str, Tensor], length: int, count: int, start: int, rope: Rope | None
) -> Iterator[Piece]:
    """The pieces of `count` blocks of `length` tokens, from token `start` on; `views`: parts cut into blocks."""
    if length <= TILE:
        together = TILE // length
        for block in range(0, count, together):
            number = min(together, count - block)
            blocks = {name: view.narrow(1, block, number) for name, view in views.items()}
            at = start + block * length
            turned = None if rope is None else rope.narrow(at, length * number).blocks(length, number)
            yield Piece(at, blocks, length, slice(0, length), turned)
        return
    quantizer = chain.codec.quantizer  # a piece of a longer block has whole groups and whole bytes
    grouped = isinstance(quantizer, UniformQuantizer) and quantizer.axis == "per_channel" and quantizer.group_size
    group = math.lcm(8, grouped or 1)
    step = max(1, TILE // group) * group
    for block in range(count):
        for begin in range(0, length, step):
            inner = slice(begin, min(begin + step, length))
            at = start + block * length + begin
            blocks = {key: _cut_rows(key, part.narrow(1, block, 1), inner, length) for key, part in views.items()}
            size = inner.stop - inner.start
            turned = None if rope is None else rope.narrow(at, size).blocks(size, 1)
            yield Piece(at, blocks, length, inner, turned)


def _cut_rows(name: str, part: Tensor, inner: slice, length: int) -> Tensor:
    """The rows of a stored part for the tokens `inner` of a block of `length`; what is no token's own stays whole.

    `inner` begins with a whole row. Where the last row of the block is not full, one row more may be read at the end.
    """
    if name in _WHOLE or ("." in name and not name.startswith("codes.")):
        return part
    rows = part.shape[-2]
    return part[..., inner.start * rows // length : -(-inner.stop * rows // length), :]


def decode_shift(
    shift: Shift, blocks: dict[str, Tensor], dim: int, dtype: torch.dtype
) -> Float[Tensor, "batch blocks heads 1 dim"]:
    """The vector of a shift for each block, from its stored side information."""
    return decode_side("offset", side_of(blocks, shift.name, dtype), shift.stage.double_quant, 1, dim, dtype)


def iter_runs(states: PackedStates) -> Iterator[tuple[int, BlockRun, dict[str, Tensor]]]:
    """Each run of blocks: its first token, and its parts `[batch, blocks, heads, rows, columns]`."""
    for start, run, parts in states.runs():
        yield start, run, run.blocks(parts)


def decode_components(
    states: PackedStates, start: int, stop: int, kind: torch.dtype
) -> Iterator[tuple[slice, Float[Tensor, "batch heads tokens dim"]]]:
    """Components of the packed tokens `start` to `stop` of a joint transform, in pieces with the slice that each fills.

    Tokens are coded independently, so each has a row in every stored part.
    """
    assert states.codec is not None
    held = 0
    for packed in states.packed:
        step = max(1, JOINT_TILE // (packed.batch * packed.heads * packed.head_dim))
        for at in range(max(start, held), min(stop, held + packed.tokens), step):
            count = min(step, min(stop, held + packed.tokens) - at)
            parts = {name: part.narrow(2, at - held, count) for name, part in packed.parts.items()}
            shape = torch.Size((packed.batch, packed.heads, count, packed.head_dim))
            yield slice(at - start, at - start + count), states.codec.quantizer.decode(parts, shape, kind)
        held += packed.tokens


def restore_joint_keys(
    states: PackedStates, chain: LinearChain, components: Float[Tensor, "batch _heads tokens dim"], start: int
) -> Float[Tensor, "batch heads tokens dim"]:
    """The keys of the packed tokens from `start` on that have these components."""
    assert chain.joint is not None
    keys = chain.joint.inverse(components, {}, states.heads)
    if states.rope is None:
        return keys
    rope = states.rope.narrow(start, keys.shape[2])
    return replace(rope, cos=rope.cos[:, None], sin=rope.sin[:, None]).rotate(keys)


def restore_joint_values(
    states: PackedStates,
    chain: LinearChain,
    mixed: Float[Tensor, "batch heads group n"],
    total: Float[Tensor, "batch heads group 1"],
) -> Float[Tensor, "batch heads group dim"]:
    """Weighted sums of values from weighted sums of components; `total`: the sums of the weights."""
    assert chain.joint is not None
    heads, group, dim = *total.shape[1:3], states.shape[2]
    whole = total.clamp_min(torch.finfo(total.dtype).tiny)
    rows = (mixed / whole).flatten(1, 2)
    values = chain.joint.inverse(rows.unflatten(-1, (-1, dim)).transpose(-3, -2), {}, states.heads)
    chosen = values.unflatten(2, (heads, group)).diagonal(dim1=1, dim2=2)  # the head of each query, last
    return chosen.permute(0, 3, 1, 2) * total
