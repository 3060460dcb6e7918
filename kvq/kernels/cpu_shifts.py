"""The shifts of NSNQuant in attention on a CPU: one vector per block, which each token's norm scales.

It adds to the scores of keys, turned by each token's angles (RoPE), and to the sums of values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from llvmlite import ir
from torch import Tensor

from kvq.codecs.machine_code import compiled
from kvq.kernels.cpu_loops import by_rows
from kvq.kernels.cpu_tables import Kind, dots_of
from kvq.kernels.cpu_vectors import INT, OPTIONS, TILE, Step, lanes_of
from kvq.kernels.linear_chain import LinearChain, PackedStates, Shift
from kvq.kernels.pieces import runs_of, shift_terms


@dataclass(frozen=True)
class TurnedShifts:
    """Shifts of keys that RoPE turns by each token's angles.

    Attributes:
        shifts: those of the chain; none where there is no RoPE.
        runs: by run the loop, the queries `[batch, heads, group, dim]`, the first token, the length of a block, vectors
            `[batch, blocks, heads, dim]`, angles `[batch or 1, tokens, pairs]`, factors `[batch, heads or 1, tokens]`.
    """

    shifts: tuple[Shift, ...]
    runs: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(states: PackedStates, chain: LinearChain, query: Float[Tensor, "batch heads group dim"]) -> TurnedShifts:
        rope = states.rope
        if rope is None or not rope.cos.shape[-1]:
            return TurnedShifts((), ())
        shifts, runs = tuple(shift for shift in chain.shifts if shift.turned), []
        half = rope.cos.dtype is torch.bfloat16
        loop = turned_loop(rope.cos.shape[-1], half, rope.interleaved)
        angles = [part.view(torch.int16) if half else part.float() for part in (rope.cos, rope.sin)]
        for shift in shifts:
            seen = chain.rotate(query, shift.rotations).numpy()
            for start, length, offsets, factors in _terms(states, chain, shift):
                stop = start + factors.shape[2]
                own = tuple(part[:, start:stop].contiguous().numpy() for part in angles)
                runs.append((loop, seen, start, length, offsets, own, factors))
        return TurnedShifts(shifts, tuple(runs))

    def add(self, place: tuple[int, int], scores: Any) -> None:
        """Add what the shifts add to one head's scores `[group, tokens]`."""
        batch, head = place
        for loop, seen, start, length, offsets, angles, factors in self.runs:
            own = tuple(part[min(batch, len(part) - 1)] for part in angles)
            norms = factors[batch, min(head, factors.shape[1] - 1)]
            out = scores[:, start : start + len(norms)]
            loop(seen[place], np.ascontiguousarray(offsets[batch, :, head]), own, norms, length, out)


@dataclass(frozen=True)
class ShiftMix:
    """By run: start, block length, vectors `[batch, blocks, heads, dim]`, factors `[batch, heads or 1, tokens]`."""

    runs: list[tuple[int, int, Any, Any]]

    def mix(self, weights: Any, place: tuple[int, int], out: Any) -> None:
        """Add the weighted sum of one head's shifts to `out` `[group, dim]`. `weights`: `[group, tokens]`."""
        batch, head = place
        for start, length, offsets, factors in self.runs:
            norms = factors[batch, min(head, factors.shape[1] - 1)]
            sums = np.empty((len(weights), offsets.shape[1]), np.float32)
            _block_sums(weights[:, start : start + len(norms)], norms, length, sums)
            out += sums @ offsets[batch, :, head]


def shift_weights(states: PackedStates, chain: LinearChain) -> list[ShiftMix]:
    """The shifts of values, in the order of `chain.shifts`."""
    return [ShiftMix(list(_terms(states, chain, shift))) for shift in chain.shifts]


def _terms(states: PackedStates, chain: LinearChain, shift: Shift) -> Iterator[tuple[int, int, Any, Any]]:
    """By run: its first token, the length of a block, the vectors of the blocks, the factors of the tokens."""
    for start, run, blocks in runs_of(states):
        offsets, norms = shift_terms(chain, shift, blocks, run, states.shape[2])
        factors = torch.ones(states.shape[0], 1, run.tokens * run.count) if norms is None else norms
        yield start, run.tokens, offsets.contiguous().numpy(), factors.numpy()


