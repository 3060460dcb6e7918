"""The loops of attention on packed codes on a CPU, compiled by numba for one head dim and one kind of codes.

Codes meet queries and weights as they are read (`cpu_values`) and are never written to memory. Steps of groups of
tokens are folded into the queries or applied after a sum, those of a token into its score or weight. The loops are
written so that a compiler vectorizes them: constant bounds, contiguous numbers, independent sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, no_type_check

import numba
import numpy as np

from kvq_kernels.cpu_books import book_loops
from kvq_kernels.cpu_values import OPTIONS, TILE, padded, single, value_loops


@dataclass(frozen=True)
class Codes:
    """The parameters that loops are compiled for.

    Attributes:
        kind, widths, rows, book: see `value_loops` and `book_loops`.
        dim, channels: of a head, and of a group whose statistics are per token, a divisor of `dim`.
        per_channel: statistics are per channel and group of tokens.
        low: how a group's lowest value is stored: `float` (fp16), `integer` (a zero point in int16), `symmetric` (`top`
            steps below zero), or `none`: there are no statistics.
    """

    kind: str
    widths: tuple[int, ...]
    dim: int
    channels: int
    per_channel: bool = False
    low: str = "none"
    top: int = 0
    rows: int = 4
    book: bytes = field(default=b"", repr=False)


Loops = tuple[Callable[..., Any], Callable[..., Any]]
"""`scores(queries, planes, places, tables, scale, low, size, norms, start, tokens, out)` of some heads and `mix`.

