"""Decode attention on packed codes on a CPU: `cpu_loops` over segments of the packed prefix, one task per head."""

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

from kvq.codecs import UniformQuantizer, plane_widths
from kvq.codecs.packed import BlockRun, Packed
from kvq.codecs.quantizers import Axis, ZeroPoint
from kvq.errors import Unsupported
from kvq.kernels.cpu_loops import Grid, loops_for, weights_of
from kvq.kernels.form import Form, PackedStates, folds, form_of

SEGMENTS = 64
"""Largest number of segments per side; blocks whose bytes and groups are not contiguous are one each."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens whose codes and statistics are contiguous.

    Attributes:
        start, tokens: index of the first token in the prefix, and number of tokens.
        planes, scale, low: `[batch, heads, rows, columns]`; `low` is the zero point (of a symmetric grid: unused).
        size: tokens (per channel) or channels (per token) of a group.
        norms: `[batch, heads or 1, tokens]` in fp32.
    """

    start: int
    tokens: int
    planes: tuple[Any, ...]
    scale: Any
    low: Any
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
    key_side, value_side = _Side.of(keys), _Side.of(values)
    q = query.float().reshape(batch, heads, -1, dim) * scaling
    group, tokens = q.shape[2], keys.tokens
    rotated = key_side.form.rotate(q).numpy()
    behind = None if keys.full is None else (q @ keys.full.float().mT).numpy()
    mixed = torch.zeros(batch, heads, group, out_dim)
    rest = torch.zeros(batch, heads, group, tokens - values.packed_tokens)
    totals = torch.empty(batch, heads, group)
    outs = tuple(part.numpy() for part in (mixed, rest, totals))

    def one_head(place: tuple[int, int]) -> None:
        scores = _scratch(group, tokens)
        for segment in key_side.segments:
            key_side.scores(segment, rotated[place], place, scores)
        if behind is not None:
            scores[:, keys.packed_tokens :] = behind[place]
        outs[2][place] = weights_of(scores, first)
        for segment in value_side.segments:
            value_side.mix(segment, scores, place, outs[0][place])
        outs[1][place] = scores[:, values.packed_tokens :]

    _each(one_head, [(b, h) for b in range(batch) for h in range(heads)])
    out = value_side.form.rotate_back(mixed, [])
    if values.full is not None:
        out = out + rest @ values.full.float()
    return (out / totals[..., None]).reshape(batch, query.shape[1], 1, out_dim).to(query.dtype)


def _each(work: Callable[[tuple[int, int]], None], places: list[tuple[int, int]]) -> None:
    threads = min(torch.get_num_threads(), len(places))
    if threads == 1:
        for place in places:
            work(place)
    else:
        list(pool(threads).map(work, places))


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
    """One side's segments and the loops for them."""

    form: Form
    per_channel: bool
    grid: Grid
    segments: list[Segment]

    @staticmethod
    def of(states: PackedStates) -> _Side:
        reason = unfit(states)
        if reason is not None:
            raise Unsupported(f"cache.attention=packed: {reason}")
        assert states.codec is not None
        quantizer = states.codec.quantizer
        assert folds(quantizer)
        low = "symmetric" if quantizer.symmetric else quantizer.zero_point.name
        dim = states.shape[2]
        channels = min(quantizer.group_size or dim, dim) if quantizer.axis is Axis.per_token else dim
        grid = Grid(dim, channels, plane_widths(quantizer.bits), low, 2 ** (quantizer.bits - 1) - 1)
        form = form_of(states.codec)
        return _Side(form, quantizer.axis is Axis.per_channel, grid, list(_segments(states, form, quantizer)))

    def scores(self, segment: Segment, query: Any, place: tuple[int, int], out: Any) -> None:
        """Scores of the segment's tokens into their columns of `out`."""
        loops = loops_for(self.grid)
        loop = loops.scores_per_channel if self.per_channel else loops.scores_per_token
        loop(query, *_stored(segment, place), out[:, segment.start : segment.start + segment.tokens])

    def mix(self, segment: Segment, weights: Any, place: tuple[int, int], out: Any) -> None:
        """Add the segment's values, weighted by their columns of `weights`, to `out`."""
        loops = loops_for(self.grid)
        loop = loops.mix_per_channel if self.per_channel else loops.mix_per_token
        loop(weights[:, segment.start : segment.start + segment.tokens], *_stored(segment, place), out)