@compiled(OPTIONS, keep=True)
@no_type_check
def _block_sums(weights, norms, length, sums):
    """`sums[row, block]` of the block's weights times norms; `weights` `[rows, tokens]`, `norms` `[tokens]`."""
    for row in range(sums.shape[0]):
        line = weights[row]
        for block in range(sums.shape[1]):
            here, near = line[block * length : (block + 1) * length], norms[block * length : (block + 1) * length]
            total = np.float32(0)
            for t in range(length):
                total += here[t] * near[t]
            sums[row, block] = total


@functools.cache
@no_type_check
def turned_loop(pairs: int, half: bool, interleaved: bool):
    """The loop that adds the scores of NSNQuant's shift of keys, turned by each token's angles (`turned_scores`).

    `(query, offsets, angles, norms, length, out)`: `query` `[group, dim]`, one of `offsets` `[blocks, dim]` for each
    `length` tokens, `angles`: cosines and sines `[tokens, pairs]` in fp32 (`half`: bf16, held as int16), `norms`
    `[tokens]`, `out` `[group, tokens]`. A token's angles are what a query's products with the offset are multiplied by,
    as if they were the values of codes.
    """
    lanes = lanes_of(pairs)
    kind = Kind(functools.partial(_Angles, pairs, half, lanes), 2 * pairs, lanes, lambda rows: (4, 4), 1, 1)
    dots = by_rows(functools.partial(dots_of, kind))
    step, apart = (2, 1) if interleaved else (1, pairs)

    @compiled(OPTIONS, keep=True)
    def turned(query, offsets, angles, norms, length, out):
        group, dim = query.shape
        found = np.empty((group, TILE + 8), np.float32)
        products, rest = np.empty((group, 2 * pairs), np.float32), np.empty(group, np.float32)
        for block in range(offsets.shape[0]):
            offset, first = offsets[block], block * length
            for h in range(group):
                own, line = query[h], products[h]
                for p in range(pairs):
                    a, b = p * step, p * step + apart
                    line[p] = own[a] * offset[a] + own[b] * offset[b]
                    line[pairs + p] = own[b] * offset[a] - own[a] * offset[b]
                still = np.float32(0)
                for channel in range(2 * pairs, dim):
                    still += own[channel] * offset[channel]
                rest[h] = still
            for token in range(first, first + length, TILE):
                count = min(TILE, first + length - token)
                dots(products, angles, (products, products, products), token, count, found)
                near = norms[token : token + count]
                for h in range(group):
                    line, here = out[h, token : token + count], found[h]
                    for t in range(count):
                        line[t] += (here[t] + rest[h]) * near[t]

    return turned


@no_type_check
class _Angles(Step):
    """Cosines (argument 1) and, in the second half of the channels, sines (2) of some tokens."""

    def __init__(self, pairs, half, lanes, context, builder, signature, args):
        super().__init__(context, builder, signature, args, 8, lanes)
        self.pairs, self.half = pairs, half

    def values(self, first, start, tokens):
        """Angles of `tokens`, counted from token `first`, from channel `start` on."""
        array, channel = (1, start) if start < self.pairs else (2, start - self.pairs)
        rows = [self.within(array, self.builder.add(first, self.size(token))) for token in tokens]
        return [self._read(array, row, self.size(channel)) for row in rows]

    def _read(self, array, row, channel):
        if not self.half:
            return self.load(array, row, channel)
        kind, wide = (ir.VectorType(one, self.lanes) for one in (ir.IntType(16), INT))
        loaded = self.builder.load(self.pointer(array, kind, row, channel), typ=kind)
        loaded.align = 2
        upper = self.builder.shl(self.builder.zext(loaded, wide), ir.Constant(wide, [16] * self.lanes))
        return self.builder.bitcast(upper, self.vector)
