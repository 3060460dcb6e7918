"""Products of codes in integers: the steps of `cpu_vectors` on a processor that adds four products of bytes at once.

Queries and weights become 16-bit integers of one unit per row, each held as two signed bytes, `256 high + low`: a
product with codes takes two of AVX-512's `vpdpbusd` and is exact but for that rounding, at most a 65,000th of the row's
largest number. A 16-bit query is less exact, so these steps serve 16-bit queries.
"""

from __future__ import annotations

import functools
from typing import no_type_check

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvq_kernels.cpu_vectors import BYTE, FLOAT, INT, LANES, TILE, Step, has, step_tokens, steps_of

LARGEST = 32639
"""Largest magnitude whose upper byte, after rounding, is a signed byte."""
MOST_CHANNELS = 256
"""The sum of more products of a code (up to 255) with such a number may leave 32 bits."""
LEAST = 1e-30
"""Rows of smaller numbers are taken as zeros."""
ROUND = 1.5 * 2.0**23
"""Added to an fp32 number below `2**22`, it rounds the number to an integer."""


def fits(*spans: int) -> bool:
    """Whether these steps read groups of so many channels on this processor."""
    return has("avx512vnni") and all(span % 32 == 0 and span <= MOST_CHANNELS for span in spans)


def words(count: int) -> int:
    """Numbers of fp32 in a row of `digits`: the unit, then two bytes for each of `count`."""
    return 1 + count // 2


@no_type_check
class _Integers(Step):
    """A step on `lanes` 32-bit sums of four products each."""

    def __init__(self, context, builder, signature, args, width, lanes):
        super().__init__(context, builder, signature, args, width, lanes)
        self.narrow = ir.VectorType(BYTE, lanes)

    def read(self, array, kind, *index):
        loaded = self.builder.load(self.pointer(array, kind, *index), typ=kind)
        loaded.align = 1
        return loaded

    def add_fours(self, total, codes, numbers):
        """Add to each sum the products of four codes with four signed bytes."""
        return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.ints, total, codes, numbers)

    def whole(self, number):
        return ir.Constant(self.vector, [number] * self.lanes)

    def nothing(self):
        return self.all_lanes(0)

    def digit(self, row, place):
        """The four bytes of a row of `digits` at the 32-bit word `place`, for each lane."""
        at = self.builder.add(self.size(1), place)
        return self.spread(self.read(0, INT, self.size(row), at))

    def unit(self, row):
        return self.splat(0, self.size(row), self.size(0))