`scores` writes `out[head, row, start ...]`, `mix(weights, ...)` adds weighted sums over tokens from `start` on to
`out[head, row]`. `planes`, `scale` and `low` are flat, `places` as `head_plane` has them, `tables` as in `value_loops`,
`size` tokens are a group per channel, `norms` `[heads or 1, all tokens]`.
"""


@functools.cache
def loops_for(codes: Codes) -> Loops:
    """Compile (each at its first call) the loops of one kind of codes."""
    scores, mix = (_channel_scores, _channel_mix) if codes.per_channel else (_token_scores, _token_mix)
    return _loop_over_heads(scores(codes)), _loop_over_heads(mix(codes))


@numba.njit(**OPTIONS)
@no_type_check
def head_plane(planes, places, index, head):
    """Rows of bytes of one head; `places[index]`: bytes from head to head, rows, and columns of a plane."""
    step, rows, columns = places[index]
    return planes[index][head * step : head * step + rows * columns].reshape(rows, columns)


@no_type_check
def _loop_over_heads(loop):
    """A loop that calls `loop` for each head, with the planes, statistics and norms of that head.

    `places[3, 0]` and `places[4, 0]`: number of scales, and of lowest values, from one head to the next.
    """

    @numba.njit(**OPTIONS)
    def all_heads(rows, planes, places, tables, scale, low, size, norms, start, tokens, out):
        for h in range(rows.shape[0]):
            first, second = head_plane(planes, places, 0, h), head_plane(planes, places, 1, h)
            head_planes = first, second, head_plane(planes, places, 2, h)
            statistics = scale[h * places[3, 0] :], low[h * places[4, 0] :]
            near = norms[min(h, len(norms) - 1)][start : start + tokens]
            loop(rows[h], head_planes, tables, statistics, size, near, start, tokens, out[h])

    return all_heads


@no_type_check
def _value_loops(codes, span):
    """The loops `dots` and `sums` for `span` channels of codes."""
    if codes.kind.endswith("book"):
        return book_loops(codes.kind, codes.book, span, codes.rows)
    return value_loops(codes.kind, codes.widths, span, codes.rows)


@no_type_check
def _statistics_loop(codes, groups):
    """A loop that reads the statistics of `count` tokens (or channels) of `groups` groups each, from index `start` on.

    `floats[0, group]` become their steps and `floats[1, group]` their lowest values; `flat`: scratch of as many.
    """
    kind, top = codes.low, np.float32(codes.top)

    @numba.njit(**OPTIONS)
    def read(statistics, start, count, flat, floats):
        numbers = count * groups
        scale, low = statistics[0][start : start + numbers], statistics[1][start : start + numbers]
        steps, lows = flat[0], flat[1]
        for i in range(numbers):
            if kind == "none":
                steps[i], lows[i] = np.float32(1), np.float32(0)
            else:
                steps[i] = single(scale[i])
            if kind == "float":
                lows[i] = single(low[i])
            elif kind == "integer":
                lows[i] = -steps[i] * np.float32(low[i])
            elif kind == "symmetric":
                lows[i] = -steps[i] * top
        for group in range(groups):
            to_steps, to_lows = floats[0, group], floats[1, group]
            for i in range(count):
                to_steps[i], to_lows[i] = steps[i * groups + group], lows[i * groups + group]

    return read


@no_type_check
def _channel_scores(codes):
    """A loop that computes the scores of a segment with statistics per channel and group of `size` tokens."""
    dim, read = codes.dim, _statistics_loop(codes, 1)
    dots, _ = _value_loops(codes, dim)

    @numba.njit(**OPTIONS)
    def scores(query, planes, tables, statistics, size, norms, start, tokens, out):
        rows = out.shape[0]
        products, folded = np.empty((padded(rows), TILE), np.float32), np.zeros((padded(rows), dim), np.float32)
        least, flat, floats = (
            np.empty(rows, np.float32),
            np.empty((2, dim), np.float32),
            np.empty((2, 1, dim), np.float32),
        )
        steps, lows = floats[0, 0], floats[1, 0]
        for group in range((tokens + size - 1) // size):
            read(statistics, group * dim, dim, flat, floats)
            for h in range(rows):
                part, head_query, line = np.float32(0), query[h], folded[h]
                for c in range(dim):
                    line[c] = head_query[c] * steps[c]
                    part += head_query[c] * lows[c]
                least[h] = part
            end = min((group + 1) * size, tokens)
            for token in range(group * size, end, TILE):
                count = min(TILE, end - token)
                dots(folded, planes, tables, token, 0, count, products)
                near = norms[token : token + count]
                for h in range(rows):
                    line, here, lowest = out[h, start + token : start + token + count], products[h], least[h]
                    for t in range(count):
                        line[t] = (here[t] + lowest) * near[t]

    return scores


@no_type_check
def _channel_mix(codes):
    """A loop that adds the weighted sums of a segment with statistics per channel and group of `size` tokens."""
    dim, read = codes.dim, _statistics_loop(codes, 1)
    _, sums = _value_loops(codes, dim)

    @numba.njit(**OPTIONS)
    def mix(weights, planes, tables, statistics, size, norms, start, tokens, out):
        rows = weights.shape[0]
        near, part = np.zeros((padded(rows), TILE), np.float32), np.empty((padded(rows), dim), np.float32)
        total, flat, floats = (
            np.empty(rows, np.float32),
            np.empty((2, dim), np.float32),
            np.empty((2, 1, dim), np.float32),
        )
        steps, lows = floats[0, 0], floats[1, 0]
        for group in range((tokens + size - 1) // size):
            read(statistics, group * dim, dim, flat, floats)
            part[:] = 0
            total[:] = 0
            end = min((group + 1) * size, tokens)
            for token in range(group * size, end, TILE):
                count = min(TILE, end - token)
                norm = norms[token : token + count]
                for h in range(rows):
                    line, here, all_of = weights[h, start + token : start + token + count], near[h], np.float32(0)
                    here[count:] = 0
                    for t in range(count):
                        here[t] = line[t] * norm[t]
                        all_of += here[t]
                    total[h] += all_of
                sums(near, planes, tables, token, 0, count, part)
            for h in range(rows):
                for c in range(dim):
                    out[h, c] += part[h, c] * steps[c] + total[h] * lows[c]

    return mix


@no_type_check
def _token_scores(codes):
    """A loop that computes the scores of a segment with statistics per token and `codes.channels` channels."""
    dim, span, groups = codes.dim, codes.channels, codes.dim // codes.channels
    read, (dots, _) = (_statistics_loop(codes, groups), _value_loops(codes, span))

    @numba.njit(**OPTIONS)
    def scores(query, planes, tables, statistics, size, norms, start, tokens, out):
        rows = out.shape[0]
        products, queries = np.empty((padded(rows), TILE), np.float32), np.zeros((padded(rows), dim), np.float32)
        whole, floats = np.zeros((rows, groups), np.float32), np.empty((2, groups, TILE), np.float32)
        flat = np.empty((2, groups * TILE), np.float32)
        for h in range(rows):
            for c in range(dim):
                queries[h, c] = query[h, c]
                whole[h, c // span] += query[h, c]
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(statistics, token * groups, count, flat, floats)
            near = norms[token : token + count]
            for group in range(groups):
                dots(queries, planes, tables, token, group * span, count, products)
                for h in range(rows):
                    line, here, sum_of = out[h, start + token : start + token + count], products[h], whole[h, group]
                    steps, lows = floats[0, group], floats[1, group]
                    if group == 0:
                        line[:] = 0
                    for t in range(count):
                        line[t] += (here[t] * steps[t] + sum_of * lows[t]) * near[t]

    return scores


@no_type_check
def _token_mix(codes):
    """A loop that adds the weighted sums of a segment with statistics per token and `codes.channels` channels."""
    dim, span, groups = codes.dim, codes.channels, codes.dim // codes.channels
    read, (_, sums) = (_statistics_loop(codes, groups), _value_loops(codes, span))

    @numba.njit(**OPTIONS)
    def mix(weights, planes, tables, statistics, size, norms, start, tokens, out):
        rows = weights.shape[0]
        stepped, part = np.zeros((padded(rows), TILE), np.float32), np.zeros((padded(rows), dim), np.float32)
        least, floats = np.zeros((groups, rows), np.float32), np.empty((2, groups, TILE), np.float32)
        flat = np.empty((2, groups * TILE), np.float32)
        for token in range(0, tokens, TILE):
            count = min(TILE, tokens - token)
            read(statistics, token * groups, count, flat, floats)
            norm = norms[token : token + count]
            for group in range(groups):
                steps, lows = floats[0, group], floats[1, group]
                for h in range(rows):
                    line, here = weights[h, start + token : start + token + count], stepped[h]
                    lowest = np.float32(0)
                    here[count:] = 0
                    for t in range(count):
                        near = line[t] * norm[t]
                        here[t] = near * steps[t]
                        lowest += near * lows[t]
                    least[group, h] += lowest
                sums(stepped, planes, tables, token, group * span, count, part)
        for h in range(rows):
            for c in range(dim):
                out[h, c] += part[h, c] + least[c // span, h]

    return mix


_EXP2 = (1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477)
_EXP2_HIGH = (0.0013333558146428443, 0.00015403530393381608)


@numba.njit(**OPTIONS)
@no_type_check
def highest(numbers):
    """The largest of some fp32 numbers, compared as integers: that loop is vectorized, one over floats is not.

    Bits of floats, with all but the sign of a negative one inverted, are ordered as integers are.
    """
    bits, rest = numbers.view(np.int32), np.int32(0x7FFFFFFF)
    most = np.int32(-rest)
    for i in range(bits.shape[0]):
        most = max(most, np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & rest)))
    return np.int32(most ^ ((most >> np.int32(31)) & rest)).view(np.float32)


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
