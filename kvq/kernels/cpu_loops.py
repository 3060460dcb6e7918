"""The inner loops of attention on packed codes on a CPU, compiled by numba for one head dim and one kind of grid.

Codes are multiplied with queries and weights as they are read from their bytes (`cpu_vectors`) and are never written to
memory. Steps of groups of tokens are folded into the queries or applied after a sum, those of a token into its score or
weight. The loops are written so that a compiler vectorizes them: constant bounds, contiguous numbers, independent sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import numba
import numpy as np

from kvq.kernels import cpu_vectors

TILE = 64
"""Tokens whose scores or weights are scaled together; a multiple of 8."""
OPTIONS = {"nogil": True, "fastmath": True, "error_model": "numpy", "boundscheck": False}
_EXP2 = (1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477)
_EXP2_HIGH = (0.0013333558146428443, 0.00015403530393381608)


@dataclass(frozen=True)
class Grid:
    """The parameters that loops are compiled for: channels, plane widths, and how a group's lowest value is stored.

    `channels`: of a group whose statistics are per token; a divisor of `dim`. `low`: `float` (fp16), `integer` (a zero
    point in int16) or `symmetric` (`top` steps below zero).
    """

    dim: int
    channels: int
    widths: tuple[int, ...]
    low: str
    top: int


@dataclass(frozen=True)
class Loops:
    """Compiled for one `Grid`: scores and weighted sums, each with statistics per channel or per token."""

    scores_per_channel: Callable[..., Any]
    mix_per_channel: Callable[..., Any]
    scores_per_token: Callable[..., Any]
    mix_per_token: Callable[..., Any]


_WIDEN, _WIDEN_ONE = cpu_vectors.widened(cpu_vectors.LANES), cpu_vectors.widened(1)


@numba.njit(**OPTIONS)
@no_type_check
def widen(stored, floats, start, count):
    """fp16 numbers, held as int16, to fp32."""
    whole = count // cpu_vectors.LANES * cpu_vectors.LANES
    for i in range(0, whole, cpu_vectors.LANES):
        _WIDEN(stored, start + i, floats, i)
    for i in range(whole, count):
        _WIDEN_ONE(stored, start + i, floats, i)


@numba.njit(**OPTIONS)
@no_type_check
def weights_of(scores, first):
    """Softmax numerators in place, `exp(score - max)`, zero before token `first`; the sum of each row."""
    rows, tokens = scores.shape
    totals = np.zeros(rows, np.float32)
    ints = np.empty(256, np.int32)
    floats = ints.view(np.float32)
    for row in range(rows):
        line = scores[row]
        line[:first] = 0
        top = line[first]
        for i in range(first, tokens):
            top = max(top, line[i])
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


@no_type_check
def by_rows(make):
    """A step's loop over any number of rows (its first and last arguments), four, two or one at a time."""
    four, two, one = (make(rows) for rows in (4, 2, 1))

    @numba.njit(**OPTIONS)
    def loop(rows_in, codes, tables, first, count, rows_out):
        rows = rows_in.shape[0]
        for h in range(0, rows - 3, 4):
            four(rows_in[h : h + 4], codes, tables, first, count, rows_out[h : h + 4])
        if rows % 4 >= 2:
            h = rows // 4 * 4
            two(rows_in[h : h + 2], codes, tables, first, count, rows_out[h : h + 2])
        if rows % 2:
            one(rows_in[rows - 1 :], codes, tables, first, count, rows_out[rows - 1 :])

    return loop


