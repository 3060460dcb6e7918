"""The shifts of NSNQuant in attention on a CPU: one vector per block, which each token's norm scales.

It adds to the scores of keys, turned by each token's angles (RoPE) where that was undone before it, and to the sums of
values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.machine_code import compiled
from kvq.kernels.cpu_loops import by_rows
from kvq.kernels.cpu_stored import Heads, NormsAndShifts, Stored
from kvq.kernels.cpu_tables import Kind, Numbers, dots_of
from kvq.kernels.cpu_vectors import OPTIONS, TILE, lanes_of
from kvq.kernels.linear_chain import LinearChain, PackedStates


@dataclass(frozen=True)
class KeyShifts:
    """What adds the scores of keys' shifts.

    Attributes:
        stored: the runs of blocks.
        steps: by shift the loop, the queries `[batch, heads, group, dim]` and the cosines and sines of all tokens
            `[batch or 1, tokens, pairs]`.
    """

    stored: Sequence[Stored]
    steps: list[tuple[Any, Any, tuple[Any, Any]]]

    @staticmethod
    def of(
        states: PackedStates,
        chain: LinearChain,
        stored: Sequence[Stored],
        query: Float[Tensor, "batch heads group dim"],
    ) -> KeyShifts:
        steps = []
        for shift in chain.shifts:
            rope = states.rope if shift.turned else None
            angles = [torch.zeros(1, 1, 1)] * 2 if rope is None else [rope.cos, rope.sin]
            pairs = 0 if rope is None else rope.cos.shape[-1]
            half = angles[0].dtype is torch.bfloat16
            cos, sin = ((part.view(torch.int16) if half else part.float()).contiguous().numpy() for part in angles)
            loop = turned_loop(pairs, half, rope is not None and rope.interleaved)
            steps.append((loop, chain.rotate(query, shift.rotations).contiguous().numpy(), (cos, sin)))
        return KeyShifts(stored, steps)

    def add(self, heads: Heads, own: NormsAndShifts, scores: Any) -> None:
        """Add what the shifts add to the scores `[heads, group, tokens]` of some heads."""
        for (loop, queries, angles), (factors, offsets) in zip(self.steps, own.shifts, strict=True):
            turns = tuple(part[min(heads.batch, len(part) - 1)] for part in angles)
            for each, vectors in zip(self.stored, offsets, strict=True):
                loop(queries[heads.index], vectors, turns, factors, each.start, each.run.tokens, scores)


def mix_shifts(stored: Sequence[Stored], heads: Heads, own: NormsAndShifts, weights: Any, out: Sequence[Any]) -> None:
    """Add the weighted sums of values' shifts to `out`, for each shift `[batch, heads, group, dim]`."""
    for (factors, offsets), total in zip(own.shifts, out, strict=True):
        for each, vectors in zip(stored, offsets, strict=True):
            _mix_blocks(weights, factors, vectors, each.start, each.run.tokens, total[heads.index])


@compiled(OPTIONS, keep=True)
@no_type_check
def _mix_blocks(weights, factors, vectors, start, length, out):
    """Add to `out[head, row]` each block's vector times the sum of its weights times their factors."""
    for head in range(out.shape[0]):
        near, own = factors[min(head, len(factors) - 1)], vectors[min(head, len(vectors) - 1)]
        for row in range(out.shape[1]):
            line, sums = weights[head, row], out[head, row]
            for block in range(own.shape[0]):
                first, offset, total = start + block * length, own[block], np.float32(0)
                here, by = line[first : first + length], near[first : first + length]
                for t in range(length):
                    total += here[t] * by[t]
                for channel in range(sums.shape[0]):
                    sums[channel] += total * offset[channel]


@functools.cache
@no_type_check
def turned_loop(pairs: int, half: bool, interleaved: bool):
    """The loop that adds the scores of a shift of keys, turned by each token's angles (`turned_scores`), to `out`.

    `(queries, vectors, angles, factors, start, length, out)`: `queries` `[heads, group, dim]`, one of `vectors`
    `[heads or 1, blocks, dim]` for each `length` tokens from `start` on, `angles`: cosines and sines `[tokens, pairs]`
    in fp32 (`half`: bf16, held as int16), `factors` `[heads or 1, tokens]`, `out` `[heads, group, tokens]`. A token's
    angles are what a query's products with the vector are multiplied by, as if they were the values of codes.
    """
    lanes = lanes_of(pairs or 1)
    kind = Kind(functools.partial(Numbers, pairs, half, lanes), 2 * pairs, lanes, lambda rows: (4, 4), 1, 1)
    dots = by_rows(functools.partial(dots_of, kind))
    step, apart = (2, 1) if interleaved else (1, pairs)

    @compiled(OPTIONS)
    def turned(query, vectors, angles, factors, start, length, out):
        group, dim = query.shape
        found = np.zeros((group, TILE + 8), np.float32)
        products, rest = np.empty((group, 2 * pairs), np.float32), np.empty(group, np.float32)
        for block in range(vectors.shape[0]):
            vector, first = vectors[block], start + block * length
            for h in range(group):
                own, line = query[h], products[h]
                for p in range(pairs):
                    a, b = p * step, p * step + apart
                    line[p] = own[a] * vector[a] + own[b] * vector[b]
                    line[pairs + p] = own[b] * vector[a] - own[a] * vector[b]
                still = np.float32(0)
                for channel in range(2 * pairs, dim):
                    still += own[channel] * vector[channel]
                rest[h] = still
            for token in range(first, first + length, TILE):
                count = min(TILE, first + length - token)
                if pairs > 0:
                    dots(products, angles, (products, products, products), token, count, found)
                near = factors[token : token + count]
                for h in range(group):
                    line, here = out[h, token : token + count], found[h]
                    for t in range(count):
                        line[t] += (here[t] + rest[h]) * near[t]

    @compiled(OPTIONS, keep=True)
    def all_heads(queries, vectors, angles, factors, start, length, out):
        for h in range(out.shape[0]):
            own, near = vectors[min(h, len(vectors) - 1)], factors[min(h, len(factors) - 1)]
            turned(queries[h], own, angles, near, start, length, out[h])

    return all_heads
