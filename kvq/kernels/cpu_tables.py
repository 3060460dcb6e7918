"""Loops of attention on codes that stand for entries of a table: Lloyd-Max levels and codebooks of 8 channels.

Levels are chosen by comparing bits, without a lookup: one half of the levels is the other's mirror image. A codebook's
entry is read for 8 channels at a time, its signs are flipped by a mask, and its shift is added (E8P). Neither is ever
written to memory. Steps take one, two or four rows (queries, or weights) at once, for which an entry is read once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvq.codecs.machine_code import compiled
from kvq.kernels.cpu_loops import by_rows
from kvq.kernels.cpu_vectors import INT, OPTIONS, TILE, Step, lanes_of, step_tokens

GROUP = 8
"""Channels of a codebook's entry."""
MOST_BITS = 4
"""Levels of more bits would take as many comparisons."""


@dataclass(frozen=True)
class Loops:
    """`scores(query, planes, tables, norms, out)` and `mix(weights, planes, tables, norms, out)`.

    `planes`: two arrays `[rows, columns]` (the second unused where there is one); `tables`: three arrays (levels: the
    same three times); `query` and `weights` `[group, dim]` and `[group, tokens]`; `norms` `[tokens]`.
    """

    scores: Callable[..., Any]
    mix: Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """How steps read a kind of codes.

    Attributes:
        make: the `Step` whose `values` are what codes stand for, from the arguments of an intrinsic.
        span, lanes: channels of a token, and of a vector.
        dot_tokens: tokens of a step of scores, and of those at once, for a number of rows.
        sum_tokens: tokens of a step of weighted sums.
        vectors: of a token that weighted sums take at once.
    """

    make: Callable[..., Any]
    span: int
    lanes: int
    dot_tokens: Callable[[int], tuple[int, int]]
    sum_tokens: int
    vectors: int


@functools.cache
def level_loops(dim: int, widths: tuple[int, ...]) -> Loops:
    """For symmetric levels whose codes have planes of `widths`; the table is the positive levels, ascending."""
    tokens = max(step_tokens(width) for width in widths)
    lanes = lanes_of(dim)
    return _loops(Kind(functools.partial(_Levels, widths, lanes), dim, lanes, lambda rows: (tokens, 4), tokens, 1))


