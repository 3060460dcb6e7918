"""LLVM vector instructions for the inner steps of `cpu_loops`, which LLVM does not vectorize by itself.

A step takes some rows (queries, or weights) and the bytes of one plane. A code is not shifted to the low end of its
byte: masked in place it is `2^k` times its value, and the factor of its token divides by `2^k` (`factors`). Vectors
have 16 lanes, or fewer where a group has fewer channels; a machine with narrower vectors uses several instructions.
Below them, loops over rows of numbers: the numerators of a softmax.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, no_type_check

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

OPTIONS = {"nogil": True, "fastmath": True, "error_model": "numpy", "boundscheck": False}
LANES = 16
TILE = 128
"""Tokens whose scores or weights are scaled together; a multiple of 32."""
FLOAT, BYTE, INT = ir.FloatType(), ir.IntType(8), ir.IntType(32)


def factors(widths: tuple[int, ...], index: int, tokens: int) -> Any:
    """The factors that turn masked codes of plane `index` into values, for `tokens` tokens from the start of a byte."""
    places = np.arange(tokens) % (8 // widths[index]) * widths[index]
    return (2.0 ** (sum(widths[:index]) - places)).astype(np.float32)


def lanes_of(span: int) -> int:
    """Lanes of a vector that divide `span` channels."""
    return math.gcd(span, LANES)


@functools.cache
def has_feature(feature: str) -> bool:
    """Whether this processor has a set of instructions, by LLVM's name of it."""
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


