"""The inner loops of attention on packed codes on a CPU, compiled by numba for one head dim and one kind of grid.

Codes are multiplied with queries and weights as they are read from their bytes (`cpu_vectors` in fp32, `cpu_integers`
in integers) and are never written to memory. Steps of groups of tokens are folded into the queries or applied after a
sum, those of a token into its score or weight. The loops are written so that a compiler vectorizes them: constant
bounds, contiguous numbers, independent sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np

from kvq.codecs.machine_code import compiled
from kvq_kernels import cpu_integers, cpu_vectors
from kvq_kernels.cpu_vectors import OPTIONS, TILE, largest, plane_of


@dataclass(frozen=True)
class Grid:
    """The parameters that loops are compiled for: channels, plane widths, and how a group's lowest value is stored.

    `channels`: of a group whose statistics are per token; a divisor of `dim`. `low`: `float` (fp16), `integer` (a zero
    point in int16) or `symmetric` (`top` steps below zero). `integers`: queries and weights are rounded to 16-bit
    integers (`cpu_integers`).
    """

    dim: int
    channels: int
    widths: tuple[int, ...]
    low: str
    top: int
    integers: bool = False


@dataclass(frozen=True)
class Loops:
    """Compiled for one `Grid`: scores and weighted sums, each with statistics per channel or per token.

    `scores(queries, ..., start, tokens, out)` writes `out[head, row, start ...]` of some heads, `mix(weights, ...)`
    adds their sums over tokens from `start` on to `out[head, row]`.
    """

    scores_per_channel: Callable[..., Any]
    mix_per_channel: Callable[..., Any]
    scores_per_token: Callable[..., Any]
    mix_per_token: Callable[..., Any]


@no_type_check
def by_rows(make):
    """A step's loop over any number of rows (its first and last arguments), four, two or one at a time."""
    four, two, one = (make(rows) for rows in (4, 2, 1))

    @compiled(OPTIONS)
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
def _planes(grid, span):
    """Products and weighted sums over all planes of some tokens, for `span` channels from one on.

    `found` and `raw` are buffers `[rows, TILE]`, `ready` is one of `_columns`. Weights past `count` are zero, and the
    others at most `tops[row] * most` (of no concern in fp32).
    """
    number, last = len(grid.widths), len(grid.widths) - 1
    indices = [min(index, last) for index in range(3)]
    made = [_plane(grid, index, span) for index in indices]
    (dots0, sums0, weigh0), (dots1, sums1, weigh1), (dots2, sums2, weigh2) = made
    f0, f1, f2 = (cpu_vectors.factors(grid.widths, index, TILE) for index in indices)

    @compiled(OPTIONS)
    def put(raw, factors, count, found):
        for h in range(raw.shape[0]):
            line, out = raw[h], found[h]
            for t in range(count):
                out[t] = line[t] * factors[t]

    @compiled(OPTIONS)
    def add(raw, factors, count, found):
        for h in range(raw.shape[0]):
            line, out = raw[h], found[h]
            for t in range(count):
                out[t] += line[t] * factors[t]

    @compiled(OPTIONS)
    def products(queries, planes, first, channel, count, raw, found):
        dots0(queries, planes[0], channel, first, count, raw)
        put(raw, f0, count, found)
        if number > 1:
            dots1(queries, planes[1 if number > 1 else 0], channel, first, count, raw)
            add(raw, f1, count, found)
        if number > 2:
            dots2(queries, planes[2 if number > 2 else 0], channel, first, count, raw)
            add(raw, f2, count, found)

    @compiled(OPTIONS)
    def mixed(weights, tops, most, planes, first, channel, count, ready, out):
        weigh0(weights, tops, most, ready)
        sums0(ready, planes[0], channel, first, count, out)
        if number > 1:
            weigh1(weights, tops, most, ready)
            sums1(ready, planes[1 if number > 1 else 0], channel, first, count, out)
        if number > 2:
            weigh2(weights, tops, most, ready)
            sums2(ready, planes[2 if number > 2 else 0], channel, first, count, out)

    return products, mixed


@no_type_check
def _plane(grid, index, span):
    """One plane's products and sums, and what puts weights into the form that its sums read."""
    width, step = grid.widths[index], cpu_integers if grid.integers else cpu_vectors
    dots, sums = (by_rows(functools.partial(make, width, span)) for make in (step.dots, step.sums))
    if grid.integers:
        return dots, sums, rounded(TILE, width, float(2 ** sum(grid.widths[:index])))
    factors = cpu_vectors.factors(grid.widths, index, TILE)

    @compiled(OPTIONS)
    def weigh(weights, tops, most, ready):
        for h in range(weights.shape[0]):
            line, out = weights[h], ready[h]
            for i in range(TILE):
                out[i] = line[i] * factors[i]

    return dots, sums, weigh