@functools.cache
def book_loops(dim: int, signed: bool, shifted: bool) -> Loops:
    """Tables are 256 entries, and of the second plane's byte masks of signs (int32) and shifts, each `[256, 8]`."""
    vectors = 4 if dim // GROUP % 4 == 0 else 1
    make = functools.partial(_Book, signed, shifted)
    return _loops(Kind(make, dim, GROUP, lambda rows: (8 // rows, 8 // rows), 1, vectors))


@no_type_check
def _loops(kind):
    dots, sums = (by_rows(functools.partial(make, kind)) for make in (dots_of, _sums))

    @compiled(OPTIONS, keep=True)
    def scores(query, planes, tables, norms, out):
        rows, tokens = out.shape
        found = np.empty((rows, TILE + 8), np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            dots(query, planes, tables, token, count, found)
            near = norms[token : token + count]
            for h in range(rows):
                line, here = out[h, token : token + count], found[h]
                for t in range(count):
                    line[t] = here[t] * near[t]

    @compiled(OPTIONS, keep=True)
    def mix(weights, planes, tables, norms, out):
        rows, tokens = weights.shape
        near = np.zeros((rows, TILE + 8), np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            norm = norms[token : token + count]
            for h in range(rows):
                line, here = weights[h, token : token + count], near[h]
                here[count:] = 0
                for t in range(count):
                    here[t] = line[t] * norm[t]
            sums(near, planes, tables, token, count, out)

    return Loops(scores, mix)


@no_type_check
class _Levels(Step):
    """Decodes the codes of some tokens, 16 channels of each; planes are the arguments 1 and 2, levels argument 3."""

    def __init__(self, widths, lanes, context, builder, signature, args):
        super().__init__(context, builder, signature, args, widths[0], lanes)
        self.widths = widths
        half = 2 ** (sum(widths) - 1)
        self.levels = [self.splat(3, self.size(index)) for index in range(half)]

    def values(self, first, start, tokens):
        """Levels of `tokens` (within a step that begins at token `first`, on a byte) from channel `start` on."""
        wide, channel = ir.VectorType(INT, self.lanes), self.size(start)
        nothing, rows, out = ir.Constant(wide, [0] * self.lanes), {}, []
        for token in tokens:
            tests = []
            for plane, width in enumerate(self.widths):
                at = (plane, token * width // 8)
                if at not in rows:
                    start = self.builder.sdiv(self.builder.mul(first, self.size(width)), self.size(8))
                    rows[at] = self.bytes(1 + plane, self.builder.add(start, self.size(at[1])), channel)
                for bit in range(width):
                    mask = ir.Constant(wide, [1 << (token * width % 8 + bit)] * self.lanes)
                    tests.append(self.builder.icmp_unsigned("!=", self.builder.and_(rows[at], mask), nothing))
            out.append(self._level(tests))
        return out

    def _level(self, tests):
        """The level of a code from its bits, lowest first: the last is the sign, the others count from the middle."""
        *low, sign = tests
        values = list(self.levels)
        for bit in low:
            outward = self.builder.not_(self.builder.xor(bit, sign))
            values = [self.builder.select(outward, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
        return self.builder.select(sign, values[0], self.builder.fneg(values[0]))


@no_type_check
class _Book(Step):
    """Decodes 8 channels of a token; codes are the arguments 1 and 2, entries, masks and shifts 3 to 5."""

    def __init__(self, signed, shifted, context, builder, signature, args):
        super().__init__(context, builder, signature, args, 8, GROUP)
        self.signed, self.shifted = signed, shifted

    def values(self, first, start, tokens):
        """Entries of `tokens`, counted from token `first`, for the 8 channels from `start` on."""
        rows = [self.builder.add(first, self.size(token)) for token in tokens]
        if len(rows) > 1:  # of a step, which may go past the last token
            rows = [self.within(1, row) for row in rows]
        return [self._entry(row, self.size(start // GROUP)) for row in rows]

    def _entry(self, token, group):
        byte = self.byte(1, token, group)
        value = self.load(3, byte, self.size(0))
        if self.signed:
            other = self.byte(2, token, group)
            whole = ir.VectorType(INT, self.lanes)
            mask = self.builder.load(self.pointer(4, whole, other, self.size(0)), typ=whole)
            mask.align = 4
            value = self.builder.bitcast(self.builder.xor(self.builder.bitcast(value, whole), mask), self.vector)
            if self.shifted:
                value = self.builder.fadd(value, self.load(5, other, self.size(0)))
        return value


@no_type_check
def dots_of(kind, rows):
    """Products of `rows` queries with the values of `count` tokens from `first` on, into `found[query, token]`."""
    per_step, together = kind.dot_tokens(rows)

    def build(context, builder, signature, args):
        step = kind.make(context, builder, signature, args)
        first, token = args[6:8]
        for begin in range(0, per_step, together):
            totals = [step.zero() for _ in range(together * rows)]
            for start in range(0, kind.span, kind.lanes):
                values = step.values(first, start, range(begin, begin + together))
                step.add_dots(totals, rows, step.size(start), values)
            step.store_sums(totals, 8, together, builder.add(token, step.size(begin)))
        return context.get_dummy_value()

    @intrinsic
    def dot_step(typing_context, queries, plane0, plane1, table0, table1, table2, first, token, found):
        kinds = (queries, plane0, plane1, table0, table1, table2, types.intp, types.intp, found)
        return types.void(*kinds), build

    @numba.njit(nogil=True, inline="always")
    def all_steps(queries, planes, tables, first, count, found):
        for token in range(0, count, per_step):
            dot_step(queries, planes[0], planes[1], tables[0], tables[1], tables[2], first + token, token, found)

    return all_steps


@no_type_check
def _sums(kind, rows):
    """Add `Σ_t weights[row, t] · values_t` of `count` tokens from `first` on to `out[row]`."""

    def build(context, builder, signature, args):
        step = kind.make(context, builder, signature, args)
        first, count = args[6:8]
        for begin in range(0, kind.span, kind.vectors * kind.lanes):
            starts = range(begin, begin + kind.vectors * kind.lanes, kind.lanes)
            slots = [
                [cgutils.alloca_once_value(builder, step.load(8, step.size(r), step.size(start))) for start in starts]
                for r in range(rows)
            ]
            with step.steps(count, kind.sum_tokens) as token:
                at = builder.add(first, token)
                vectors = [step.values(at, start, range(kind.sum_tokens)) for start in starts]
                for r in range(rows):
                    for index in range(kind.sum_tokens):
                        weight = step.splat(0, step.size(r), builder.add(token, step.size(index)))
                        for values, slot in zip(vectors, slots[r], strict=True):
                            total = builder.load(slot, typ=step.vector)
                            builder.store(step.add_product(weight, values[index], total), slot)
            for r in range(rows):
                for start, slot in zip(starts, slots[r], strict=True):
                    step.store(builder.load(slot, typ=step.vector), 8, step.size(r), step.size(start))
        return context.get_dummy_value()

    @intrinsic
    def sum_steps(typing_context, weights, plane0, plane1, table0, table1, table2, first, count, out):
        kinds = (weights, plane0, plane1, table0, table1, table2, types.intp, types.intp, out)
        return types.void(*kinds), build

    @numba.njit(nogil=True, inline="always")
    def all_steps(weights, planes, tables, first, count, out):
        sum_steps(weights, planes[0], planes[1], tables[0], tables[1], tables[2], first, count, out)

    return all_steps
