"""The inner loops of attention on packed codes on a CPU, compiled by numba for one head dim and one kind of grid.

Codes are multiplied with queries and weights as they are read from their bytes (`cpu_vectors`) and are never written
to memory. Steps of groups of tokens are folded into the queries or applied after a
sum, those of a token into its score or weight. The loops are written so that a compiler vectorizes them: constant
bounds, contiguous numbers, independent sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import numba
import numpy as np

from kvq_kernels import cpu_vectors
from kvq_kernels.cpu_vectors import OPTIONS, TILE, head_plane


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
    """Compiled for one `Grid`: scores and weighted sums, each with statistics per channel or per token.

    `scores(queries, ..., start, tokens, out)` writes `out[head, row, start ...]` of some heads, `mix(weights, ...)`
    adds their sums over tokens from `start` on to `out[head, row]`.
    """

    scores_per_channel: Callable[..., Any]
    mix_per_channel: Callable[..., Any]
    scores_per_token: Callable[..., Any]
    mix_per_token: Callable[..., Any]


@no_type_check
def loop_over_rows(make):
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
def _plane_loops(grid, span):
    """Products and weighted sums over all planes of some tokens, for `span` channels from one on.

    `found`, `raw` and `ready` are buffers `[rows, TILE]`. Weights past `count` are zero.
    """
    number, last = len(grid.widths), len(grid.widths) - 1
    indices = [min(index, last) for index in range(3)]
    made = [_one_plane_loops(grid, index, span) for index in indices]
    (dots0, sums0, rescale0), (dots1, sums1, rescale1), (dots2, sums2, rescale2) = made
    f0, f1, f2 = (cpu_vectors.factors(grid.widths, index, TILE) for index in indices)

    @numba.njit(**OPTIONS)
    def set_scaled(raw, factors, count, found):
        """Set `found` `[rows, count]` to one plane's products times the token factors."""
        for h in range(raw.shape[0]):
            line, out = raw[h], found[h]
            for t in range(count):
                out[t] = line[t] * factors[t]

    @numba.njit(**OPTIONS)
    def add_scaled(raw, factors, count, found):
        """Add one plane's products times the token factors to `found` `[rows, count]`."""
        for h in range(raw.shape[0]):
            line, out = raw[h], found[h]
            for t in range(count):
                out[t] += line[t] * factors[t]

    @numba.njit(**OPTIONS)
    def products(queries, planes, first, channel, count, raw, found):
        dots0(queries, planes[0], channel, first, count, raw)
        set_scaled(raw, f0, count, found)
        if number > 1:
            dots1(queries, planes[1 if number > 1 else 0], channel, first, count, raw)
            add_scaled(raw, f1, count, found)
        if number > 2:
            dots2(queries, planes[2 if number > 2 else 0], channel, first, count, raw)
            add_scaled(raw, f2, count, found)

    @numba.njit(**OPTIONS)
    def mixed(weights, planes, first, channel, count, ready, out):
        rescale0(weights, ready)
        sums0(ready, planes[0], channel, first, count, out)
        if number > 1:
            rescale1(weights, ready)
            sums1(ready, planes[1 if number > 1 else 0], channel, first, count, out)
        if number > 2:
            rescale2(weights, ready)
            sums2(ready, planes[2 if number > 2 else 0], channel, first, count, out)

    return products, mixed


@no_type_check
def _one_plane_loops(grid, index, span):
    """One plane's products and sums, and what multiplies weights by the factors of its masked codes."""
    width = grid.widths[index]
    dots, sums = (loop_over_rows(functools.partial(make, width, span)) for make in (cpu_vectors.dots, cpu_vectors.sums))
    factors = cpu_vectors.factors(grid.widths, index, TILE)

    @numba.njit(**OPTIONS)
    def rescale(weights, ready):
        for h in range(weights.shape[0]):
            line, out = weights[h], ready[h]
            for i in range(TILE):
                out[i] = line[i] * factors[i]

    return dots, sums, rescale


@functools.cache
@no_type_check
def statistics_loop(low: str, top: int, groups: int):
    """A loop that reads the statistics of `count` tokens (or channels), each with `groups`, from the place `start` on.

    `floats[0, group]` become their steps and `floats[1, group]` their lowest values.
    """
    many, one = (cpu_vectors.statistics(groups, low, top, lanes) for lanes in (cpu_vectors.LANES, 1))

    @numba.njit(**OPTIONS)
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
    return Loops(*map(_loop_over_heads, made))


@no_type_check
def _loop_over_heads(loop):
    """A loop over the heads of `rows` and `out`; `planes`, `scale`, `low` are flat, `places` as `head_plane` has them.

    `norms` are those of each head, or of all. `places[3, 0]` and `places[4, 0]`: scales and lows from head to head.
    """

    @numba.njit(**OPTIONS)
    def all_heads(rows, planes, places, scale, low, size, norms, start, tokens, out):
        for h in range(rows.shape[0]):
            own = (head_plane(planes, places, 0, h), head_plane(planes, places, 1, h), head_plane(planes, places, 2, h))
            own_scale, own_low = scale[h * places[3, 0] :], low[h * places[4, 0] :]
            loop(rows[h], own, own_scale, own_low, size, norms[min(h, len(norms) - 1)], start, tokens, out[h])

    return all_heads


