"""Encoding in one pass on a CPU: loops compiled by numba for one head dim, over slices that fit a second-level cache.

Divisions and roundings are IEEE operations in the codec's order, so that codes are the same, but for the order of sums.
NSNQuant's nearest entry c of 8 channels v has the largest v·c - |c|²/2; of equal ones the first, as in the codec.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import VectorQuantizer
from kvq.codecs.quantizers import Parts, to_stored
from kvq_kernels.cpu import pool
from kvq_kernels.cpu_books import GROUP
from kvq_kernels.cpu_loops import highest
from kvq_kernels.uniform_chain import ROWS, Grids, UniformChain, book_columns, fit_grids, gain_of, parts_of_search

ENTRIES = 256
"""Of a codebook."""

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_EXACT = _OPTIONS | {"fastmath": False}
_SUMS = _OPTIONS | {"fastmath": True}


@dataclass(frozen=True)
class Loops:
    """Compiled for one head dim and one size of group along channels; see the functions that make them."""

    rotate: Callable[..., Any]
    normalize: Callable[..., Any]
    channel_ranges: Callable[..., Any]
    token_ranges: Callable[..., Any]
    channel_codes: Callable[..., Any]
    token_codes: Callable[..., Any]
    pack: Callable[..., Any]
    gains: Callable[..., Any]


@functools.cache
def loops_for(dim: int, channels: int) -> Loops:
    """Compile (each at its first call) the loops for `dim` channels, per token in groups of `channels`."""
    of_channels, of_tokens = _range_loops(dim, channels)
    channel_codes, token_codes = _code_loops(dim, channels)
    pack, gains = _pack_loop(dim), _gain_loop(dim, channels)
    return Loops(_rotation_loop(dim), _unit_loop(dim), of_channels, of_tokens, channel_codes, token_codes, pack, gains)


@no_type_check
def _rotation_loop(dim):
    """A loop that multiplies rows by Sylvester's Hadamard matrix over `sqrt(dim)`, in place, after a sign per channel.

    A step interleaves sums and differences of the first and the second half. All steps are equal, and after log2(dim)
    of them the channels are in order.
    """
    half, steps, root = dim // 2, dim.bit_length() - 1, np.float32(dim**-0.5)

    @numba.njit(**_EXACT)
    def step(source, target):
        for i in range(half):
            a, b = source[i], source[i + half]
            target[2 * i] = a + b
            target[2 * i + 1] = a - b

    @numba.njit(**_EXACT)
    def rotate(rows, signs):
        one, two = np.empty(dim, np.float32), np.empty(dim, np.float32)
        for t in range(rows.shape[0]):
            for c in range(dim):
                one[c] = rows[t, c] * signs[c]
            for _ in range(steps // 2):
                step(one, two)
                step(two, one)
            if steps % 2:
                step(one, two)
                one, two = two, one
            for c in range(dim):
                rows[t, c] = one[c] * root

    return rotate


@no_type_check
def _unit_loop(dim):
    """The loop `normalize`, which divides each row by its norm."""

    @numba.njit(**_SUMS)
    def squares(row):
        total = np.float32(0)
        for c in range(dim):
            total += row[c] * row[c]
        return total

    @numba.njit(**_EXACT)
    def normalize(rows, norms, root):
        """Divide each row in place by its Euclidean norm over `root`, which is written to `norms`."""
        for t in range(rows.shape[0]):
            norm = np.sqrt(squares(rows[t])) / root
            norms[t] = norm
            by = norm if norm != 0 else np.float32(1)
            for c in range(dim):
                rows[t, c] = rows[t, c] / by

    return normalize


@no_type_check
def _range_loops(dim, channels):
    """Loops that find minimum and maximum per channel and group of tokens, and per token and group of channels."""
    groups = (dim + channels - 1) // channels

    @numba.njit(**_EXACT)
    def channel_ranges(blocks, size, low, high):
        """Least and greatest values of groups of `size` tokens, into `[blocks, groups, dim]`."""
        for block in range(blocks.shape[0]):
            for t in range(blocks.shape[1]):
                row, group = blocks[block, t], t // size
                least, most = low[block, group], high[block, group]
                if t % size == 0:
                    least[:] = row
                    most[:] = row
                for c in range(dim):
                    x = row[c]
                    least[c] = x if x < least[c] else least[c]
                    most[c] = x if x > most[c] else most[c]

    @numba.njit(**_SUMS)
    def token_ranges(blocks, size, low, high):
        for block in range(blocks.shape[0]):
            for t in range(blocks.shape[1]):
                row = blocks[block, t]
                for group in range(groups):
                    part = row[group * channels : min(dim, (group + 1) * channels)]
                    least, most = part[0], part[0]
                    for c in range(part.shape[0]):
                        least = min(least, part[c])
                        most = max(most, part[c])
                    low[block, t, group], high[block, t, group] = least, most

    return channel_ranges, token_ranges


@no_type_check
def _code_loops(dim, channels):
    """Loops that round blocks to codes, with statistics per channel and group of tokens, and per token and channels."""
    groups = (dim + channels - 1) // channels

    @numba.njit(**_EXACT)
    def channel_codes(blocks, size, step, base, zero, top, codes):
        """Codes of blocks, by statistics per group of `size` tokens."""
        for block in range(blocks.shape[0]):
            for t in range(blocks.shape[1]):
                group, row, out = t // size, blocks[block, t], codes[block, t]
                near, a, z = step[block, group], base[block, group], zero[block, group]
                for c in range(dim):
                    code = np.rint((row[c] - a[c]) / near[c]) + z[c]
                    code = code if code > 0 else np.float32(0)
                    out[c] = np.uint8(np.int32(code if code < top else top))

    @numba.njit(**_EXACT)
    def token_codes(blocks, size, step, base, zero, top, codes):
        for block in range(blocks.shape[0]):
            for t in range(blocks.shape[1]):
                for group in range(groups):
                    near, a, z = step[block, t, group], base[block, t, group], zero[block, t, group]
                    row = blocks[block, t, group * channels : min(dim, (group + 1) * channels)]
                    out = codes[block, t, group * channels : min(dim, (group + 1) * channels)]
                    for c in range(row.shape[0]):
                        code = np.rint((row[c] - a) / near) + z
                        code = code if code > 0 else np.float32(0)
                        out[c] = np.uint8(np.int32(code if code < top else top))

    return channel_codes, token_codes


@no_type_check
def _pack_loop(dim):
    """The loop that packs one plane of the codes of blocks, which are padded with rows of zeros after their tokens."""

    @numba.njit(**_EXACT)
    def pack(codes, shift, width, plane):
        per_byte, mask = 8 // width, np.uint8((1 << width) - 1)
        for block in range(plane.shape[0]):
            for r in range(plane.shape[1]):
                out = plane[block, r]
                out[:] = 0
                for k in range(per_byte):
                    row, place = codes[block, r * per_byte + k], np.uint8(width * k)
                    for c in range(dim):
                        out[c] |= ((row[c] >> shift) & mask) << place

    return pack


@no_type_check
def _gain_loop(dim, channels):
    """A loop that computes, for each token x and its decoded form h, the inner products x·x, x·h and h·h."""

    @numba.njit(**_SUMS)
    def channel_gain(row, codes, low, scale, zero):
        a, b, c = np.float32(0), np.float32(0), np.float32(0)
        for d in range(dim):
            x, y = row[d], low[d] + (np.float32(codes[d]) - zero[d]) * scale[d]
            a, b, c = a + x * x, b + x * y, c + y * y
        return a, b, c

    @numba.njit(**_SUMS)
    def token_gain(row, codes, low, scale, zero):
        a, b, c = np.float32(0), np.float32(0), np.float32(0)
        for d in range(dim):
            group, x = d // channels, row[d]
            y = low[group] + (np.float32(codes[d]) - zero[group]) * scale[group]
            a, b, c = a + x * x, b + x * y, c + y * y
        return a, b, c

    @numba.njit(**_SUMS)
    def gains(blocks, codes, size, per_channel, low, scale, zero, products):
        for block in range(blocks.shape[0]):
            for t in range(blocks.shape[1]):
                row, code = blocks[block, t], codes[block, t]
                if per_channel:
                    at = t // size
                    out = channel_gain(row, code, low[block, at], scale[block, at], zero[block, at])
                else:
                    out = token_gain(row, code, low[block, t], scale[block, t], zero[block, t])
                products[0, block, t], products[1, block, t], products[2, block, t] = out

    return gains


def encode(chain: UniformChain, blocks: Float[Tensor, "batch blocks heads tokens head_dim"]) -> Parts:
    """The parts of `Codec.encode_block`, each `[batch, blocks, heads, rows, columns]`."""
    batch, count, heads, tokens, dim = blocks.shape
    flat = blocks.detach().transpose(1, 2).flatten(0, 2)
    step = max(1, ROWS // tokens)
    slices = [flat[start : start + step] for start in range(0, flat.shape[0], step)]
    loops = loops_for(dim, dim if chain.per_channel else chain.group(tokens, dim)[0])
    matrix = chain.matrix(dim, torch.empty(0))
    threads = min(torch.get_num_threads(), len(slices))
    if threads == 1:
        encoded = [_encode(chain, loops, matrix, some) for some in slices]
    else:
        encoded = list(pool(threads).map(lambda some: _encode(chain, loops, matrix, some), slices))
    return {
        name: torch.cat([parts[name] for parts in encoded]).unflatten(0, (batch, heads, count)).transpose(1, 2)
        for name in encoded[0]
    }


def _encode(
    chain: UniformChain, loops: Loops, matrix: Tensor | None, blocks: Float[Tensor, "blocks tokens dim"]
) -> Parts:
    """Encode blocks by compiled loops into parts `[blocks, rows, columns]`, by name."""
    count, tokens, dim = blocks.shape
    y = blocks.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if matrix is not None and chain.signs and dim.bit_count() == 1:
        loops.rotate(y.view(-1, dim).numpy(), matrix[:, 0].sign().numpy())
    elif matrix is not None:
        y = y @ matrix
    norms = torch.empty(count, tokens, 1)
    if chain.norm is not None:
        loops.normalize(y.view(-1, dim).numpy(), norms.view(-1).numpy(), dim**0.5 if chain.rms else 1.0)
    size, groups = chain.group(tokens, dim)
    shape = (count, groups, dim) if chain.per_channel else (count, tokens, groups)
    low, high = torch.empty(shape), torch.empty(shape)
    ranges = loops.channel_ranges if chain.per_channel else loops.token_ranges
    ranges(y.numpy(), size, low.numpy(), high.numpy())
    grid = fit_grids(chain.quantizer, low, high)
    # A byte holds zeros after the last token.
    codes = torch.zeros(count, -(-tokens // 8) * 8, dim, dtype=torch.uint8)
    coder = loops.channel_codes if chain.per_channel else loops.token_codes
    coder(y.numpy(), size, grid.step.numpy(), grid.base.numpy(), grid.zero.numpy(), chain.top, codes.numpy())
    parts, shift = dict(grid.stored), 0
    for index, width in enumerate(chain.widths):
        parts[f"codes.{index}"] = plane = torch.empty(count, -(-tokens * width // 8), dim, dtype=torch.uint8)
        loops.pack(codes.numpy(), shift, width, plane.numpy())
        shift += width
    gain = None if chain.gain_name is None else _gains(chain, loops, y, codes, size, grid)
    if chain.norm is not None:
        parts[f"{chain.norm}.scale"] = to_stored(norms if gain is None else norms * gain, torch.float16)
    elif gain is not None:
        parts["gain"] = to_stored(gain, torch.float16)
    return parts


def _gains(chain: UniformChain, loops: Loops, y: Tensor, codes: Tensor, size: int, grid: Grids) -> Tensor:
    """The gains `[blocks, tokens, 1]` of tokens `y`, from their codes and statistics."""
    products = torch.empty(3, *y.shape[:2])
    low, scale, zero = (part.numpy() for part in (grid.low, grid.scale, grid.zero))
    loops.gains(y.numpy(), codes.numpy(), size, chain.per_channel, low, scale, zero, products.numpy())
    return gain_of(chain.quantizer.gain, *products)[..., None]


def search(
    quantizer: VectorQuantizer, y: Float[Tensor, "*lead tokens dim"]
) -> tuple[Parts, Float[Tensor, "*lead tokens 1"] | None]:
    """Codes and gains of `y` (fp32), see `parts_of_search`."""
    signed, rows = quantizer.bits == 2, y.reshape(-1, GROUP).float()
    codes = torch.empty(2 if signed else 1, len(rows), dtype=torch.uint8)
    scores = torch.empty(len(rows))
    columns = book_columns(quantizer.codebook, quantizer.bits, y.device).numpy()
    _search_loop(signed)(rows.numpy(), columns, codes[0].numpy(), codes[-1].numpy(), scores.numpy())
    return parts_of_search(quantizer, y, codes, scores)


@functools.cache
@no_type_check
def _search_loop(signed):
    """The loop `(rows, columns, codes, signs, scores)` that finds the nearest codebook entry of vectors `[count, 8]`.

    It writes the entry's index to `codes`, its score to `scores` and, if `signed`, the vector's signs to `signs`.
    """

    @numba.njit(**_OPTIONS, fastmath={"contract"})
    def score_entries(vector, columns, line):
        v0, v1, v2, v3, v4, v5, v6, v7 = vector
        for e in range(ENTRIES):
            score = columns[8, e] + v0 * columns[0, e] + v1 * columns[1, e] + v2 * columns[2, e] + v3 * columns[3, e]
            line[e] = score + v4 * columns[4, e] + v5 * columns[5, e] + v6 * columns[6, e] + v7 * columns[7, e]

    @numba.njit(**_OPTIONS)
    def loop(rows, columns, codes, signs, scores):
        line = np.empty(ENTRIES, np.float32)
        for row in range(rows.shape[0]):
            v = rows[row]
            if signed:
                byte = 0
                for i in range(GROUP):
                    byte |= (v[i] < 0) << i
                signs[row] = byte
                eight = abs(v[0]), abs(v[1]), abs(v[2]), abs(v[3]), abs(v[4]), abs(v[5]), abs(v[6]), abs(v[7])
            else:
                eight = v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]
            score_entries(eight, columns, line)
            top, place = highest(line), np.int32(ENTRIES - 1)
            for e in range(ENTRIES):
                place = min(place, np.int32(e) if line[e] == top else np.int32(ENTRIES - 1))
            codes[row], scores[row] = place, top

    return loop