@functools.cache
@no_type_check
def digits(count: int, width: int | None, factor: float):
    """A step that rounds one row of `[rows, count]` fp32 numbers: `(numbers, row, top, ready)`.

    No magnitude is above `top`. `ready[row]` becomes the unit times `factor`, then the upper bytes, then the lower
    ones: in their own order, or (`width`) in that in which `sums` reads codes of this width, four rows of bytes at a
    time.
    """
    places, together = (1, 4) if width is None else (8 // width, 32 // width)
    lanes = max(LANES, together)
    starts = [start + place for start in range(0, lanes, together) for place in range(places)]
    order = [start + places * row for start in starts for row in range(4)]

    def build(context, builder, signature, args):
        step = _Integers(context, builder, signature, args, 8, lanes)
        _, row, top, _ = args
        top = builder.select(builder.fcmp_ordered(">", top, FLOAT(LEAST)), top, FLOAT(LEAST))
        steps = step.spread(builder.fdiv(FLOAT(LARGEST), top))
        for start in range(0, count, lanes):
            number = step.load(0, row, step.size(start))
            # The sum's lowest bits are the rounded number in two's complement
            bits = builder.bitcast(step.add_product(number, steps, step.whole(ROUND)), step.ints)
            if places > 1:
                bits = step.shuffled(bits, bits, order)
            upper = builder.lshr(builder.add(bits, step.all_lanes(128)), step.all_lanes(8))
            for part, place in ((upper, start), (bits, count + start)):
                at = step.pointer(3, step.narrow, row, step.size(1 + place // 4))
                builder.store(builder.trunc(part, step.narrow), at).align = 1
        builder.store(builder.fmul(top, FLOAT(factor / LARGEST)), step.pointer(3, FLOAT, row, step.size(0)))
        return context.get_dummy_value()

    @intrinsic
    def round_row(typing_context, numbers, row, top, ready):
        return types.void(numbers, types.intp, types.float32, ready), build

    return round_row


@no_type_check
def _codes_in_place(step, row, channel, tokens):
    """Masked codes of tokens, from the first of byte row `row` on, in lanes of four channels."""
    rows, out = {}, []
    for token in tokens:
        offset, place = divmod(token * step.width, 8)
        if offset not in rows:
            rows[offset] = step.read(1, step.ints, step.within(1, step.builder.add(row, step.size(offset))), channel)
        mask = (((1 << step.width) - 1) << place) * 0x01010101
        out.append(step.builder.and_(rows[offset], step.all_lanes(mask)))
    return out


@functools.cache
@no_type_check
def dots(width: int, span: int, rows: int):
    """As `cpu_vectors.dots`, the queries being rows of `digits`."""
    lanes = 16 if span % 64 == 0 else 8

    def build(context, builder, signature, args):
        step = _Integers(context, builder, signature, args, width, lanes)
        row, channel, token = args[2], args[3], args[5]
        starts = range(0, span, 4 * lanes)
        for half in range(0, step_tokens(width), 4):
            codes = [
                _codes_in_place(step, row, builder.add(channel, step.size(start)), range(half, half + 4))
                for start in starts
            ]
            totals = [step.nothing()] * (4 * rows)
            for digit in (0, span):
                if digit:
                    totals = [builder.shl(total, step.all_lanes(8)) for total in totals]
                for start, vectors in zip(starts, codes, strict=True):
                    for query in range(rows):
                        number = step.read(0, step.ints, step.size(query), step.size(1 + (digit + start) // 4))
                        for index, vector in enumerate(vectors, 4 * query):
                            totals[index] = step.add_fours(totals[index], vector, number)
            units = [step.unit(query) for query in range(rows)]
            step.store_sums(totals, 4, 4, builder.add(token, step.size(half)), units)
        return context.get_dummy_value()

    return steps_of(width, build)


@no_type_check
def _transposed(step, row, channel):
    """Four rows of bytes from `row` on, the four of a channel in one lane."""
    four = [
        step.read(1, step.narrow, step.within(1, step.builder.add(row, step.size(index))), channel)
        for index in range(4)
    ]
    halves = [step.shuffled(one, two, list(range(2 * LANES))) for one, two in (four[:2], four[2:])]
    places = [LANES * index + lane for lane in range(LANES) for index in range(4)]
    return step.builder.bitcast(step.shuffled(*halves, places), step.ints)


@functools.cache
@no_type_check
def sums(width: int, span: int, rows: int):
    """As `cpu_vectors.sums`, the weights being rows of `digits` for this width; `32 / width` tokens at a time."""
    places = 8 // width

    def build(context, builder, signature, args):
        step = _Integers(context, builder, signature, args, width, LANES)
        _, _, channel, first, count, _ = args
        ones = step.all_lanes(((1 << width) - 1) * 0x01010101)
        for start in range(0, span, LANES):
            at = builder.add(channel, step.size(start))
            slots = [cgutils.alloca_once_value(builder, step.nothing()) for _ in range(2 * rows)]
            with step.steps(count, 4 * places) as token:
                row = builder.sdiv(builder.mul(builder.add(first, token), step.size(width)), step.size(8))
                quads, quad = _transposed(step, row, at), builder.sdiv(token, step.size(4))
                for place in range(places):
                    moved = builder.lshr(quads, step.all_lanes(place * width)) if place else quads
                    codes = builder.and_(moved, ones)
                    for index, slot in enumerate(slots):
                        r, digit = divmod(index, 2)
                        number = step.digit(r, builder.add(quad, step.size(digit * TILE // 4 + place)))
                        builder.store(step.add_fours(builder.load(slot, typ=step.ints), codes, number), slot)
            for r in range(rows):
                upper, lower = (builder.load(slot, typ=step.ints) for slot in slots[2 * r : 2 * r + 2])
                total = builder.sitofp(builder.add(builder.shl(upper, step.all_lanes(8)), lower), step.vector)
                step.store(step.add_product(step.unit(r), total, step.load(5, step.size(r), at)), 5, step.size(r), at)
        return context.get_dummy_value()

    @intrinsic
    def all_steps(typing_context, weights, plane, channel, first, count, out):
        return types.void(weights, plane, types.intp, types.intp, types.intp, out), build

    return all_steps