@no_type_check
def _channel_scores(grid):
    """Scores of a segment whose groups are `size` tokens of one channel."""
    dim, read, (products, _) = grid.dim, statistics_loop(grid.low, grid.top, 1), _plane_loops(grid, grid.dim)

    @numba.njit(**OPTIONS)
    def scores(query, planes, scale, low, size, norms, start, tokens, out):
        rows = out.shape[0]
        raw, found = np.empty((rows, TILE), np.float32), np.empty((rows, TILE), np.float32)
        folded, least = np.empty((rows, dim), np.float32), np.empty(rows, np.float32)
        floats = np.empty((2, 1, dim), np.float32)
        steps, lows = floats[0, 0], floats[1, 0]
        for group in range((tokens + size - 1) // size):
            read(scale, low, group * dim, dim, floats)
            for h in range(rows):
                part = np.float32(0)
                for c in range(dim):
                    folded[h, c] = query[h, c] * steps[c]
                    part += query[h, c] * lows[c]
                least[h] = part
            end = min((group + 1) * size, tokens)
            for token in range(group * size, end, TILE):
                count = min(TILE, end - token)
                products(folded, planes, token, 0, count, raw, found)
                near = norms[start + token : start + token + count]
                for h in range(rows):
                    line, here, lowest = out[h, start + token : start + token + count], found[h], least[h]
                    for t in range(count):
                        line[t] = (here[t] + lowest) * near[t]

    return scores


@no_type_check
def _channel_mix(grid):
    """Weighted sums of a segment whose groups are `size` tokens of one channel, added to `out`."""
    dim, read, (_, mixed) = grid.dim, statistics_loop(grid.low, grid.top, 1), _plane_loops(grid, grid.dim)

    @numba.njit(**OPTIONS)
    def mix(weights, planes, scale, low, size, norms, start, tokens, out):
        rows = weights.shape[0]
        near, ready = np.zeros((rows, TILE), np.float32), np.zeros((rows, TILE), np.float32)
        part, total = np.empty((rows, dim), np.float32), np.empty(rows, np.float32)
        floats = np.empty((2, 1, dim), np.float32)
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
                mixed(near, planes, token, 0, count, ready, part)
            for h in range(rows):
                for c in range(dim):
                    out[h, c] += part[h, c] * steps[c] + total[h] * lows[c]

    return mix


@no_type_check
def _token_scores(grid):
    """Scores of a segment whose groups are `grid.channels` channels of one token."""
    dim, span, groups = grid.dim, grid.channels, grid.dim // grid.channels
    read, (products, _) = statistics_loop(grid.low, grid.top, groups), _plane_loops(grid, span)

    @numba.njit(**OPTIONS)
    def scores(query, planes, scale, low, size, norms, start, tokens, out):
        rows = out.shape[0]
        raw, found = np.empty((rows, TILE), np.float32), np.empty((rows, TILE), np.float32)
        whole, floats = np.zeros((rows, groups), np.float32), np.empty((2, groups, TILE), np.float32)
        for h in range(rows):
            for c in range(dim):
                whole[h, c // span] += query[h, c]
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(scale, low, token * groups, count, floats)
            near = norms[start + token : start + token + count]
            for group in range(groups):
                products(query[:, group * span : (group + 1) * span], planes, token, group * span, count, raw, found)
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
    """Weighted sums of a segment with `grid.channels` channels of a token to a group; its weights take the steps."""
    span, groups = grid.channels, grid.dim // grid.channels
    read, (_, mixed) = statistics_loop(grid.low, grid.top, groups), _plane_loops(grid, span)

    @numba.njit(**OPTIONS)
    def mix(weights, planes, scale, low, size, norms, start, tokens, out):
        rows = weights.shape[0]
        near, stepped = np.zeros((rows, TILE), np.float32), np.zeros((rows, TILE), np.float32)
        ready, least = np.zeros((rows, TILE), np.float32), np.zeros((groups, rows, TILE), np.float32)
        floats = np.zeros((2, groups, TILE), np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(scale, low, token * groups, count, floats)
            norm = norms[start + token : start + token + count]
            for h in range(rows):
                line, here = weights[h, start + token : start + token + count], near[h]
                here[count:] = 0
                for t in range(count):
                    here[t] = line[t] * norm[t]
            for group in range(groups):
                steps, lows = floats[0, group], floats[1, group]
                for h in range(rows):
                    here, line, lowest = near[h], stepped[h], least[group, h]
                    for i in range(TILE):
                        line[i] = here[i] * steps[i]
                        lowest[i] += here[i] * lows[i]
                mixed(stepped, planes, token, group * span, count, ready, out)
        for h in range(rows):
            for group in range(groups):
                total = least[group, h].sum()
                for c in range(span):
                    out[h, group * span + c] += total

    return mix
