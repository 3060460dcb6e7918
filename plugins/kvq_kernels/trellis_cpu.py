"""Trellises on a CPU: search and reading in loops compiled by numba, as `kvq.codecs.trellis.Loops` has them."""

from __future__ import annotations

import functools
from typing import no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvq.codecs.trellis import WIDEST

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


@no_type_check
def _step(memory, width):
    """One component of `width` bits: costs of all states, and which predecessor each prefix has.

    State s' = p 2^width + c follows the states p + h 2^(memory - width), of which the cheapest is kept (of equal ones,
    the first). It is found by halves, so that most loops are wider than a vector.
    """
    states, prefixes, choices = 1 << memory, 1 << (memory - width), 1 << width

    @numba.njit(**_OPTIONS)
    def step(cost, best, least, back, book, x, weight):
        """Add component `x` to the path costs `[states]` in place; `back` gets predecessors; others: scratch."""
        half = states >> 1
        for s in range(half):
            other = cost[half + s]
            less = other < cost[s]
            best[s] = other if less else cost[s]
            least[s] = half + s if less else s
        half >>= 1
        while half >= prefixes:
            for s in range(half):
                one, other = best[s], best[half + s]
                less = (other < one) | ((other == one) & (least[half + s] < least[s]))
                best[s] = other if less else one
                least[s] = least[half + s] if less else least[s]
            half >>= 1
        for p in range(prefixes):
            back[p] = least[p] >> (memory - width)
        if choices == 16:  # LLVM unrolls a loop of 16 into single numbers
            for s in range(states):
                error = x - book[s]
                cost[s] = error * error * weight + best[s >> width]
        else:
            for p in range(prefixes):
                for c in range(choices):
                    error = x - book[p * choices + c]
                    cost[p * choices + c] = error * error * weight + best[p]

    return step


@functools.cache
@no_type_check
def searcher(memory):
    """The compiled loop `search(x, widths, weights, books, codes)` for a trellis of 2^`memory` states."""

    states = 1 << memory
    steps = tuple(_step(memory, min(width, memory)) for width in range(1, WIDEST + 1))
    one, two, three, four, five, six, seven, eight = steps

    @numba.njit(**_OPTIONS)
    def search(x, widths, weights, books, codes):
        """Viterbi search per row of `x` `[rows, components]`; writes `codes` of the same shape in place."""
        rows, components = x.shape
        cost, best = np.empty(states, np.float32), np.empty(states, np.float32)
        least, back = np.empty(states, np.int32), np.zeros((components, states >> 1), np.uint8)
        for row in range(rows):
            cost[:] = np.inf
            cost[0] = 0
            for i in range(components):
                width = widths[i]
                if width == 0:
                    continue
                predecessors, book, value, weight = back[i], books[width - 1], x[row, i], weights[i]
                if width == 1:
                    one(cost, best, least, predecessors, book, value, weight)
                elif width == 2:
                    two(cost, best, least, predecessors, book, value, weight)
                elif width == 3:
                    three(cost, best, least, predecessors, book, value, weight)
                elif width == 4:
                    four(cost, best, least, predecessors, book, value, weight)
                elif width == 5:
                    five(cost, best, least, predecessors, book, value, weight)
                elif width == 6:
                    six(cost, best, least, predecessors, book, value, weight)
                elif width == 7:
                    seven(cost, best, least, predecessors, book, value, weight)
                else:
                    eight(cost, best, least, predecessors, book, value, weight)
            state = np.argmin(cost)
            for i in range(components - 1, -1, -1):
                width = np.int64(widths[i])
                codes[row, i] = state & ((1 << width) - 1)
                if width:
                    prefix = state >> width
                    state = prefix | (np.int64(back[i, prefix]) << (memory - width))

    return search


@functools.cache
@no_type_check
def reader():
    """The loop `read(strings, starts, shifts, masks, entries, books, out)`; arguments as `values_of`."""

    @numba.njit(**_OPTIONS)
    def read(strings, starts, shifts, masks, entries, books, out):
        rows, components = out.shape
        for row in range(rows):
            string, line = strings[row], out[row]
            for i in range(components):
                at = starts[i]
                word = (np.int32(string[at]) << 16) | (np.int32(string[at + 1]) << 8) | np.int32(string[at + 2])
                line[i] = books[entries[i] + ((word >> shifts[i]) & masks[i])]

    return read


def codes_of(
    x: Float[Tensor, "rows components"],
    widths: tuple[int, ...],
    weights: Float[Tensor, " components"],
    books: Float[Tensor, "widths states"],
) -> UInt8[Tensor, "rows components"]:
    """The codes of least weighted error (`kvq.codecs.trellis.Loops.codes_of`)."""
    codes, fields = np.zeros(x.shape, np.uint8), np.array(widths, np.uint8)
    search = searcher(books.shape[1].bit_length() - 1)
    search(x.contiguous().numpy(), fields, weights.contiguous().numpy(), books.numpy(), codes)
    return torch.from_numpy(codes)


def values_of(
    strings: UInt8[Tensor, "rows bytes_around"],
    starts: Int[Tensor, " fields"],
    shifts: Int[Tensor, " fields"],
    masks: Int[Tensor, " fields"],
    entries: Int[Tensor, " fields"],
    books: Float[Tensor, " entries_in_all"],
) -> Float[Tensor, "rows fields"]:
    """The values of the fields of each string (`kvq.codecs.trellis.Loops.values_of`)."""
    out = torch.empty(len(strings), len(starts))
    reader()(*(part.numpy() for part in (strings, starts, shifts, masks, entries, books, out)))
    return out
