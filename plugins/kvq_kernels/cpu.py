"""Decode attention on packed codes on a CPU: compiled loops over segments of the packed prefix, a task for some heads.

Codes and tokens in full precision are read by `cpu_loops`, norms and the shifts of NSNQuant by `cpu_stored`. A task
goes from one loop to the next for all of its heads, because Python between two loops holds back the other threads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import LloydMaxQuantizer, SignedMaxQuantizer, UniformQuantizer, VectorQuantizer, plane_widths
from kvq.codecs.quantizers import Quantizer
from kvq.errors import Unsupported
from kvq.kernels.linear_chain import (
    LinearChain,
    PackedStates,
    build_linear_chain,
    group_size,
    is_affine,
    is_contiguous,
    is_per_channel,
)
from kvq_kernels.cpu_loops import Codes, Loops, loops_for, softmax_weights
from kvq_kernels.cpu_stored import (
    Flat,
    Heads,
    KeyShifts,
    NormsAndShifts,
    Stored,
    list_stored,
    mix_shifts,
    norms_and_shifts,
    ones_for,
    scratch,
)

SEGMENTS = 64
"""Largest number of segments per side; blocks whose bytes and groups are not contiguous are one each."""
MOST_BITS = 4
"""Levels of more bits would take as many comparisons."""
SCRATCH = 2**18
"""Scores that a thread holds at once, if those of one head are not more: 1 MiB stays in a core's cache."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens whose codes and statistics are contiguous.

    Attributes:
        start, tokens: index of the first token in the prefix, and number of tokens.
        parts: three planes of codes (the last one repeated), scales and lowest values (of a symmetric grid: scales
            again; without statistics: the last plane again).
        places: `Flat.place` of each of `parts`, `[parts, 3]`.
        size: tokens (per channel) or channels (per token) of a group.
    """

    start: int
    tokens: int
    parts: tuple[Flat, ...]
    places: Any
    size: int

    def arguments(self, heads: Heads, tables: tuple[Any, ...], norms: Any) -> tuple[Any, ...]:
        """The arguments of `Loops` between the first one (rows of queries or weights) and `out`."""
        flat = tuple(part.from_head(heads) for part in self.parts)
        return flat[:3], self.places, tables, *flat[3:], self.size, norms, self.start, self.tokens


def attend(
    query: Float[Tensor, "batch heads 1 dim"],
    keys: PackedStates,
    values: PackedStates,
    scaling: float,
    first: int = 0,
    softcap: None = None,
) -> Float[Tensor, "batch heads 1 _dim"]:
    """As `kvq.kernels.eager.attend`, for queries up to fp32 and without a softcap.

    Raises:
        Unsupported: stages or quantizers that these loops do not support; `eager` supports more.
    """
    (batch, heads, dim), out_dim = keys.shape, values.shape[2]
    q = query.float().reshape(batch, heads, -1, dim) * scaling
    group, tokens = q.shape[2], keys.tokens
    key_side, value_side = (_Side.of(side, group) for side in (keys, values))
    plain, rotated = q.numpy(), key_side.chain.rotate(q).contiguous().numpy()
    shifts = KeyShifts.of(keys, key_side.chain, key_side.stored, q)
    totals = np.empty((batch, heads, group), np.float32)
    mixed, unpacked, *shifted = (
        np.zeros((batch, heads, group, out_dim), np.float32) for _ in range(2 + len(value_side.chain.shifts))
    )

    def some_heads(place: Heads) -> None:
        scores, decoded = scratch("scores", (place.count, group, tokens)), key_side.norms_and_shifts(place)
        key_side.scores(rotated, plain, place, decoded.norms, scores)
        shifts.add(place, decoded, scores)
        totals[place.index] = softmax_weights(scores.reshape(-1, tokens), first).reshape(-1, group)
        decoded = value_side.norms_and_shifts(place)
        value_side.mix(scores, place, decoded.norms, mixed, unpacked)
        mix_shifts(value_side.stored, place, decoded, scores, shifted)

    together = max(1, min(-(-batch * heads // torch.get_num_threads()), heads, SCRATCH // (group * tokens)))
    starts = itertools.product(range(batch), range(0, heads, together))
    _run_in_threads(some_heads, [Heads(b, h, min(together, heads - h)) for b, h in starts])
    out = value_side.chain.rotate_back(torch.from_numpy(mixed), list(map(torch.from_numpy, shifted)))
    out = (out + torch.from_numpy(unpacked)) / torch.from_numpy(totals)[..., None]
    return out.reshape(batch, query.shape[1], 1, out_dim).to(query.dtype)


def _run_in_threads(work: Callable[[Heads], None], places: list[Heads]) -> None:
    """Call `work` for all places; this thread and those of the pool each take the next place when they are free."""
    left = iter(places)

    def take() -> None:
        for place in left:
            work(place)

    others = min(torch.get_num_threads(), len(places)) - 1
    started = [pool(others).submit(take) for _ in range(others)]
    take()
    for each in started:
        each.result()


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads that run the loops, which release the GIL."""
    return ThreadPoolExecutor(threads, "kvq-attention")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a child has none of the threads


