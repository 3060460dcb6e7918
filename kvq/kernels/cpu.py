"""Decode attention on packed codes on a CPU: compiled loops over segments of the packed prefix, one task per head.

Uniform grids are read by `cpu_loops`, levels and codebooks by `cpu_tables`; the shifts of NSNQuant by `cpu_shifts`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import (
    LloydMaxQuantizer,
    SignedMaxQuantizer,
    UniformQuantizer,
    VectorQuantizer,
    plane_widths,
)
from kvq.codecs.packed import BlockRun, Packed
from kvq.codecs.quantizers import Axis, Quantizer
from kvq.codecs.uniform import ZeroPoint
from kvq.errors import Unsupported
from kvq.kernels import cpu_integers
from kvq.kernels.cpu_loops import Grid, loops_for
from kvq.kernels.cpu_shifts import TurnedShifts, shift_weights
from kvq.kernels.cpu_tables import MOST_BITS, book_loops, level_loops
from kvq.kernels.cpu_vectors import weights_of
from kvq.kernels.linear_chain import (
    LinearChain,
    PackedStates,
    continues,
    folds,
    group_size,
    is_per_channel,
    linear_chain_of,
)
from kvq.kernels.pieces import shift_scores

SEGMENTS = 64
"""Largest number of segments per side; blocks whose bytes and groups are not contiguous are one each."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens whose codes and statistics are contiguous.

    Attributes:
        start, tokens: index of the first token in the prefix, and number of tokens.
        planes: codes `[batch, heads, rows, columns]`.
        statistics: of a uniform grid `[batch, heads, rows, columns]`: scales and zero points (of a symmetric grid:
            unused); of codes that index a table: none.
        size: tokens (per channel) or channels (per token) of a group.
        norms: `[batch, heads or 1, tokens]` in fp32.
    """

    start: int
    tokens: int
    planes: tuple[Any, ...]
    statistics: tuple[Any, ...]
    size: int
    norms: Any


def attend(
    query: Float[Tensor, "batch heads 1 dim"], keys: PackedStates, values: PackedStates, scaling: float, first: int = 0
) -> Float[Tensor, "batch heads 1 _dim"]:
    """As `kvq.kernels.eager.attend`, for queries up to fp32.

    Raises:
        Unsupported: stages or quantizers that these loops do not support; `eager` supports more.
    """
    (batch, heads, dim), out_dim = keys.shape, values.shape[2]
    key_side, value_side = (_Side.of(side, query.dtype.itemsize == 2) for side in (keys, values))
    q = query.float().reshape(batch, heads, -1, dim) * scaling
    group, tokens = q.shape[2], keys.tokens
    rotated = key_side.chain.rotate(q).numpy()
    turned = TurnedShifts.of(keys, key_side.chain, q)
    moved = shift_scores(keys, [s for s in key_side.chain.shifts if s not in turned.shifts], key_side.chain, q)
    mixed, unpacked = (torch.zeros(batch, heads, group, out_dim) for _ in range(2))
    totals = torch.empty(batch, heads, group)
    offsets = shift_weights(values, value_side.chain)
    shifted = [torch.zeros(batch, heads, group, out_dim) for _ in offsets]
    outs = mixed.numpy(), totals.numpy(), unpacked.numpy()

    def one_head(place: tuple[int, int]) -> None:
        scores = _scratch(group, tokens)
        for segment in key_side.segments:
            key_side.scores(segment, rotated[place], place, scores)
        turned.add(place, scores)
        if moved is not None:
            scores[:, : keys.packed_tokens] += moved[place].numpy()
        if keys.full is not None:  # in the thread of the head: products this small are not worth waking all threads
            scores[:, keys.packed_tokens :] = (q[place] @ keys.full[place].float().mT).numpy()
        outs[1][place] = weights_of(scores, first)
        for segment in value_side.segments:
            value_side.mix(segment, scores, place, outs[0][place])
        for offset, total in zip(offsets, shifted, strict=True):
            offset.mix(scores, place, total.numpy()[place])
        if values.full is not None:
            weights = torch.from_numpy(scores[:, values.packed_tokens :])
            outs[2][place] = (weights @ values.full[place].float()).numpy()

    _each(one_head, [(b, h) for b in range(batch) for h in range(heads)])
    out = value_side.chain.rotate_back(mixed, shifted) + unpacked
    return (out / totals[..., None]).reshape(batch, query.shape[1], 1, out_dim).to(query.dtype)


def _each(work: Callable[[tuple[int, int]], None], places: list[tuple[int, int]]) -> None:
    """Do all places, this thread and those of the pool each taking the next one when it is free."""
    left = iter(places)

    def take() -> None:
        for place in left:
            work(place)

    others = min(torch.get_num_threads(), len(places)) - 1
    started = [pool(others).submit(take) for _ in range(others)]
    take()
    for each in started:
        each.result()


def _scratch(group: int, tokens: int) -> Any:
    """A buffer for one head's scores, reused by each thread: allocating new pages takes longer than writing them."""
    held = getattr(_KEPT, "scores", None)
    if held is None or held.size < group * tokens:
        held = _KEPT.scores = np.empty(group * (tokens + tokens // 4), np.float32)
    return held[: group * tokens].reshape(group, tokens)


_KEPT = threading.local()


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads that run the loops, which release the GIL."""
    return ThreadPoolExecutor(threads, "kvq-attention")


@dataclass(frozen=True)
class _Side:
    """One side's segments and the loops for them; `tables` are what codes index, if they do."""

    chain: LinearChain
    segments: list[Segment]
    loops: tuple[Callable[..., Any], Callable[..., Any]]
    tables: tuple[Any, ...] | None

    @staticmethod
    def of(states: PackedStates, integers: bool = False) -> _Side:
        reason = unfit(states)
        if reason is not None:
            raise Unsupported(f"cache.attention=packed: {reason}")
        assert states.codec is not None
        quantizer, chain = states.codec.quantizer, linear_chain_of(states.codec)
        loops, tables = _loops(quantizer, states.shape[2], integers)
        return _Side(chain, list(_segments(states, chain, quantizer)), loops, tables)

    def scores(self, segment: Segment, query: Any, place: tuple[int, int], out: Any) -> None:
        """Scores of the segment's tokens into their columns of `out`."""
        self.loops[0](query, *self._stored(segment, place), out[:, segment.start : segment.start + segment.tokens])

    def mix(self, segment: Segment, weights: Any, place: tuple[int, int], out: Any) -> None:
        """Add the segment's values, weighted by their columns of `weights`, to `out`."""
        own = weights[:, segment.start : segment.start + segment.tokens]
        self.loops[1](own, *self._stored(segment, place), out)

    def _stored(self, segment: Segment, place: tuple[int, int]) -> tuple[Any, ...]:
        planes = tuple(plane[place] for plane in segment.planes)
        norms = segment.norms[place[0], min(place[1], segment.norms.shape[1] - 1)]
        if self.tables is not None:
            return (planes[0], planes[-1]), self.tables, norms
        return planes, *(part[place].ravel() for part in segment.statistics), segment.size, norms


@functools.lru_cache(maxsize=64)
def _loops(
    quantizer: Quantizer, dim: int, integers: bool
) -> tuple[tuple[Callable[..., Any], Callable[..., Any]], tuple[Any, ...] | None]:
    """Loops of scores and of weighted sums, and the tables that the codes index."""
    if isinstance(quantizer, LloydMaxQuantizer):
        levels = quantizer.levels(dim, torch.float32)[2 ** (quantizer.bits - 1) :].numpy()
        found = level_loops(dim, plane_widths(quantizer.bits))
        return (found.scores, found.mix), (levels,) * 3
    if isinstance(quantizer, VectorQuantizer):
        entries, masks, shifts = (part.numpy() for part in quantizer.tables())
        books = book_loops(dim, quantizer.bits == 2, bool(shifts.any()))
        return (books.scores, books.mix), (entries, masks, shifts)
    grid, per_channel = _grid(quantizer, dim)
    if integers and cpu_integers.fits(dim, grid.channels):
        grid = dataclasses.replace(grid, integers=True)
    loops = loops_for(grid)
    if per_channel:
        return (loops.scores_per_channel, loops.mix_per_channel), None
    return (loops.scores_per_token, loops.mix_per_token), None


def _grid(quantizer: Quantizer, dim: int) -> tuple[Grid, bool]:
    """The grid that loops are compiled for, and whether its statistics are per channel."""
    if isinstance(quantizer, SignedMaxQuantizer):
        channels = min(quantizer.group_size or dim, dim)
        return Grid(dim, channels, plane_widths(quantizer.bits), "symmetric", 2 ** (quantizer.bits - 1)), False
    assert folds(quantizer)
    low = "symmetric" if quantizer.symmetric else quantizer.zero_point.name
    channels = min(quantizer.group_size or dim, dim) if quantizer.axis is Axis.per_token else dim
    top = 2 ** (quantizer.bits - 1) - 1
    return Grid(dim, channels, plane_widths(quantizer.bits), low, top), quantizer.axis is Axis.per_channel


def unfit(states: PackedStates) -> str | None:
    """The reason why these loops cannot read a side; None: they can."""
    if states.codec is None or not states.packed:
        return "nothing is packed"
    linear_chain_of(states.codec)
    quantizer = states.codec.quantizer
    if (reason := _unread(quantizer)) is not None:
        return reason
    runs = [run for packed in states.packed for run in packed.runs]
    if sum(1 if continues(run, quantizer) else run.count for run in runs) > SEGMENTS:
        return "blocks whose length is no multiple of 8 and of the group"
    size = group_size(quantizer)
    if is_per_channel(quantizer):
        if size is not None and size % 8 and size < max(run.tokens for run in runs):
            return f"groups of {size} tokens, no multiple of 8"
    elif size is not None and size < states.shape[2] and states.shape[2] % size:
        return f"groups of {size} channels, no divisor of {states.shape[2]}"
    return None


def _unread(quantizer: Quantizer) -> str | None:
    """The reason why no loop reads these codes; None: one does."""
    name = type(quantizer).__name__
    if isinstance(quantizer, LloydMaxQuantizer):
        if quantizer.unit:
            return f"{name} with tokens scaled to norm 1 has no loops for a CPU"
        return None if quantizer.bits <= MOST_BITS else f"{name} of {quantizer.bits} bits has no loops for a CPU"
    if isinstance(quantizer, VectorQuantizer):
        return None
    if not folds(quantizer) and not isinstance(quantizer, SignedMaxQuantizer):
        return f"{name} has no loops for a CPU"
    return f"{quantizer.bits} bits have no loops for a CPU" if quantizer.bits > 8 else None


def _segments(states: PackedStates, chain: LinearChain, quantizer: Quantizer) -> Iterator[Segment]:
    start = 0
    for packed in states.packed:
        for run, parts in packed.by_run():
            piece = run if continues(run, quantizer) else dataclasses.replace(run, count=1)
            for index in range(run.count // piece.count):
                sizes = {name: run.rows[name] * piece.count for name in parts}
                own = {name: part.narrow(2, index * sizes[name], sizes[name]) for name, part in parts.items()}
                yield _segment(packed, chain, quantizer, own, piece, start)
                start += run.tokens * piece.count


def _segment(
    packed: Packed,
    chain: LinearChain,
    quantizer: Quantizer,
    parts: dict[str, Tensor],
    run: BlockRun,
    start: int,
) -> Segment:
    tokens = run.tokens * run.count
    planes = tuple(part.numpy() for name, part in sorted(parts.items()) if name.startswith("codes."))
    along = run.tokens if is_per_channel(quantizer) else packed.head_dim
    norms = chain.factors(run.blocks(parts), None, run.tokens, torch.float32)
    if norms is None:
        flat = torch.ones(1, 1, tokens).expand(packed.batch, 1, tokens)
    else:
        flat = norms.transpose(1, 2).flatten(2)
    size = min(group_size(quantizer) or along, along)
    return Segment(start, tokens, planes, _statistics(quantizer, parts), size, flat.contiguous().numpy())


def _statistics(quantizer: Quantizer, parts: dict[str, Tensor]) -> tuple[Any, ...]:
    """Scales and zero points of a uniform grid; fp16 as the int16 that numba reads."""
    if "scale" not in parts:
        return ()
    scale = low = parts["scale"].view(torch.int16)
    if isinstance(quantizer, UniformQuantizer) and not quantizer.symmetric:
        low = parts["zero_point"]
        if quantizer.zero_point is ZeroPoint.float:
            low = low.view(torch.int16)
    return scale.numpy(), low.numpy()