def _columns(grid: Grid, count: int) -> int:
    """Numbers of fp32 in a row of a buffer for `count` queries' channels or weights, in the form that a step reads."""
    return cpu_integers.words(count) if grid.integers else count


@no_type_check
def rounded(count, width=None, factor=1.0):
    """Rows of `count` numbers, at most `tops[row] * most`, as `cpu_integers.digits`.

    These are queries, or (`width`) weights of the codes of a plane.
    """
    digits = cpu_integers.digits(count, width, factor)

    @compiled(OPTIONS)
    def round_rows(numbers, tops, most, ready):
        for h in range(numbers.shape[0]):
            digits(numbers, h, tops[h] * most, ready)

    return round_rows


@no_type_check
def _queries(grid, span):
    """What puts `span` channels of queries into the form that products read, and what picks that form."""

    @compiled(OPTIONS)
    def fill(queries, tops, most, ready):
        pass

    @compiled(OPTIONS)
    def rounded_ones(queries, ready):
        return ready

    @compiled(OPTIONS)
    def themselves(queries, ready):
        return queries

    return (rounded(span), rounded_ones) if grid.integers else (fill, themselves)


@functools.cache
@no_type_check
def statistics_loop(low: str, top: int, groups: int):
    """A loop that reads the statistics of `count` tokens (or channels), each with `groups`, from the place `start` on.

    `floats[0, group]` become their steps and `floats[1, group]` their lowest values.
    """
    many, one = (cpu_vectors.statistics(groups, low, top, lanes) for lanes in (cpu_vectors.LANES, 1))

    @compiled(OPTIONS)
    def read(scale, low, start, count, floats):
        whole = count // cpu_vectors.LANES * cpu_vectors.LANES
        for i in range(0, whole, cpu_vectors.LANES):
            many(scale, low, start + i * groups, floats, i)
        for i in range(whole, count):
            one(scale, low, start + i * groups, floats, i)

    return read


@functools.cache
def loops_for(grid: Grid) -> Loops:
    """Compile (each at its first call) the loops of one grid."""
    made = (make(grid) for make in (_channel_scores, _channel_mix, _token_scores, _token_mix))
    return Loops(*map(_over_heads, made))


@no_type_check
def _over_heads(loop):
    """A loop over the heads of `rows` and `out`; `planes`, `scale` and `low` are flat, `places` as `plane_of` has them.

    `norms` are those of each head, or of all. `places[3, 0]` and `places[4, 0]`: scales and lows from head to head.
    """

    @compiled(OPTIONS, keep=True)
    def all_heads(rows, planes, places, scale, low, size, norms, start, tokens, out):
        for h in range(rows.shape[0]):
            own = (plane_of(planes, places, 0, h), plane_of(planes, places, 1, h), plane_of(planes, places, 2, h))
            own_scale, own_low = scale[h * places[3, 0] :], low[h * places[4, 0] :]
            loop(rows[h], own, own_scale, own_low, size, norms[min(h, len(norms) - 1)], start, tokens, out[h])

    return all_heads