@dataclass(frozen=True)
class _Side:
    """The segments of keys or values and the loops for them; `tables`: levels or codebook entries that codes index.

    Attributes:
        stored: norms and shifts by run.
        full: tokens in full precision, as a segment, and its loops; None: there are none.
    """

    chain: LinearChain
    stored: list[Stored]
    segments: list[Segment]
    loops: Loops
    tables: tuple[Any, ...]
    dim: int
    full: tuple[Segment, Loops] | None

    @staticmethod
    def of(states: PackedStates, group: int) -> _Side:
        """`group`: queries of a KV head; loops for one are compiled apart."""
        reason = unfit_reason(states)
        if reason is not None:
            raise Unsupported(f"cache.attention=packed: {reason}")
        assert states.codec is not None
        quantizer, chain, dim = states.codec.quantizer, build_linear_chain(states.codec), states.shape[2]
        rows = 1 if group == 1 else 4
        loops, tables = _loops(quantizer, dim, rows)
        segments = list(_segments(states, quantizer))
        return _Side(chain, list_stored(states), segments, loops, tables, dim, _full_segment(states, rows))

    def norms_and_shifts(self, heads: Heads) -> NormsAndShifts:
        """Norms and shifts of some heads."""
        return norms_and_shifts(self.chain, self.stored, heads, self.dim)

    def scores(self, rotated: Any, plain: Any, heads: Heads, norms: Any, out: Any) -> None:
        """Write the scores of all tokens of some heads to `out`.

        `rotated`: queries for packed tokens; `plain`: for tokens in full precision; `norms`: a factor of the score of
        each packed token, `[heads or 1, tokens]`.
        """
        for segment in self.segments:
            self.loops[0](rotated[heads.index], *segment.arguments(heads, self.tables, norms), out)
        if self.full is not None:
            segment, loops = self.full
            loops[0](plain[heads.index], *segment.arguments(heads, _NO_TABLES, ones_for(out.shape[2])), out)

    def mix(self, weights: Any, heads: Heads, norms: Any, out: Any, unpacked: Any) -> None:
        """Add the weighted sums of packed values to `out`, and those of values in full precision to `unpacked`."""
        for segment in self.segments:
            self.loops[1](weights, *segment.arguments(heads, self.tables, norms), out[heads.index])
        if self.full is not None:
            segment, loops = self.full
            arguments = segment.arguments(heads, _NO_TABLES, ones_for(weights.shape[2]))
            loops[1](weights, *arguments, unpacked[heads.index])


_NO_TABLES = (np.zeros((1, 1), np.float32),) * 3


def _full_segment(states: PackedStates, rows: int) -> tuple[Segment, Loops] | None:
    """The tokens in full precision as one segment, with its loops of scores and of sums; None: there are none."""
    if states.full is None:
        return None
    half = states.full.dtype is torch.bfloat16
    numbers = (states.full.view(torch.int16) if half else states.full.float()).contiguous()
    dim = states.shape[2]
    loops = loops_for(Codes("numbers", (16 if half else 32,), dim, dim, rows=rows))
    return _segment(states.packed_tokens, numbers.shape[2], [numbers], [], 1), loops


@functools.lru_cache(maxsize=64)
def _loops(quantizer: Quantizer, dim: int, rows: int) -> tuple[Loops, tuple[Any, ...]]:
    """Loops of scores and of weighted sums, and the tables that the codes index."""
    if isinstance(quantizer, LloydMaxQuantizer):
        levels = quantizer.levels(dim, torch.float32)[2 ** (quantizer.bits - 1) :].numpy()
        return loops_for(Codes("levels", plane_widths(quantizer.bits), dim, dim, rows=rows)), (levels,) * 3
    if isinstance(quantizer, VectorQuantizer):
        entries, flips, shifts = (part.numpy() for part in quantizer.tables())
        kind = "book" if quantizer.bits == 1 else "shifted_book" if shifts.any() else "signed_book"
        book = b"".join(part.tobytes() for part in (entries, flips, shifts))
        return loops_for(Codes(kind, (8,), dim, dim, rows=rows, book=book)), _NO_TABLES
    return loops_for(dataclasses.replace(_grid(quantizer, dim), rows=rows)), _NO_TABLES