def _stored(segment: Segment, place: tuple[int, int]) -> tuple[Any, ...]:
    planes = tuple(plane[place] for plane in segment.planes)
    norms = segment.norms[place[0], min(place[1], segment.norms.shape[1] - 1)]
    return planes, segment.scale[place].ravel(), segment.low[place].ravel(), segment.size, norms


def unfit(states: PackedStates) -> str | None:
    """The reason why these loops cannot read a side; None: they can."""
    if states.codec is None or not states.packed:
        return "nothing is packed"
    form, quantizer = form_of(states.codec), states.codec.quantizer
    if not folds(quantizer):
        return f"{type(quantizer).__name__} has no loops for a CPU"
    if form.shifts or quantizer.bits > 8:
        return f"shifts and {quantizer.bits} bits have no loops for a CPU"
    if (
        sum(1 if _continues(run, quantizer) else run.count for packed in states.packed for run in packed.runs)
        > SEGMENTS
    ):
        return "blocks whose length is no multiple of 8 and of the group"
    size = quantizer.group_size
    longest = max(run.tokens for packed in states.packed for run in packed.runs)
    if quantizer.axis is Axis.per_channel and size is not None and size % 8 and size < longest:
        return f"groups of {size} tokens, no multiple of 8"
    if quantizer.axis is Axis.per_token and size is not None and size < states.shape[2] and states.shape[2] % size:
        return f"groups of {size} channels, no divisor of {states.shape[2]}"
    return None


def _continues(run: BlockRun, quantizer: UniformQuantizer) -> bool:
    """Whether the blocks of a run are contiguous like one block: whole bytes, whole groups."""
    size = quantizer.group_size or run.tokens
    whole = quantizer.axis is Axis.per_token or run.tokens % min(size, run.tokens) == 0
    return run.count == 1 or (run.tokens % 8 == 0 and whole)


def _segments(states: PackedStates, form: Form, quantizer: UniformQuantizer) -> Iterator[Segment]:
    start = 0
    for packed in states.packed:
        for run, parts in packed.by_run():
            piece = run if _continues(run, quantizer) else dataclasses.replace(run, count=1)
            for index in range(run.count // piece.count):
                sizes = {name: run.rows[name] * piece.count for name in parts}
                own = {name: part.narrow(2, index * sizes[name], sizes[name]) for name, part in parts.items()}
                yield _segment(packed, form, quantizer, own, piece, start)
                start += run.tokens * piece.count


def _segment(
    packed: Packed,
    form: Form,
    quantizer: UniformQuantizer,
    parts: dict[str, Tensor],
    run: BlockRun,
    start: int,
) -> Segment:
    tokens = run.tokens * run.count
    planes = tuple(parts[f"codes.{index}"].numpy() for index in range(len(plane_widths(quantizer.bits))))
    scale = parts["scale"].view(torch.int16)
    low = scale if quantizer.symmetric else parts["zero_point"]
    if not quantizer.symmetric and quantizer.zero_point is ZeroPoint.float:
        low = low.view(torch.int16)
    along = run.tokens if quantizer.axis is Axis.per_channel else packed.head_dim
    norms = form.factors(run.blocks(parts), None, run.tokens, torch.float32)
    if norms is None:
        flat = torch.ones(1, 1, tokens).expand(packed.batch, 1, tokens)
    else:
        flat = norms.transpose(1, 2).flatten(2)
    size = min(quantizer.group_size or along, along)
    return Segment(start, tokens, planes, scale.numpy(), low.numpy(), size, flat.contiguous().numpy())