@no_type_check
def _channel_scores(grid):
    """Scores of a segment whose groups are `size` tokens of one channel."""
    dim, read, (products, _) = grid.dim, statistics_loop(grid.low, grid.top, 1), _planes(grid, grid.dim)
    (fill, pick), columns = _queries(grid, dim), _columns(grid, dim)

    @compiled(OPTIONS)
    def scores(query, planes, scale, low, size, norms, start, tokens, out):
        rows = out.shape[0]
        raw, found = np.empty((rows, TILE), np.float32), np.empty((rows, TILE), np.float32)
        folded, least = np.empty((rows, dim), np.float32), np.empty(rows, np.float32)
        floats, buffer = np.empty((2, 1, dim), np.float32), np.empty((rows, columns), np.float32)
        steps, lows, tops, most = floats[0, 0], floats[1, 0], np.empty(rows, np.float32), np.empty(1, np.float32)
        largest(query, tops)
        for group in range((tokens + size - 1) // size):
            read(scale, low, group * dim, dim, floats)
            for h in range(rows):
                part = np.float32(0)
                for c in range(dim):
                    folded[h, c] = query[h, c] * steps[c]
                    part += query[h, c] * lows[c]
                least[h] = part
            largest(floats[0], most)
            fill(folded, tops, most[0], buffer)
            end = min((group + 1) * size, tokens)
            for token in range(group * size, end, TILE):
                count = min(TILE, end - token)
                products(pick(folded, buffer), planes, token, 0, count, raw, found)
                near = norms[start + token : start + token + count]
                for h in range(rows):
                    line, here, lowest = out[h, start + token : start + token + count], found[h], least[h]
                    for t in range(count):
                        line[t] = (here[t] + lowest) * near[t]

    return scores


@no_type_check
def _channel_mix(grid):
    """Weighted sums of such a segment, added to `out`."""
    dim, read, (_, mixed) = grid.dim, statistics_loop(grid.low, grid.top, 1), _planes(grid, grid.dim)
    columns = _columns(grid, TILE)

    @compiled(OPTIONS)
    def mix(weights, planes, scale, low, size, norms, start, tokens, out):
        rows = weights.shape[0]
        near, ready = np.zeros((rows, TILE), np.float32), np.zeros((rows, columns), np.float32)
        part, total = np.empty((rows, dim), np.float32), np.empty(rows, np.float32)
        floats, tops = np.empty((2, 1, dim), np.float32), np.empty(rows, np.float32)
        steps, lows = floats[0, 0], floats[1, 0]
        for group in range((tokens + size - 1) // size):
            read(scale, low, group * dim, dim, floats)
            part[:] = 0
            total[:] = 0
            end = min((group + 1) * size, tokens)
            for token in range(group * size, end, TILE):
                count = min(TILE, end - token)
                norm = norms[start + token : start + token + count]
                for h in range(rows):
                    line, here, all_of = weights[h, start + token : start + token + count], near[h], np.float32(0)
                    here[count:] = 0
                    for t in range(count):
                        here[t] = line[t] * norm[t]
                        all_of += here[t]
                    total[h] += all_of
                largest(near, tops)
                mixed(near, tops, np.float32(1), planes, token, 0, count, ready, part)
            for h in range(rows):
                for c in range(dim):
                    out[h, c] += part[h, c] * steps[c] + total[h] * lows[c]

    return mix


@no_type_check
def _token_scores(grid):
    """Scores of a segment whose groups are `grid.channels` channels of one token."""
    dim, span, groups = grid.dim, grid.channels, grid.dim // grid.channels
    read, (products, _) = statistics_loop(grid.low, grid.top, groups), _planes(grid, span)
    (fill, pick), columns = _queries(grid, span), _columns(grid, span)

    @compiled(OPTIONS)
    def scores(query, planes, scale, low, size, norms, start, tokens, out):
        rows = out.shape[0]
        raw, found = np.empty((rows, TILE), np.float32), np.empty((rows, TILE), np.float32)
        whole, floats = np.zeros((rows, groups), np.float32), np.empty((2, groups, TILE), np.float32)
        buffers, tops = np.empty((groups, rows, columns), np.float32), np.empty(rows, np.float32)
        for h in range(rows):
            for c in range(dim):
                whole[h, c // span] += query[h, c]
        for group in range(groups):
            part = query[:, group * span : (group + 1) * span]
            largest(part, tops)
            fill(part, tops, np.float32(1), buffers[group])
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(scale, low, token * groups, count, floats)
            near = norms[start + token : start + token + count]
            for group in range(groups):
                ready = pick(query[:, group * span : (group + 1) * span], buffers[group])
                products(ready, planes, token, group * span, count, raw, found)
                for h in range(rows):
                    line, here, sum_of = out[h, start + token : start + token + count], found[h], whole[h, group]
                    steps, lows = floats[0, group], floats[1, group]
                    if group == 0:
                        line[:] = 0
                    for t in range(count):
                        line[t] += (here[t] * steps[t] + sum_of * lows[t]) * near[t]

    return scores


@no_type_check
def _token_mix(grid):
    """Weighted sums of such a segment, added to `out`; the steps of a token are folded into its weights."""
    span, groups = grid.channels, grid.dim // grid.channels
    read, (_, mixed), columns = statistics_loop(grid.low, grid.top, groups), _planes(grid, span), _columns(grid, TILE)

    @compiled(OPTIONS)
    def mix(weights, planes, scale, low, size, norms, start, tokens, out):
        rows = weights.shape[0]
        near, stepped = np.zeros((rows, TILE), np.float32), np.zeros((rows, TILE), np.float32)
        ready, least = np.zeros((rows, columns), np.float32), np.zeros((groups, rows, TILE), np.float32)
        floats, tops = np.zeros((2, groups, TILE), np.float32), np.empty(rows, np.float32)
        most = np.empty(groups, np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(scale, low, token * groups, count, floats)
            norm = norms[start + token : start + token + count]
            for h in range(rows):
                line, here = weights[h, start + token : start + token + count], near[h]
                here[count:] = 0
                for t in range(count):
                    here[t] = line[t] * norm[t]
            largest(near, tops)
            largest(floats[0], most)
            for group in range(groups):
                steps, lows = floats[0, group], floats[1, group]
                for h in range(rows):
                    here, line, lowest = near[h], stepped[h], least[group, h]
                    for i in range(TILE):
                        line[i] = here[i] * steps[i]
                        lowest[i] += here[i] * lows[i]
                mixed(stepped, tops, most[group], planes, token, group * span, count, ready, out)
        for h in range(rows):
            for group in range(groups):
                total = least[group, h].sum()
                for c in range(span):
                    out[h, group * span + c] += total

    return mix