def _grid(quantizer: Quantizer, dim: int) -> Codes:
    """The parameters of loops for the uniform grid of a quantizer."""
    if isinstance(quantizer, SignedMaxQuantizer):
        widths, channels = plane_widths(quantizer.bits), min(quantizer.group_size or dim, dim)
        return Codes("uniform", widths, dim, channels, low="symmetric", top=2 ** (quantizer.bits - 1))
    assert is_affine(quantizer)
    low = "symmetric" if quantizer.symmetric else quantizer.zero_point
    channels = min(quantizer.group_size or dim, dim) if quantizer.axis == "per_token" else dim
    top = 2 ** (quantizer.bits - 1) - 1
    return Codes("uniform", plane_widths(quantizer.bits), dim, channels, quantizer.axis == "per_channel", low, top)


def unfit_reason(states: PackedStates) -> str | None:
    """The reason why these loops cannot read a side; None: they can."""
    if states.codec is None or not states.packed:
        return "nothing is packed"
    build_linear_chain(states.codec)
    quantizer = states.codec.quantizer
    if (reason := _unread_reason(quantizer)) is not None:
        return reason
    runs = [run for packed in states.packed for run in packed.runs]
    if sum(1 if is_contiguous(run, quantizer) else run.count for run in runs) > SEGMENTS:
        return "blocks whose length is no multiple of 8 and of the group"
    size = group_size(quantizer)
    if is_per_channel(quantizer):
        if size is not None and size % 8 and size < max(run.tokens for run in runs):
            return f"groups of {size} tokens, no multiple of 8"
    elif size is not None and size < states.shape[2] and states.shape[2] % size:
        return f"groups of {size} channels, no divisor of {states.shape[2]}"
    return None


def _unread_reason(quantizer: Quantizer) -> str | None:
    """The reason why no loop reads these codes; None: one does."""
    name = type(quantizer).__name__
    if isinstance(quantizer, LloydMaxQuantizer):
        if quantizer.unit:
            return f"{name} with tokens scaled to norm 1 has no loops for a CPU"
        return None if quantizer.bits <= MOST_BITS else f"{name} of {quantizer.bits} bits has no loops for a CPU"
    if isinstance(quantizer, VectorQuantizer):
        return None
    if not is_affine(quantizer) and not isinstance(quantizer, SignedMaxQuantizer):
        return f"{name} has no loops for a CPU"
    return f"{quantizer.bits} bits have no loops for a CPU" if quantizer.bits > 8 else None


def _segments(states: PackedStates, quantizer: Quantizer) -> Iterator[Segment]:
    """The segments of the packed prefix: each run of blocks, or each block where bytes are not contiguous."""
    for start, run, parts in states.runs():
        piece = run if is_contiguous(run, quantizer) else dataclasses.replace(run, count=1)
        along = run.tokens if is_per_channel(quantizer) else states.shape[2]
        size, tokens = min(group_size(quantizer) or along, along), run.tokens * piece.count
        for index in range(run.count // piece.count):
            sizes = {name: run.rows[name] * piece.count for name in parts}
            block_parts = {name: part.narrow(2, index * sizes[name], sizes[name]) for name, part in parts.items()}
            planes = [part for name, part in sorted(block_parts.items()) if name.startswith("codes.")]
            yield _segment(start + index * tokens, tokens, planes, _statistics(quantizer, block_parts), size)


def _segment(start: int, tokens: int, planes: list[Tensor], statistics: list[Tensor], size: int) -> Segment:
    flat = [Flat.of(part) for part in (*planes, *statistics)]
    last = flat[len(planes) - 1]
    parts = (*flat[: len(planes)], *[last] * (3 - len(planes)), *(flat[len(planes) :] or [last, last]))
    return Segment(start, tokens, parts, np.array([part.place for part in parts]), size)


def _statistics(quantizer: Quantizer, parts: dict[str, Tensor]) -> list[Tensor]:
    """Scales and zero points of a uniform grid."""
    if "scale" not in parts:
        return []
    zeros = isinstance(quantizer, UniformQuantizer) and not quantizer.symmetric
    return [parts["scale"], parts["zero_point" if zeros else "scale"]]
