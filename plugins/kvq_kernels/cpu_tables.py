"""Loops of attention on codes that stand for entries of a table: Lloyd-Max levels and codebooks of 8 channels.

And on tokens in full precision, whose numbers stand for themselves.

Levels are chosen by comparing bits, without a lookup: one half of the levels is the other's mirror image. With AVX-512
a vector of levels is permuted by codes. A codebook's entries are read 8 channels at a time, two of them in a
vector with AVX-512; their signs are flipped by a mask, and a shift is added (E8P). Neither is ever written to memory.
Steps take one, two or four rows (queries, or weights) at once, for which an entry is read once.
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

from kvq_kernels.cpu_loops import loop_over_rows
from kvq_kernels.cpu_vectors import OPTIONS, TILE, Step, has_feature, head_plane, lanes_of, step_tokens

GROUP = 8
"""Channels of a codebook's entry."""
MOST_BITS = 4
"""Levels of more bits would take as many comparisons."""


@dataclass(frozen=True)
class Loops:
    """`scores(queries, planes, places, tables, norms, start, tokens, out)` of some heads and, with weights, `mix`.

    `planes`: flat, two of them are read (the same one where there is one), `places` as `head_plane` has them; `tables`:
    three arrays (levels: the same three times); `queries` `[heads, group, dim]`, `norms` `[heads or 1, all tokens]`,
    weights and `out` of scores `[heads, group, all tokens]`.
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
    """Loops for codes of symmetric levels, in planes of `widths` bits; the table is the positive levels, ascending."""
    tokens = max(step_tokens(width) for width in widths)
    lanes = lanes_of(dim)
    return _compile_loops(
        Kind(functools.partial(_Levels, widths, lanes), dim, lanes, lambda rows: (tokens, 4), tokens, 1)
    )


@functools.cache
def book_loops(dim: int, signed: bool, shifted: bool) -> Loops:
    """Loops for a codebook of 8 channels: tables `[256, 8]` of entries, and by second byte of signs and shifts."""
    lanes = 2 * GROUP if has_feature("avx512f") and not shifted and dim % (2 * GROUP) == 0 else GROUP
    vectors = 4 if dim // lanes % 4 == 0 else 1
    make = functools.partial(_BookEntries, signed, shifted, lanes)
    return _compile_loops(Kind(make, dim, lanes, lambda rows: (8 // rows, 8 // rows), 1, vectors))


@functools.cache
def number_loops(dim: int, half: bool) -> Loops:
    """Loops for states in full precision, in the first two planes: fp32, or (`half`) bf16 held as int16; no tables."""
    lanes = lanes_of(dim)
    vectors = 4 if dim // lanes % 4 == 0 else 1
    make = functools.partial(Numbers, dim, half, lanes)
    return _compile_loops(Kind(make, dim, lanes, lambda rows: (8, 8 // rows), 1, vectors))


@no_type_check
def _compile_loops(kind):
    dots, sums = (loop_over_rows(functools.partial(make, kind)) for make in (dots_step, _sums_step))

    @numba.njit(**OPTIONS)
    def scores(query, planes, tables, norms, start, tokens, out):
        rows = out.shape[0]
        found = np.empty((rows, TILE + 8), np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            dots(query, planes, tables, token, count, found)
            near = norms[start + token : start + token + count]
            for h in range(rows):
                line, here = out[h, start + token : start + token + count], found[h]
                for t in range(count):
                    line[t] = here[t] * near[t]

    @numba.njit(**OPTIONS)
    def mix(weights, planes, tables, norms, start, tokens, out):
        rows = weights.shape[0]
        near = np.zeros((rows, TILE + 8), np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            norm = norms[start + token : start + token + count]
            for h in range(rows):
                line, here = weights[h, start + token : start + token + count], near[h]
                here[count:] = 0
                for t in range(count):
                    here[t] = line[t] * norm[t]
            sums(near, planes, tables, token, count, out)

    return Loops(_loop_over_heads(scores), _loop_over_heads(mix))


@no_type_check
def _loop_over_heads(loop):
    """A loop over heads: `rows`, `out` and `norms` (one row, or one per head) by head, `planes` by `head_plane`."""

    @numba.njit(**OPTIONS)
    def all_heads(rows, planes, places, tables, norms, start, tokens, out):
        for h in range(rows.shape[0]):
            own = head_plane(planes, places, 0, h), head_plane(planes, places, 1, h)
            loop(rows[h], own, tables, norms[min(h, len(norms) - 1)], start, tokens, out[h])

    return all_heads


@no_type_check
class _Levels(Step):
    """Decodes the codes of some tokens, 16 channels of each; planes are the arguments 1 and 2, levels argument 3."""

    def __init__(self, widths, lanes, context, builder, signature, args):
        super().__init__(context, builder, signature, args, widths[0], lanes)
        self.widths, half = widths, 2 ** (sum(widths) - 1)
        self.permuted = lanes == 16 and half <= 8 and has_feature("avx512f")
        if self.permuted:  # every index of four bits has a level, that of its lowest bits
            upper = self.load_lanes(3, half, self.index(0))
            both = [*range(2 * half - 1, half - 1, -1), *range(half)]
            self.levels = self.shuffle(upper, builder.fneg(upper), both * (lanes // (2 * half)))
        else:
            self.levels = [self.splat(3, self.index(index)) for index in range(half)]

    def values(self, first, start, tokens):
        """Levels of `tokens` (within a step that begins at token `first`, on a byte) from channel `start` on."""
        if self.permuted:
            return self._permute_levels(first, self.index(start), tokens)
        nothing, out = self.all_lanes(0), []
        rows: dict[tuple[int, int], Any] = {}
        for token in tokens:
            tests = []
            for plane, width in enumerate(self.widths):
                held = self._load_codes(rows, first, plane, token, self.index(start))
                for bit in range(width):
                    mask = self.all_lanes(1 << (token * width % 8 + bit))
                    tests.append(self.builder.icmp_unsigned("!=", self.builder.and_(held, mask), nothing))
            out.append(self._select_level(tests))
        return out

    def _load_codes(self, rows, first, plane, token, channel):
        """The bytes of a plane that hold codes of a token, read once; `rows`: those that were read."""
        width = self.widths[plane]
        at = (plane, token * width // 8)
        if at not in rows:
            row = self.builder.sdiv(self.builder.mul(first, self.index(width)), self.index(8))
            rows[at] = self.bytes(1 + plane, self.builder.add(row, self.index(at[1])), channel)
        return rows[at]

    def _permute_levels(self, first, channel, tokens):
        """Levels of `tokens` by a permutation of the vector of levels with the codes (AVX-512)."""
        rows: dict[tuple[int, int], Any] = {}
        out = []
        for token in tokens:
            code, places = None, 0
            for plane, width in enumerate(self.widths):
                held = self._load_codes(rows, first, plane, token, channel)
                part = self.builder.lshr(held, self.all_lanes(token * width % 8))
                if len(self.widths) > 1:
                    part = self.builder.and_(part, self.all_lanes(2**width - 1))
                code = part if code is None else self.builder.or_(code, self.builder.shl(part, self.all_lanes(places)))
                places += width
            out.append(self.call("llvm.x86.avx512.permvar.sf.512", self.vector, self.levels, code))
        return out

    def _select_level(self, tests):
        """The level of a code from its bits, lowest first: the last is the sign, the others count from the middle."""
        *low, sign = tests
        values = list(self.levels)
        for bit in low:
            outward = self.builder.not_(self.builder.xor(bit, sign))
            values = [self.builder.select(outward, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
        return self.builder.select(sign, values[0], self.builder.fneg(values[0]))


@no_type_check
class _BookEntries(Step):
    """Decodes one or two entries of a token; codes are the arguments 1 and 2, entries, masks and shifts 3 to 5."""

    def __init__(self, signed, shifted, lanes, context, builder, signature, args):
        super().__init__(context, builder, signature, args, 8, lanes)
        self.signed, self.shifted = signed, shifted

    def values(self, first, start, tokens):
        """Entries of `tokens`, counted from token `first`, for the channels of a vector from `start` on."""
        rows = [self.builder.add(first, self.index(token)) for token in tokens]
        if len(rows) > 1:  # of a step, which may go past the last token
            rows = [self.clamp_row(1, row) for row in rows]
        return [self._entry_vector(row, start // GROUP) for row in rows]

    def _entry_vector(self, token, group):
        """The decoded entry of a token from group `group` of 8 channels on, or two of them in a vector of 16 lanes."""
        if self.lanes == GROUP:
            return self._entry(token, self.index(group))
        one, two = (self._part(3, self.byte(1, token, self.index(group + half))) for half in range(2))
        value = self.shuffle(one, two, list(range(self.lanes)))
        if not self.signed:
            return value
        kind = ir.IntType(self.lanes)
        bits = self.builder.load(self.pointer(2, kind, token, self.index(group)), typ=kind)
        bits.align = 1
        negative = self.builder.bitcast(bits, ir.VectorType(ir.IntType(1), self.lanes))
        return self.builder.select(negative, self.builder.fneg(value), value)

    def _entry(self, token, group):
        """The decoded entry of one group of 8 channels: looked up, signs flipped, shifted."""
        value = self._part(3, self.byte(1, token, group))
        if self.signed:
            other = self.byte(2, token, group)
            mask = self.builder.load(self.pointer(4, self.ints, other, self.index(0)), typ=self.ints)
            mask.align = 4
            value = self.builder.bitcast(self.builder.xor(self.builder.bitcast(value, self.ints), mask), self.vector)
            if self.shifted:
                value = self.builder.fadd(value, self.load(5, other, self.index(0)))
        return value

    def _part(self, array, row):
        return self.load_lanes(array, GROUP, row, self.index(0))


@no_type_check
class Numbers(Step):
    """Rows of numbers of two arrays, the arguments 1 and 2: the second has the channels from `span` on."""

    def __init__(self, span, half, lanes, context, builder, signature, args):
        super().__init__(context, builder, signature, args, 8, lanes)
        self.span, self.half = span, half

    def values(self, first, start, tokens):
        """Numbers of `tokens`, counted from token `first`, from channel `start` on."""
        array, channel = (1, start) if start < self.span else (2, start - self.span)
        rows = [self.clamp_row(array, self.builder.add(first, self.index(token))) for token in tokens]
        return [self._read(array, row, self.index(channel)) for row in rows]

    def _read(self, array, row, channel):
        if not self.half:
            return self.load(array, row, channel)
        kind = ir.VectorType(ir.IntType(16), self.lanes)
        loaded = self.builder.load(self.pointer(array, kind, row, channel), typ=kind)
        loaded.align = 2
        upper = self.builder.shl(self.builder.zext(loaded, self.ints), self.all_lanes(16))
        return self.builder.bitcast(upper, self.vector)


@no_type_check
def dots_step(kind, rows):
    """Products of `rows` queries with the values of `count` tokens from `first` on, into `found[query, token]`."""
    per_step, together = kind.dot_tokens(rows)

    def build(context, builder, signature, args):
        step = kind.make(context, builder, signature, args)
        first, token = args[6:8]
        for begin in range(0, per_step, together):
            totals = [step.zero() for _ in range(together * rows)]
            for start in range(0, kind.span, kind.lanes):
                values = step.values(first, start, range(begin, begin + together))
                step.add_dots(totals, rows, step.index(start), values)
            step.store_sums(totals, 8, together, builder.add(token, step.index(begin)))
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
def _sums_step(kind, rows):
    """Add `Σ_t weights[row, t] · values_t` of `count` tokens from `first` on to `out[row]`; `kind`: how to decode."""

    def build(context, builder, signature, args):
        step = kind.make(context, builder, signature, args)
        first, count = args[6:8]
        for begin in range(0, kind.span, kind.vectors * kind.lanes):
            starts = range(begin, begin + kind.vectors * kind.lanes, kind.lanes)
            slots = [
                [cgutils.alloca_once_value(builder, step.load(8, step.index(r), step.index(start))) for start in starts]
                for r in range(rows)
            ]
            with step.steps(count, kind.sum_tokens) as token:
                at = builder.add(first, token)
                vectors = [step.values(at, start, range(kind.sum_tokens)) for start in starts]
                for r in range(rows):
                    for index in range(kind.sum_tokens):
                        weight = step.splat(0, step.index(r), builder.add(token, step.index(index)))
                        for values, slot in zip(vectors, slots[r], strict=True):
                            total = builder.load(slot, typ=step.vector)
                            builder.store(step.add_product(weight, values[index], total), slot)
            for r in range(rows):
                for start, slot in zip(starts, slots[r], strict=True):
                    step.store(builder.load(slot, typ=step.vector), 8, step.index(r), step.index(start))
        return context.get_dummy_value()

    @intrinsic
    def sum_steps(typing_context, weights, plane0, plane1, table0, table1, table2, first, count, out):
        kinds = (weights, plane0, plane1, table0, table1, table2, types.intp, types.intp, out)
        return types.void(*kinds), build

    @numba.njit(nogil=True, inline="always")
    def all_steps(weights, planes, tables, first, count, out):
        sum_steps(weights, planes[0], planes[1], tables[0], tables[1], tables[2], first, count, out)

    return all_steps
