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

    `planes`: two arrays `[rows, columns]` (the second unused where there is one); `tables`: of `Tables`; `query` and
    `weights` `[group, dim]` and `[group, tokens]`; `norms` `[tokens]`.
    """

    scores: Callable[..., Any]
    mix: Callable[..., Any]


@functools.cache
def level_loops(dim: int, widths: tuple[int, ...]) -> Loops:
    """For symmetric levels whose codes have planes of `widths`; tables are the positive levels, ascending, twice."""
    return _loops(dim, functools.partial(_level_dots, widths, dim), functools.partial(_level_sums, widths, dim))


@functools.cache
def book_loops(dim: int, signed: bool, shifted: bool) -> Loops:
    """Tables are 256 entries, and of the second plane's byte masks of signs (int32) and shifts, each `[256, 8]`."""
    settings = (dim // GROUP, signed, shifted)
    return _loops(dim, functools.partial(_book_dots, *settings), functools.partial(_book_sums, *settings))


@no_type_check
def _loops(dim, make_dots, make_sums):
    dots, sums = by_rows(make_dots), by_rows(make_sums)

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

    def begin(self, widths):
        self.widths = widths
        half = 2 ** (sum(widths) - 1)
        self.levels = [self.splat(3, self.size(index)) for index in range(half)]

    def decoded(self, first, channel, tokens):
        """Levels of `tokens` (within a step that begins at token `first`, on a byte) from `channel` on."""
        wide = ir.VectorType(INT, self.lanes)
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


@functools.cache
@no_type_check
def _level_dots(widths, span, rows):
    """Products of `rows` queries with the levels of `count` tokens from `first` on, into `found[query, token]`."""
    per_step = max(step_tokens(width) for width in widths)

    def build(context, builder, signature, args):
        step = _Levels(context, builder, signature, args, widths[0], lanes_of(span))
        step.begin(widths)
        first, token = args[4:6]
        for half in range(0, per_step, 4):
            totals = [step.zero() for _ in range(4 * rows)]
            for start in range(0, span, step.lanes):
                channel = step.size(start)
                step.add_dots(totals, rows, channel, step.decoded(first, channel, range(half, half + 4)))
            step.store_sums(totals, 6, 4, builder.add(token, step.size(half)))
        return context.get_dummy_value()

    @intrinsic
    def dot_step(typing_context, queries, plane0, plane1, levels, first, token, found):
        return types.void(queries, plane0, plane1, levels, types.intp, types.intp, found), build

    @numba.njit(nogil=True, inline="always")
    def all_steps(queries, planes, tables, first, count, found):
        for token in range(0, count, per_step):
            dot_step(queries, planes[0], planes[1], tables[0], first + token, token, found)

    return all_steps


@functools.cache
@no_type_check
def _level_sums(widths, span, rows):
    """Add `Σ_t weights[row, t] · levels_t` of `count` tokens from `first` on to `out[row]`."""
    per_step = max(step_tokens(width) for width in widths)

    def build(context, builder, signature, args):
        step = _Levels(context, builder, signature, args, widths[0], lanes_of(span))
        step.begin(widths)
        first, count = args[4:6]
        for start in range(0, span, step.lanes):
            at = step.size(start)
            slots = [cgutils.alloca_once_value(builder, step.load(6, step.size(r), at)) for r in range(rows)]
            with step.steps(count, per_step) as token:
                values = step.decoded(builder.add(first, token), at, range(per_step))
                for r, slot in enumerate(slots):
                    total = builder.load(slot, typ=step.vector)
                    for index, value in enumerate(values):
                        weight = step.splat(0, step.size(r), builder.add(token, step.size(index)))
                        total = step.add_product(weight, value, total)
                    builder.store(total, slot)
            for r, slot in enumerate(slots):
                step.store(builder.load(slot, typ=step.vector), 6, step.size(r), at)
        return context.get_dummy_value()

    @intrinsic
    def sum_steps(typing_context, weights, plane0, plane1, levels, first, count, out):
        return types.void(weights, plane0, plane1, levels, types.intp, types.intp, out), build

    @numba.njit(nogil=True, inline="always")
    def all_steps(weights, planes, tables, first, count, out):
        sum_steps(weights, planes[0], planes[1], tables[0], first, count, out)

    return all_steps


@no_type_check
class _Book(Step):
    """Decodes 8 channels of a token; codes are the arguments 1 and 2, entries, masks and shifts 3 to 5."""

    def entry(self, token, group, signed, shifted):
        byte = self.byte(1, token, group)
        value = self.load(3, byte, self.size(0))
        if signed:
            other = self.byte(2, token, group)
            whole = ir.VectorType(INT, self.lanes)
            mask = self.builder.load(self.pointer(4, whole, other, self.size(0)), typ=whole)
            mask.align = 4
            value = self.builder.bitcast(self.builder.xor(self.builder.bitcast(value, whole), mask), self.vector)
            if shifted:
                value = self.builder.fadd(value, self.load(5, other, self.size(0)))
        return value


@functools.cache
@no_type_check
def _book_dots(groups, signed, shifted, rows):
    """Products of `rows` queries with the entries of `count` tokens from `first` on, into `found[query, token]`."""
    per_step = 8 // rows

    def build(context, builder, signature, args):
        step = _Book(context, builder, signature, args, 8, GROUP)
        first, token = args[6:8]
        totals = [step.zero() for _ in range(per_step * rows)]
        places = [step.within(1, builder.add(first, step.size(index))) for index in range(per_step)]
        for group in range(groups):
            values = [step.entry(place, step.size(group), signed, shifted) for place in places]
            step.add_dots(totals, rows, step.size(GROUP * group), values)
        step.store_sums(totals, 8, per_step, token)
        return context.get_dummy_value()

    @intrinsic
    def dot_step(typing_context, queries, codes, signs, entries, masks, shifts, first, token, found):
        kinds = (queries, codes, signs, entries, masks, shifts, types.intp, types.intp, found)
        return types.void(*kinds), build

    @numba.njit(nogil=True, inline="always")
    def all_steps(queries, planes, tables, first, count, found):
        for token in range(0, count, per_step):
            dot_step(queries, planes[0], planes[1], tables[0], tables[1], tables[2], first + token, token, found)

    return all_steps


@functools.cache
@no_type_check
def _book_sums(groups, signed, shifted, rows):
    """Add `Σ_t weights[row, t] · entries_t` of `count` tokens from `first` on to `out[row]`."""
    together = 4 if groups % 4 == 0 else 1

    def build(context, builder, signature, args):
        step = _Book(context, builder, signature, args, 8, GROUP)
        first, count = args[6:8]
        for start in range(0, groups, together):
            ats = [step.size(GROUP * (start + part)) for part in range(together)]
            slots = [
                [cgutils.alloca_once_value(builder, step.load(8, step.size(r), at)) for at in ats] for r in range(rows)
            ]
            with step.steps(count, 1) as token:
                row = builder.add(first, token)
                values = [step.entry(row, step.size(start + part), signed, shifted) for part in range(together)]
                for r in range(rows):
                    weight = step.splat(0, step.size(r), token)
                    for value, slot in zip(values, slots[r], strict=True):
                        builder.store(step.add_product(weight, value, builder.load(slot, typ=step.vector)), slot)
            for r in range(rows):
                for at, slot in zip(ats, slots[r], strict=True):
                    step.store(builder.load(slot, typ=step.vector), 8, step.size(r), at)
        return context.get_dummy_value()

    @intrinsic
    def sum_steps(typing_context, weights, codes, signs, entries, masks, shifts, first, count, out):
        kinds = (weights, codes, signs, entries, masks, shifts, types.intp, types.intp, out)
        return types.void(*kinds), build

    @numba.njit(nogil=True, inline="always")
    def all_steps(weights, planes, tables, first, count, out):
        sum_steps(weights, planes[0], planes[1], tables[0], tables[1], tables[2], first, count, out)

    return all_steps
