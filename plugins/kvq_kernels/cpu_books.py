"""Products of queries, and of weights, with the entries of a codebook of 8 channels, as `cpu_values` has them."""

from __future__ import annotations

import functools
import math
from typing import no_type_check

import numba
import numpy as np

from kvq_kernels.cpu_values import INLINED, OPTIONS

GROUP = 8
"""Channels of a codebook's entry."""


@functools.cache
@no_type_check
def book_loops(kind: str, book: bytes, dim: int, rows: int):
    """The loops `dots` and `sums` of `value_loops` for a codebook: 8 to 16 entries in one loop over their 8 channels.

    LLVM turns that loop into vectors, as it is too long to be unrolled, if it knows that no entry changes when a sum is
    stored: the tables are constants of the loop, and the sums of four rows lie in one array.

    `kind`: `book`, `signed_book` or `shifted_book`; `book`: tables `[3, 256, 8]` in fp32: entries and, by second byte,
    bits to flip and shifts.
    """
    some_dots, some_sums = (loop(_entry(kind, book), rows, dim // GROUP) for loop in (_entry_dots, _entry_sums))

    @numba.njit(**OPTIONS)
    def dots(queries, planes, tables, first, channel, count, products):
        if rows == 1:
            some_dots((queries[0],), planes, first, count, (products[0],))
        else:
            for h in range(0, queries.shape[0], 4):
                lines = products[h], products[h + 1], products[h + 2], products[h + 3]
                some_dots((queries[h], queries[h + 1], queries[h + 2], queries[h + 3]), planes, first, count, lines)

    @numba.njit(**OPTIONS)
    def sums(weights, planes, tables, first, channel, count, out):
        if rows == 1:
            some_sums((weights[0],), planes, first, count, out[0])
        else:
            for h in range(0, weights.shape[0], 4):
                totals = np.zeros((dim // GROUP, 4, GROUP), np.float32)
                lines = weights[h], weights[h + 1], weights[h + 2], weights[h + 3]
                some_sums(lines, planes, first, count, totals.reshape(-1))
                for row in range(4):
                    for c in range(dim):
                        out[h + row, c] += totals[c // GROUP, row, c % GROUP]

    return dots, sums


@no_type_check
def _entry(kind, book):
    """An entry's value in channel `c`; `item`: the place of its bits in the table, and the second byte."""
    signed, shifted, table = kind == "signed_book", kind == "shifted_book", np.frombuffer(book, np.int32)
    flips, shifts, group = np.uintp(256 * GROUP), np.uintp(2 * 256 * GROUP), np.uintp(GROUP)

    @numba.njit(**INLINED)
    def value(item, c):
        bits = table[item[0] + c]
        if signed:  # the bit of the channel is moved to that of the sign
            sign = np.int32(np.int32(item[1]) << np.int32(31 - c)) & -0x80000000
            return np.int32(bits ^ sign).view(np.float32)
        if not shifted:
            return np.int32(bits).view(np.float32)
        place = item[1] * group + c
        return np.int32(bits ^ table[flips + place]).view(np.float32) + np.int32(table[shifts + place]).view(np.float32)

    return value


@no_type_check
def _tuple_of(count, step, read):
    """Makes a tuple of what `read` takes at `count` places, `step` from one to the next."""
    if count == 1:

        @numba.njit(**INLINED)
        def one(source, at):
            return (read(source, at),)

        return one
    half, apart = _tuple_of(count // 2, step, read), np.uintp(count // 2 * step)

    @numba.njit(**INLINED)
    def both(source, at):
        return half(source, at) + half(source, at + apart)

    return both


@numba.njit(**INLINED)
@no_type_check
def _places(codes, at):
    return np.uintp(codes[0][at]) * np.uintp(GROUP), np.uintp(codes[1][at])


@numba.njit(**INLINED)
@no_type_check
def _weight_of_one(lines, t):
    return (lines[0][t],)


@numba.njit(**INLINED)
@no_type_check
def _weights_of_four(lines, t):
    return lines[0][t], lines[1][t], lines[2][t], lines[3][t]


@no_type_check
def _products(value, rows, count, weighted):
    """Sums over `count` entries, for each of `rows`: values times what the row has there, or (`weighted`) weights."""
    if count == 1:

        @numba.njit(**INLINED)
        def one(items, factors, at, c):
            x = value(items[0], c)
            if weighted:
                w = factors[0]
                return (w[0] * x,) if rows == 1 else (w[0] * x, w[1] * x, w[2] * x, w[3] * x)
            if rows == 1:
                return (factors[0][at + c] * x,)
            return factors[0][at + c] * x, factors[1][at + c] * x, factors[2][at + c] * x, factors[3][at + c] * x

        return one
    half, middle = _products(value, rows, count // 2, weighted), count // 2
    apart, plus = np.uintp(middle * GROUP), _plus(rows)

    @numba.njit(**INLINED)
    def both(items, factors, at, c):
        if weighted:
            return plus(half(items[:middle], factors[:middle], at, c), half(items[middle:], factors[middle:], at, c))
        return plus(half(items[:middle], factors, at, c), half(items[middle:], factors, at + apart, c))

    return both


@no_type_check
def _plus(rows):
    @numba.njit(**INLINED)
    def one(a, b):
        return (a[0] + b[0],)

    @numba.njit(**INLINED)
    def four(a, b):
        return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]

    return one if rows == 1 else four


@no_type_check
def _entry_dots(value, rows, groups):
    """The loop of `dots` for one or four rows, as many entries of a token at once as divide it, up to 16."""
    count = math.gcd(groups, 16)
    items, products, plus = _tuple_of(count, 1, _places), _products(value, rows, count, False), _plus(rows)
    nothing = (np.float32(0),) * rows

    @numba.njit(**INLINED)
    def dots(queries, planes, first, tokens, lines):
        codes = planes[0].reshape(-1), planes[1].reshape(-1)
        for t in range(tokens):
            total = nothing
            for group in range(0, groups, count):
                entries = items(codes, np.uintp((first + t) * groups + group))
                for c in range(GROUP):
                    total = plus(total, products(entries, queries, np.uintp(group * GROUP), np.uintp(c)))
            for row in range(rows):
                lines[row][t] = total[row]

    return dots


@no_type_check
def _entry_sums(value, rows, groups):
    """The loop of `sums` for one or four rows, whose sums `[groups, rows, 8]` lie in one array, 8 tokens at once."""
    weigh = _weight_of_one if rows == 1 else _weights_of_four

    @no_type_check
    def step(count):
        items, factors = _tuple_of(count, groups, _places), _tuple_of(count, 1, weigh)
        products = _products(value, rows, count, True)

        @numba.njit(**INLINED)
        def some(codes, place, weights, t, out):
            near = factors(weights, np.uintp(t))
            for group in range(groups):
                entries = items(codes, np.uintp(place + group))
                for c in range(GROUP):
                    at = np.uintp(group * rows * GROUP + c)
                    if rows == 1:
                        out[at] += products(entries, near, at, np.uintp(c))[0]
                    else:
                        two, three, four = at + np.uintp(GROUP), at + np.uintp(2 * GROUP), at + np.uintp(3 * GROUP)
                        a, b, p, q = products(entries, near, at, np.uintp(c))
                        a, b, p, q = a + out[at], b + out[two], p + out[three], q + out[four]
                        out[at], out[two], out[three], out[four] = a, b, p, q

        return some

    some, one = step(8), step(1)

    @numba.njit(**INLINED)
    def sums(weights, planes, first, tokens, out):
        codes, whole = (planes[0].reshape(-1), planes[1].reshape(-1)), tokens // 8 * 8
        for t in range(0, whole, 8):
            some(codes, (first + t) * groups, weights, t, out)
        for t in range(whole, tokens):
            one(codes, (first + t) * groups, weights, t, out)

    return sums