@no_type_check
def _planes(grid, span, groups):
    """Products and sums over all planes of some tokens and `span` channels from one on.

    Weights of a sum have `groups` columns per token, of which each sum reads one; `scaled` is a buffer for them.
    """
    number, last = len(grid.widths), len(grid.widths) - 1
    widths = [grid.widths[min(index, last)] for index in range(3)]
    dots = [by_rows(functools.partial(cpu_vectors.dots, width, span)) for width in widths]
    sums = [by_rows(functools.partial(cpu_vectors.sums, width, span)) for width in widths]
    (dots0, dots1, dots2), (sums0, sums1, sums2) = dots, sums
    counts = [cpu_vectors.factors(grid.widths, min(index, last), TILE) for index in range(3)]
    f0, f1, f2 = counts
    g0, g1, g2 = (np.repeat(each, groups) for each in counts)

    @numba.njit(**OPTIONS)
    def add(raw, factors, count, found):
        for h in range(raw.shape[0]):
            line, out = raw[h], found[h]
            for t in range(count):
                out[t] += line[t] * factors[t]

    @numba.njit(**OPTIONS)
    def products(queries, planes, first, channel, count, raw, found):
        found[:] = 0
        dots0(queries, planes[0], channel, first, count, raw)
        add(raw, f0, count, found)
        if number > 1:
            dots1(queries, planes[1 if number > 1 else 0], channel, first, count, raw)
            add(raw, f1, count, found)
        if number > 2:
            dots2(queries, planes[2 if number > 2 else 0], channel, first, count, raw)
            add(raw, f2, count, found)

    @numba.njit(**OPTIONS)
    def times(weights, factors, scaled):
        for h in range(weights.shape[0]):
            line, out = weights[h], scaled[h]
            for i in range(TILE * groups):
                out[i] = line[i] * factors[i]

    @numba.njit(**OPTIONS)
    def mixed(weights, planes, first, count, scaled, out):
        times(weights, g0, scaled)
        for group in range(groups):
            sums0(scaled[:, group::groups], planes[0], group * span, first, count, out)
        if number > 1:
            times(weights, g1, scaled)
            for group in range(groups):
                sums1(scaled[:, group::groups], planes[1 if number > 1 else 0], group * span, first, count, out)
        if number > 2:
            times(weights, g2, scaled)
            for group in range(groups):
                sums2(scaled[:, group::groups], planes[2 if number > 2 else 0], group * span, first, count, out)

    return products, mixed


@no_type_check
def _statistics(grid):
    """A loop that reads the steps and lowest values of consecutive groups as fp32."""
    integer, symmetric, top = grid.low == "integer", grid.low == "symmetric", np.float32(grid.top)

    @numba.njit(**OPTIONS)
    def read(scale, low, start, count, floats):
        widen(scale, floats[0], start, count)
        if integer:
            for i in range(count):
                floats[1, i] = -floats[0, i] * np.float32(low[start + i])
        elif symmetric:
            for i in range(count):
                floats[1, i] = -floats[0, i] * top
        else:
            widen(low, floats[1], start, count)

    return read


@functools.cache
def loops_for(grid: Grid) -> Loops:
    """Compile (each at its first call) the loops of one grid."""
    return Loops(_channel_scores(grid), _channel_mix(grid), _token_scores(grid), _token_mix(grid))


