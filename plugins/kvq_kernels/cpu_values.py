"""Products of queries, and of weights, with the values of packed codes: the inner loops of attention on a CPU.

Codes of four tokens are decoded as they are read from their bytes and meet one or four rows (queries, or weights) in
one loop over channels, which LLVM turns into vector instructions. An operation on numba's integers has 64 bits:
`np.int32` keeps them narrow, and indices of `np.uintp` are not checked for being below zero.
"""

from __future__ import annotations

import functools
from typing import no_type_check

import numba
import numpy as np

OPTIONS = {"nogil": True, "fastmath": True, "error_model": "numpy", "boundscheck": False}
INLINED = OPTIONS | {"forceinline": True}
TILE = 128
"""Tokens whose scores or weights are scaled together."""


@numba.njit(**OPTIONS)
@no_type_check
def single(half):
    """Convert a number in fp16, held as int16, to fp32."""
    size = np.int32(np.int32(half & 0x7FFF) << 13).view(np.float32) * np.float32(2.0**112)
    return -size if half < 0 else size


@no_type_check
def _code(widths, token, index=0, place=0):
    """A compiled function that reads the code of token `first + token` in one channel, from planes of `widths` bits.

    The code of a single plane is not shifted down within its byte: the result is a multiple of it (`_units`).
    """
    width, last = widths[index], index == len(widths) - 1
    row, begin, mask = token * width // 8, token * width % 8, 2**width - 1
    kept = len(widths) == 1
    rest = None if last else _code(widths, token, index + 1, place + width)

    @numba.njit(**OPTIONS)
    def read(planes, first, channel):
        plane = planes[index]
        held = np.int32(plane[min(first * width // 8 + row, plane.shape[0] - 1), channel])
        if width == 1:  # four of a byte's eight tokens
            held = np.int32(held >> np.int32(first % 8))
        if kept:
            return np.int32(held & (mask << begin))
        return np.int32(((held >> begin) & mask) << place)

    @numba.njit(**OPTIONS)
    def joined(planes, first, channel):
        return np.int32(read(planes, first, channel) | rest(planes, first, channel))

    return read if last else joined


@no_type_check
def _units(widths):
    """For each of four tokens, the factor (a power of 2) that turns what `_code` reads into the code."""
    return tuple(np.float32(2.0 ** -(t * widths[0] % 8) if len(widths) == 1 else 1) for t in range(4))


@no_type_check
def _uniform(widths, token):
    """A compiled function that reads a code of a uniform grid in fp32; steps and lowest values are applied later."""
    code = _code(widths, token)

    @numba.njit(**OPTIONS)
    def value(planes, levels, first, channel):
        return np.float32(code(planes, first, channel))

    return value


@no_type_check
def _level(widths, token):
    """A compiled function that decodes a code of symmetric levels: its top bit is the sign; `levels`: positive ones."""
    bits, code = sum(widths), _code(widths, token)
    begin = token * widths[0] % 8 if len(widths) == 1 else 0
    sign, inner = 1 << (begin + bits - 1), (2 ** (bits - 1) - 1) << begin
    pick = _pick(bits - 1, begin, 0)

    @numba.njit(**OPTIONS)
    def value(planes, levels, first, channel):
        held = code(planes, first, channel)
        size = pick(levels, np.int32(held if held & sign else held ^ inner))
        return size if held & sign else -size

    return value


@no_type_check
def _pick(bits, begin, base):
    """A compiled function that selects `levels[base + i]`, i: bits of a code from bit `begin` on, without a lookup."""
    if bits == 0:

        @numba.njit(**OPTIONS)
        def only(levels, held):
            return levels[base]

        return only
    low, high = (_pick(bits - 1, begin, base + half) for half in (0, 1 << (bits - 1)))
    bit = 1 << (begin + bits - 1)

    @numba.njit(**OPTIONS)
    def pick(levels, held):
        above, below = high(levels, held), low(levels, held)
        return above if held & bit else below

    return pick


@no_type_check
def _number(widths, token):
    """A compiled function that reads a number which is not quantized: fp32, or bf16 held as int16, as fp32."""
    half = widths == (16,)

    @numba.njit(**OPTIONS)
    def value(planes, levels, first, channel):
        held = planes[0][min(first + token, planes[0].shape[0] - 1), channel]
        return np.int32(np.int32(held) << 16).view(np.float32) if half else held

    return value


@no_type_check
def _first_numbers(count):
    """A compiled function that returns the first `count` numbers of an array as a tuple, to keep in registers."""
    rest, last = None if count == 1 else _first_numbers(count - 1), count - 1

    @numba.njit(**OPTIONS)
    def one(array):
        return (array[0],)

    @numba.njit(**OPTIONS)
    def more(array):
        return (*rest(array), array[last])

    return one if count == 1 else more


@functools.cache
@no_type_check
def value_loops(kind: str, widths: tuple[int, ...], span: int, rows: int):
    """The loops `dots` and `sums` for `span` channels of codes in planes of `widths` bits.

    `kind`: `uniform`, `levels` (tables: the positive ones) or `numbers` (of 32 or 16 bits).

    `dots(queries, planes, tables, first, channel, count, products)` writes to `products[row, token]` those of queries
    with the values of `count` tokens from `first` (a multiple of 4) on, over the channels from `channel` on.
    `sums(weights, planes, tables, first, channel, count, out)` adds weighted sums to `out[row, channel]`; weights are
    zero from `count` on. There is one row (`rows` 1) or a multiple of four (4); columns are a multiple of four.
    """
    value = {"uniform": _uniform, "levels": _level, "numbers": _number}[kind]
    values = tuple(value(widths, token) for token in range(4))
    units = _units(widths) if kind == "uniform" else (np.float32(1),) * 4
    ready = _first_numbers(2 ** (sum(widths) - 1) if kind == "levels" else 1)
    return _dots(values, units, ready, span, rows), _sums(values, units, ready, span, rows)


@numba.njit
@no_type_check
def padded(rows):
    """Rows of a buffer for `dots` and `sums` that holds `rows` rows: 1, or the next multiple of 4."""
    return rows if rows == 1 else (rows + 3) // 4 * 4


@no_type_check
def _dots(values, units, ready, span, rows):
    """The loop `dots` of `value_loops`; `values` decode four tokens, `units` scale them, `ready` loads a table."""
    (v0, v1, v2, v3), (u0, u1, u2, u3), zero = values, units, np.float32(0)

    @numba.njit(**INLINED)
    def one(query, planes, levels, first, channel, out, t):
        a0, a1, a2, a3 = zero, zero, zero, zero
        for c in range(span):
            at = np.uintp(channel + c)
            q = query[at]
            a0 += q * v0(planes, levels, first, at)
            a1 += q * v1(planes, levels, first, at)
            a2 += q * v2(planes, levels, first, at)
            a3 += q * v3(planes, levels, first, at)
        out[t], out[t + 1], out[t + 2], out[t + 3] = a0 * u0, a1 * u1, a2 * u2, a3 * u3

    @numba.njit(**INLINED)
    def four(one, two, three, last, planes, levels, first, channel, out_a, out_b, out_c, out_d, t):
        a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        c0, c1, c2, c3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
        for c in range(span):
            at = np.uintp(channel + c)
            x0, x1 = v0(planes, levels, first, at), v1(planes, levels, first, at)
            x2, x3 = v2(planes, levels, first, at), v3(planes, levels, first, at)
            a, b, p, q = one[at], two[at], three[at], last[at]
            a0, a1, a2, a3 = a0 + a * x0, a1 + a * x1, a2 + a * x2, a3 + a * x3
            b0, b1, b2, b3 = b0 + b * x0, b1 + b * x1, b2 + b * x2, b3 + b * x3
            c0, c1, c2, c3 = c0 + p * x0, c1 + p * x1, c2 + p * x2, c3 + p * x3
            d0, d1, d2, d3 = d0 + q * x0, d1 + q * x1, d2 + q * x2, d3 + q * x3
        out_a[t], out_a[t + 1], out_a[t + 2], out_a[t + 3] = a0 * u0, a1 * u1, a2 * u2, a3 * u3
        out_b[t], out_b[t + 1], out_b[t + 2], out_b[t + 3] = b0 * u0, b1 * u1, b2 * u2, b3 * u3
        out_c[t], out_c[t + 1], out_c[t + 2], out_c[t + 3] = c0 * u0, c1 * u1, c2 * u2, c3 * u3
        out_d[t], out_d[t + 1], out_d[t + 2], out_d[t + 3] = d0 * u0, d1 * u1, d2 * u2, d3 * u3

    @numba.njit(**OPTIONS)
    def dots(queries, planes, tables, first, channel, count, products):
        levels = ready(tables[0].reshape(-1))
        if rows == 1:
            query, line = queries[0], products[0]
            for t in range(0, count, 4):
                one(query, planes, levels, first + t, channel, line, t)
        else:
            for h in range(0, queries.shape[0], 4):
                four_queries = queries[h], queries[h + 1], queries[h + 2], queries[h + 3]
                lines = products[h], products[h + 1], products[h + 2], products[h + 3]
                for t in range(0, count, 4):
                    four(*four_queries, planes, levels, first + t, channel, *lines, t)

    return dots


@no_type_check
def _sums(values, units, ready, span, rows):
    """The loop `sums` of `value_loops`; arguments as for `_dots`."""
    (v0, v1, v2, v3), (u0, u1, u2, u3) = values, units

    @numba.njit(**INLINED)
    def scaled(weights, t):
        return weights[t] * u0, weights[t + 1] * u1, weights[t + 2] * u2, weights[t + 3] * u3

    @numba.njit(**INLINED)
    def one(weights, planes, levels, first, channel, t, out):
        a0, a1, a2, a3 = scaled(weights, t)
        for c in range(span):
            at = np.uintp(channel + c)
            x0, x1 = v0(planes, levels, first, at), v1(planes, levels, first, at)
            x2, x3 = v2(planes, levels, first, at), v3(planes, levels, first, at)
            out[at] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3

    @numba.njit(**INLINED)
    def four(line_a, line_b, line_c, line_d, planes, levels, first, channel, t, one, two, three, last):
        a0, a1, a2, a3 = scaled(line_a, t)
        b0, b1, b2, b3 = scaled(line_b, t)
        c0, c1, c2, c3 = scaled(line_c, t)
        d0, d1, d2, d3 = scaled(line_d, t)
        for c in range(span):
            at = np.uintp(channel + c)
            x0, x1 = v0(planes, levels, first, at), v1(planes, levels, first, at)
            x2, x3 = v2(planes, levels, first, at), v3(planes, levels, first, at)
            a, b, p, q = one[at], two[at], three[at], last[at]  # before any is stored: they might overlap
            one[at] = a + a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            two[at] = b + b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            three[at] = p + c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            last[at] = q + d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3

    @numba.njit(**OPTIONS)
    def sums(weights, planes, tables, first, channel, count, out):
        levels = ready(tables[0].reshape(-1))
        if rows == 1:
            line, to = weights[0], out[0]
            for t in range(0, count, 4):
                one(line, planes, levels, first + t, channel, t, to)
        else:
            for h in range(0, weights.shape[0], 4):
                lines = weights[h], weights[h + 1], weights[h + 2], weights[h + 3]
                to = out[h], out[h + 1], out[h + 2], out[h + 3]
                for t in range(0, count, 4):
                    four(*lines, planes, levels, first + t, channel, t, *to)

    return sums