def step_tokens(width: int) -> int:
    """Tokens of a step: whole bytes, at least four."""
    return max(4, 8 // width)


@no_type_check
class Step:
    """Emits the LLVM code of one intrinsic: pointers to its array arguments, loads of codes, arithmetic on vectors."""

    def __init__(self, context, builder, signature, args, width, lanes):
        self.context, self.builder, self.width, self.lanes = context, builder, width, lanes
        self.vector, self.ints = ir.VectorType(FLOAT, lanes), ir.VectorType(INT, lanes)
        self.arrays = [
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else None
            for kind, value in zip(signature.args, args, strict=True)
        ]

    def index(self, value):
        """A Python int as an LLVM constant of numba's index type."""
        return ir.Constant(self.context.get_value_type(types.intp), value)

    def pointer(self, array, kind, *index):
        """To the element at `index` of one of the arrays, whose last axis is contiguous."""
        held, at = self.arrays[array], None
        for place, stride in zip(index, cgutils.unpack_tuple(self.builder, held.strides), strict=True):
            step = self.builder.mul(place, stride)
            at = step if at is None else self.builder.add(at, step)
        return cgutils.pointer_add(self.builder, held.data, at, kind.as_pointer())

    def load(self, array, *index):
        return self.load_lanes(array, self.lanes, *index)

    def load_lanes(self, array, lanes, *index):
        """A vector of `lanes` numbers."""
        kind = ir.VectorType(FLOAT, lanes)
        loaded = self.builder.load(self.pointer(array, kind, *index), typ=kind)
        loaded.align = 4
        return loaded

    def clamp_row(self, array, row):
        """The row; past the last one of the array, that is read again: its weight is zero or its score is dropped."""
        last = self.builder.sub(cgutils.unpack_tuple(self.builder, self.arrays[array].shape)[0], self.index(1))
        return self.builder.select(self.builder.icmp_signed("<", row, last), row, last)

    def bytes(self, plane, row, channel):
        """`lanes` bytes of a row, as integers of 32 bits."""
        kind = ir.VectorType(BYTE, self.lanes)
        loaded = self.builder.load(self.pointer(plane, kind, self.clamp_row(plane, row), channel), typ=kind)
        loaded.align = 1
        return self.builder.zext(loaded, self.ints)

    def byte(self, plane, *index):
        """One byte, as an index."""
        loaded = self.builder.load(self.pointer(plane, BYTE, *index), typ=BYTE)
        return self.builder.zext(loaded, self.context.get_value_type(types.intp))

    def codes(self, plane, row, channel, tokens):
        """Masked codes of consecutive tokens from the first of byte row `row` on, as vectors of `lanes` channels."""
        rows, out = {}, []
        for token in tokens:
            offset = token * self.width // 8
            if offset not in rows:
                rows[offset] = self.bytes(plane, self.builder.add(row, self.index(offset)), channel)
            mask = ((1 << self.width) - 1) << (token * self.width % 8)
            masked = self.builder.and_(rows[offset], self.all_lanes(mask))
            out.append(self.builder.sitofp(masked, self.vector))
        return out

    def add_product(self, one, two, total):
        return self.call(f"llvm.fmuladd.v{self.lanes}f32", self.vector, one, two, total)

    def call(self, name, result, *operands):
        """An instruction by LLVM's name of it."""
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), operands)

    def all_lanes(self, number):
        """An integer in all lanes."""
        return ir.Constant(self.ints, [number] * self.lanes)

    def zero(self):
        return ir.Constant(self.vector, [0.0] * self.lanes)

    def splat(self, array, *index):
        """One number of an array in all lanes."""
        return self.spread(self.builder.load(self.pointer(array, FLOAT, *index), typ=FLOAT))

    def spread(self, number):
        """A number in all lanes."""
        one = self.builder.insert_element(
            ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined), number, INT(0)
        )
        return self.shuffle(one, one, [0] * self.lanes)

    def lane_sums(self, vectors):
        """The sum over the lanes of each vector, in order, in the lanes of as few as hold them."""
        for _ in range(self.lanes.bit_length() - 1):
            pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
            vectors = [
                self.builder.fadd(*(self._every_other(one, two, start) for start in (0, 1))) for one, two in pairs
            ]
        return vectors

    def add_dots(self, totals, rows, channel, values):
        """Add the products of `rows` queries, from `channel` on, with one vector of each token to their totals."""
        for row in range(rows):
            query = self.load(0, self.index(row), channel)
            for index, value in enumerate(values):
                place = len(values) * row + index
                totals[place] = self.add_product(query, value, totals[place])

    def store_sums(self, totals, array, tokens, token):
        """Sums over lanes of `totals`, `tokens` for each row, into `array[row, token ...]`."""
        sums = self.lane_sums(totals)
        kind = ir.VectorType(FLOAT, min(tokens, self.lanes))
        for place in range(0, len(totals), kind.count):
            lanes = list(range(place % self.lanes, place % self.lanes + kind.count))
            part = self.shuffle(sums[place // self.lanes], sums[place // self.lanes], lanes)
            at = self.builder.add(token, self.index(place % tokens))
            self.builder.store(part, self.pointer(array, kind, self.index(place // tokens), at)).align = 4

    def shuffle(self, one, two, places):
        return self.builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(INT, len(places)), places))

    def store(self, vector, array, *index):
        self.builder.store(vector, self.pointer(array, self.vector, *index)).align = 4

    @contextlib.contextmanager
    def steps(self, count, tokens):
        """A loop over `count` tokens, `tokens` at a time; gives the first of each step."""
        number = self.builder.sdiv(self.builder.add(count, self.index(tokens - 1)), self.index(tokens))
        with cgutils.for_range(self.builder, number, intp=number.type) as loop:
            yield self.builder.mul(loop.index, self.index(tokens))

    def _every_other(self, one, two, start):
        return self.shuffle(one, two, list(range(start, 2 * self.lanes, 2)))


@no_type_check
def loop_over_steps(width, build):
    """The loop `(queries, plane, channel, first, count, found)` over the steps of scores that `build` emits."""

    @intrinsic
    def dot_step(typing_context, queries, plane, row, channel, found, token):
        return types.void(queries, plane, types.intp, types.intp, found, types.intp), build

    @numba.njit(nogil=True, inline="always")
    def all_dots(queries, plane, channel, first, count, found):
        """`found[query, token]` become the products of queries with the codes of `count` tokens from `first` on."""
        for token in range(0, count, per_step):
            dot_step(queries, plane, (first + token) * width // 8, channel, found, token)

    per_step = step_tokens(width)
    return all_dots


@functools.cache
@no_type_check
def dots(width: int, span: int, rows: int):
    """A step of scores: `(queries, plane, row, channel, found, token)` of `rows` queries and a step's tokens.

    `found[query, token ...]` become the products of `span` channels of a query with as many of the plane, from
    `channel` on; `row` is that of the bytes.
    """

    def build(context, builder, signature, args):
        step = Step(context, builder, signature, args, width, lanes_of(span))
        _, _, row, channel, _, token = args
        for half in range(0, step_tokens(width), 4):
            totals = [step.zero() for _ in range(4 * rows)]
            for start in range(0, span, step.lanes):
                at = builder.add(channel, step.index(start))
                step.add_dots(totals, rows, step.index(start), step.codes(1, row, at, range(half, half + 4)))
            step.store_sums(totals, 4, 4, builder.add(token, step.index(half)))
        return context.get_dummy_value()

    return loop_over_steps(width, build)


@functools.cache
@no_type_check
def sums(width: int, span: int, rows: int):
    """Weighted sums: `(weights, plane, channel, first, count, out)`, the channels of `out` from `channel` on.

    `weights[row, token]` are those of tokens `first` to `first + count`, by the factors of masked codes, then zeros.
    """
    together = 2 if span % (2 * lanes_of(span)) == 0 else 1

    def build(context, builder, signature, args):
        step = Step(context, builder, signature, args, width, lanes_of(span))
        _, _, channel, first, count, _ = args
        tokens = step_tokens(width)
        for start in range(0, span, together * step.lanes):
            ats = [builder.add(channel, step.index(start + part * step.lanes)) for part in range(together)]
            totals = [
                [cgutils.alloca_once_value(builder, step.load(5, step.index(r), at)) for at in ats] for r in range(rows)
            ]
            with step.steps(count, tokens) as token:
                row = builder.sdiv(builder.mul(builder.add(first, token), step.index(width)), step.index(8))
                codes = [step.codes(1, row, at, range(tokens)) for at in ats]
                for r in range(rows):
                    for index in range(tokens):
                        weight = step.splat(0, step.index(r), builder.add(token, step.index(index)))
                        for part in range(together):
                            slot = totals[r][part]
                            total = builder.load(slot, typ=step.vector)
                            builder.store(step.add_product(weight, codes[part][index], total), slot)
            for r in range(rows):
                for at, slot in zip(ats, totals[r], strict=True):
                    step.store(builder.load(slot, typ=step.vector), 5, step.index(r), at)
        return context.get_dummy_value()

    @intrinsic
    def all_steps(typing_context, weights, plane, channel, first, count, out):
        return types.void(weights, plane, types.intp, types.intp, types.intp, out), build

    return all_steps


@functools.cache
@no_type_check
def statistics(groups: int, low: str, top: int, lanes: int):
    """A step that reads the statistics of `lanes` tokens (or channels): `(scale, low, start, floats, place)`.

    `scale` is fp16 and `low` fp16 (`float`) or int16 (`integer`), both held as int16, flat, `groups` of each token from
    `start` on; `floats[:, group, place ...]` become its steps and lowest values in fp32, as `cpu_loops.Grid` has them.
    """

    def build(context, builder, signature, args):
        step = Step(context, builder, signature, args, 8, lanes)
        start, place = args[2], args[4]
        half = ir.VectorType(ir.HalfType(), lanes * groups)

        def read(array, kind):
            loaded = builder.load(step.pointer(array, kind, start), typ=kind)
            loaded.align = 2
            return loaded

        def lanes_of(loaded, group):
            """The number of one group from each token: every `groups`-th lane of `loaded` from `group` on."""
            return step.shuffle(loaded, loaded, list(range(group, lanes * groups, groups)))

        scales = read(0, half)
        lows = read(1, half if low == "float" else ir.VectorType(ir.IntType(16), lanes * groups))
        for group in range(groups):
            scale = builder.fpext(lanes_of(scales, group), step.vector)
            if low == "float":
                least = builder.fpext(lanes_of(lows, group), step.vector)
            elif low == "integer":
                least = builder.fneg(builder.fmul(scale, builder.sitofp(lanes_of(lows, group), step.vector)))
            else:
                least = builder.fmul(scale, ir.Constant(step.vector, [-float(top)] * lanes))
            for kind, values in enumerate((scale, least)):
                step.store(values, 3, step.index(kind), step.index(group), place)
        return context.get_dummy_value()

    @intrinsic
    def read_step(typing_context, scale, low, start, floats, place):
        return types.void(scale, low, types.intp, floats, types.intp), build

    return read_step


_EXP2 = (1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477)
_EXP2_HIGH = (0.0013333558146428443, 0.00015403530393381608)


@numba.njit(**OPTIONS)
@no_type_check
def highest(numbers):
    """The highest number: bits of floats, with those of a negative one inverted, are ordered as integers are.

    A maximum of integers is vectorized, one of floats is not.
    """
    bits, rest = numbers.view(np.int32), np.int32(0x7FFFFFFF)
    top = np.full(1, -rest, np.int32)
    most = top[0]
    for i in range(bits.shape[0]):
        most = max(most, bits[i] ^ ((bits[i] >> np.int32(31)) & rest))
    top[0] = most ^ ((most >> np.int32(31)) & rest)
    return top.view(np.float32)[0]


@numba.njit(**OPTIONS)
@no_type_check
def softmax_weights(scores, first):
    """Softmax numerators in place, `exp(score - max)`, zero before token `first`; the sum of each row."""
    rows, tokens = scores.shape
    totals = np.zeros(rows, np.float32)
    ints = np.empty(256, np.int32)
    floats = ints.view(np.float32)
    for row in range(rows):
        line = scores[row]
        line[:first] = 0
        top = highest(line[first:])
        total = 0.0
        for start in range(first, tokens, 256):
            piece = line[start : min(start + 256, tokens)]
            count = piece.shape[0]
            for i in range(count):
                y = max((piece[i] - top) * np.float32(1.4426950408889634), np.float32(-126))
                whole = np.floor(y + np.float32(0.5))
                f = y - whole
                high = np.float32(_EXP2_HIGH[0]) + f * np.float32(_EXP2_HIGH[1])
                for_4 = np.float32(_EXP2[4]) + f * high
                for_3 = np.float32(_EXP2[3]) + f * for_4
                for_2 = np.float32(_EXP2[2]) + f * for_3
                piece[i] = np.float32(1) + f * (np.float32(_EXP2[1]) + f * for_2)
                ints[i] = (np.int32(whole) + 127) << 23
            part = np.float32(0)
            for i in range(count):
                piece[i] *= floats[i]
                part += piece[i]
            total += part
        totals[row] = total
    return totals


@numba.njit(**OPTIONS)
@no_type_check
def head_plane(planes, places, index, head):
    """Rows of bytes of one head; `places[index]`: bytes from head to head, rows, and columns of a plane."""
    step, rows, columns = places[index]
    return planes[index][head * step : head * step + rows * columns].reshape(rows, columns)