@no_type_check
def _channel_scores(grid):
    """Scores of a segment whose groups are `size` tokens of one channel."""
    dim, read, (products, _) = grid.dim, _statistics(grid), _planes(grid, grid.dim, 1)

    @numba.njit(**OPTIONS)
    def scores(query, planes, scale, low, size, norms, out):
        rows, tokens = out.shape
        raw, found = np.empty((rows, TILE), np.float32), np.empty((rows, TILE), np.float32)
        folded, least = np.empty((rows, dim), np.float32), np.empty(rows, np.float32)
        floats = np.empty((2, dim), np.float32)
        for group in range((tokens + size - 1) // size):
            read(scale, low, group * dim, dim, floats)
            for h in range(rows):
                part = np.float32(0)
                for c in range(dim):
                    folded[h, c] = query[h, c] * floats[0, c]
                    part += query[h, c] * floats[1, c]
                least[h] = part
            end = min((group + 1) * size, tokens)
            for token in range(group * size, end, TILE):
                count = min(TILE, end - token)
                products(folded, planes, token, 0, count, raw, found)
                near = norms[token : token + count]
                for h in range(rows):
                    line, here, lowest = out[h, token : token + count], found[h], least[h]
                    for t in range(count):
                        line[t] = (here[t] + lowest) * near[t]

    return scores


@no_type_check
def _channel_mix(grid):
    """Weighted sums of such a segment, added to `out`."""
    dim, read, (_, mixed) = grid.dim, _statistics(grid), _planes(grid, grid.dim, 1)

    @numba.njit(**OPTIONS)
    def mix(weights, planes, scale, low, size, norms, out):
        rows, tokens = weights.shape
        near, scaled = np.zeros((rows, TILE), np.float32), np.zeros((rows, TILE), np.float32)
        part, total = np.empty((rows, dim), np.float32), np.empty(rows, np.float32)
        floats = np.empty((2, dim), np.float32)
        for group in range((tokens + size - 1) // size):
            read(scale, low, group * dim, dim, floats)
            part[:] = 0
            total[:] = 0
            end = min((group + 1) * size, tokens)
            for token in range(group * size, end, TILE):
                count = min(TILE, end - token)
                norm = norms[token : token + count]
                for h in range(rows):
                    line, here, all_of = weights[h, token : token + count], near[h], np.float32(0)
                    here[count:] = 0
                    for t in range(count):
                        here[t] = line[t] * norm[t]
                        all_of += here[t]
                    total[h] += all_of
                mixed(near, planes, token, count, scaled, part)
            for h in range(rows):
                for c in range(dim):
                    out[h, c] += part[h, c] * floats[0, c] + total[h] * floats[1, c]

    return mix


@no_type_check
def _token_scores(grid):
    """Scores of a segment whose groups are `grid.channels` channels of one token."""
    dim, span, groups = grid.dim, grid.channels, grid.dim // grid.channels
    read, (products, _) = _statistics(grid), _planes(grid, span, 1)

    @numba.njit(**OPTIONS)
    def scores(query, planes, scale, low, size, norms, out):
        rows, tokens = out.shape
        raw, found = np.empty((rows, TILE), np.float32), np.empty((rows, TILE), np.float32)
        whole, floats = np.zeros((rows, groups), np.float32), np.empty((2, TILE * groups), np.float32)
        for h in range(rows):
            for c in range(dim):
                whole[h, c // span] += query[h, c]
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(scale, low, token * groups, count * groups, floats)
            near = norms[token : token + count]
            for group in range(groups):
                products(query, planes, token, group * span, count, raw, found)
                for h in range(rows):
                    line, here, sum_of = out[h, token : token + count], found[h], whole[h, group]
                    if group == 0:
                        line[:] = 0
                    for t in range(count):
                        i = t * groups + group
                        line[t] += (here[t] * floats[0, i] + sum_of * floats[1, i]) * near[t]

    return scores


@no_type_check
def _token_mix(grid):
    """Weighted sums of such a segment, added to `out`; the steps of a token are folded into its weights."""
    span, groups = grid.channels, grid.dim // grid.channels
    read, (_, mixed) = _statistics(grid), _planes(grid, span, groups)

    @numba.njit(**OPTIONS)
    def mix(weights, planes, scale, low, size, norms, out):
        rows, tokens = weights.shape
        near, stepped = np.empty(TILE * groups, np.float32), np.zeros((rows, TILE * groups), np.float32)
        scaled, least = np.zeros((rows, TILE * groups), np.float32), np.zeros((rows, TILE * groups), np.float32)
        floats = np.zeros((2, TILE * groups), np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(scale, low, token * groups, count * groups, floats)
            norm = norms[token : token + count]
            for h in range(rows):
                line, here, lowest = weights[h, token : token + count], stepped[h], least[h]
                near[count * groups :] = 0
                for t in range(count):
                    for group in range(groups):
                        near[t * groups + group] = line[t] * norm[t]
                for i in range(TILE * groups):
                    here[i] = near[i] * floats[0, i]
                    lowest[i] += near[i] * floats[1, i]
            mixed(stepped, planes, token, count, scaled, out)
        for h in range(rows):
            for group in range(groups):
                total = least[h, group::groups].sum()
                for c in range(span):
                    out[h, group * span + c] += total

    return mix
