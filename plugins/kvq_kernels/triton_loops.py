"""Split-KV flash-decoding on packed codes (Triton): one program reads a range of tokens for all queries of a head.

Codes are loaded in stored form, unpacked in registers, and multiplied with the queries in matrix products whose rows
are the queries that share the head. Codes that index a table are looked up: its few KiB stay in the first-level cache.
There is no autotuning; sizes are arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

FLOAT, INTEGER, SYMMETRIC = 0, 1, 2
"""Uniform grids, by the storage of a group's lowest value: fp16, integer zero point, or none (symmetric)."""
LEVELS, BOOK, SIGNED_BOOK, SHIFTED_BOOK = 3, 4, 5, 6
"""Codes that index a table: one level a channel; one entry for 8 channels, with signs, with signs and a shift."""


class Side(NamedTuple):
    """Keys or values of a launch; strides are those of batch and head, in this order of tensors.

    Attributes:
        p0, p1, p2: planes of codes; unused ones repeat the first.
        scale, low: statistics of groups, of equal strides. By levels: both the table of levels in fp32. By a codebook:
            its entries `[256, 8]` in fp32, and int32 `[2, 256, 8]`: bits to flip in them, and fp32 shifts as bits.
        norms: a factor of each token.
        strides: of the planes, of `scale`, of `norms`.
        size: tokens (per channel) or channels (per token) of a group.
    """

    p0: Any
    p1: Any
    p2: Any
    scale: Any
    low: Any
    norms: Any
    strides: tuple[int, ...]
    size: int


class Shifts(NamedTuple):
    """Shifts of values: `vectors` `[batch, heads, blocks, dim]` after all rotations, `factors` of each token.

    `strides`: of both; `length`: tokens of a block, a multiple of a tile if there are several blocks.
    """

    vectors: Any
    factors: Any
    strides: tuple[int, ...]
    length: int


class Full(NamedTuple):
    """Tokens in full precision, and their strides."""

    k: Any
    v: Any
    strides: tuple[int, ...]


CHANGING = ["start", "tokens", "prefix", "rest", "packed_splits", "first_split", "all_splits", "first"]
"""Numbers that change as a cache grows: none of their values has a compilation of its own."""


@triton.jit
@no_type_check
def _plane(base, token, tokens, channels, dim, width: tl.constexpr, n: tl.constexpr, d: tl.constexpr):
    """The bits of one plane for `n` tokens from `token` (a multiple of 8) on: each byte is loaded once."""
    per: tl.constexpr = 8 // width
    rows = token // per + tl.arange(0, n // per)
    there = (rows[:, None] * per < tokens) & (channels[None, :] < dim)
    packed = tl.load(base + rows[:, None] * dim + channels[None, :], mask=there, other=0)
    shifts = tl.arange(0, per) * width
    codes = (packed.to(tl.int32)[:, None, :] >> shifts[None, :, None]) & ((1 << width) - 1)
    return tl.reshape(codes, (n, d))


@triton.jit
@no_type_check
def _codes(
    side, token, tokens, channels, dim,
    w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Codes `[n, d]` of `n` tokens from `token` on, joined from planes of `w0`, `w1` and `w2` bits (0: no plane)."""
    codes = _plane(side.p0, token, tokens, channels, dim, w0, n, d)
    if w1 > 0:
        codes += _plane(side.p1, token, tokens, channels, dim, w1, n, d) << w0
    if w2 > 0:
        codes += _plane(side.p2, token, tokens, channels, dim, w2, n, d) << (w0 + w1)
    return codes


@triton.jit
@no_type_check
def _entries(side, near, tokens, dim: tl.constexpr, kind: tl.constexpr, n: tl.constexpr, d: tl.constexpr):
    """Decoded values `[n, d]` of tokens `near` by a codebook: a byte of codes, loaded once, stands for 8 channels."""
    groups, inner = tl.arange(0, d // 8), tl.arange(0, 8)[None, None, :]
    there = (near[:, None] < tokens) & (groups[None, :] < dim // 8)
    where = near[:, None] * (dim // 8) + groups[None, :]
    codes = tl.load(side.p0 + where, mask=there, other=0).to(tl.int32)
    out = tl.load(side.scale + codes[:, :, None] * 8 + inner)
    if kind >= 5:  # SIGNED_BOOK
        signs = tl.load(side.p1 + where, mask=there, other=0).to(tl.int32)[:, :, None] * 8 + inner
        out = (out.to(tl.int32, bitcast=True) ^ tl.load(side.low + signs)).to(tl.float32, bitcast=True)
        if kind == 6:  # SHIFTED_BOOK
            out += tl.load(side.low + 256 * 8 + signs).to(tl.float32, bitcast=True)
    return tl.reshape(out, (n, d))


@triton.jit
@no_type_check
def _grid(scale, low, offsets, mask, kind: tl.constexpr, top: tl.constexpr):
    """Steps and lowest values of groups."""
    step = tl.load(scale + offsets, mask=mask, other=0.0).to(tl.float32)
    if kind == 0:
        least = tl.load(low + offsets, mask=mask, other=0.0).to(tl.float32)
    elif kind == 1:
        least = -step * tl.load(low + offsets, mask=mask, other=0).to(tl.float32)
    else:
        least = -step * top
    return step, least


@triton.jit
@no_type_check
def _decode(
    side, token, tokens, channels, dim: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr,
    kind: tl.constexpr, top: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Decoded values `[n, d]` of codes: by a table, or by statistics of `side.size` channels of a token."""
    near = token + tl.arange(0, n)
    if kind >= 4:  # BOOK
        return _entries(side, near, tokens, dim, kind, n, d)
    else:
        codes = _codes(side, token, tokens, channels, dim, w0, w1, w2, n, d)
        if kind == 3:  # LEVELS
            return tl.load(side.scale + codes)
        else:
            where = near[:, None] * ((dim + side.size - 1) // side.size) + channels[None, :] // side.size
            there = (near[:, None] < tokens) & (channels[None, :] < dim)
            step, least = _grid(side.scale, side.low, where, there, kind, top)
            return codes.to(tl.float32) * step + least


@triton.jit
@no_type_check
def _scores(
    q, side, token, tokens, channels, dim: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr,
    per_channel: tl.constexpr, kind: tl.constexpr, top: tl.constexpr,
    n: tl.constexpr, d: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Products of queries and keys, with steps per channel folded into the queries."""
    number = tl.float16 if half else tl.float32
    if per_channel:
        codes = _codes(side, token, tokens, channels, dim, w0, w1, w2, n, d)
        step, least = _grid(side.scale, side.low, token // side.size * dim + channels, channels < dim, kind, top)
        out = tl.dot((q * step[None, :]).to(number), tl.trans(codes.to(number)), input_precision="ieee")
        return out + tl.sum(q * least[None, :], 1)[:, None]
    else:
        keys = _decode(side, token, tokens, channels, dim, w0, w1, w2, kind, top, n, d)
        return tl.dot(q.to(number), tl.trans(keys.to(number)), input_precision="ieee")


@triton.jit
@no_type_check
def _mix(
    weights, side, token, tokens, channels, dim: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr,
    per_channel: tl.constexpr, kind: tl.constexpr, top: tl.constexpr,
    n: tl.constexpr, d: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Weighted sums `[rows, d]` of the values of a tile; steps per channel are applied after the product."""
    number = tl.float16 if half else tl.float32
    if per_channel:
        codes = _codes(side, token, tokens, channels, dim, w0, w1, w2, n, d)
        step, least = _grid(side.scale, side.low, token // side.size * dim + channels, channels < dim, kind, top)
        out = tl.dot(weights.to(number), codes.to(number), input_precision="ieee") * step[None, :]
        return out + tl.sum(weights, 1)[:, None] * least[None, :]
    else:
        values = _decode(side, token, tokens, channels, dim, w0, w1, w2, kind, top, n, d)
        return tl.dot(weights.to(number), values.to(number), input_precision="ieee")


@triton.jit
@no_type_check
def _mix_shift(weights, shifts, near, token, tokens, channels, dim):
    """Weighted sums `[rows, d]` of the shift of the block that holds a tile; `near`: the tile's tokens."""
    factors = tl.load(shifts.factors + near, mask=near < tokens, other=0.0)
    vector = tl.load(shifts.vectors + token // shifts.length * dim + channels, mask=channels < dim, other=0.0)
    return tl.sum(weights * factors[None, :], 1)[:, None] * vector[None, :]


@triton.jit
@no_type_check
def _at_head(side, b, h):
    """`side` with pointers moved to batch entry `b` and head `h`."""
    strides = side.strides
    grid = b * strides[6] + h * strides[7]
    return Side(
        side.p0 + b * strides[0] + h * strides[1],
        side.p1 + b * strides[2] + h * strides[3],
        side.p2 + b * strides[4] + h * strides[5],
        side.scale + grid, side.low + grid, side.norms + b * strides[8] + h * strides[9], strides, side.size,
    )  # fmt: skip


@triton.jit
@no_type_check
def _update_softmax(top, total, scores, seen, softcap, capped: tl.constexpr):
    """New maximum, sum of weights, the factor that rescales earlier sums, and the weights of these scores."""
    if capped:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    scores = tl.where(seen[None, :], scores, -1.0e30)
    high = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp(top - high)
    weights = tl.where(seen[None, :], tl.exp(scores - high[:, None]), 0.0)
    return high, total * shrink + tl.sum(weights, 1), shrink, weights


@triton.jit
@no_type_check
def _attend_full(
    q, keys, values, top, total, sums, tokens, hidden, channels, dim, scaling, softcap,
    capped: tl.constexpr, n: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Attend to the full-precision tokens, without the first `hidden`; return the updated maximum, total and sums."""
    number = tl.float16 if half else tl.float32
    for token in range(0, tokens, n):
        near = token + tl.arange(0, n)
        where = near[:, None] * dim + channels[None, :]
        fits = (near[:, None] < tokens) & (channels[None, :] < dim)
        scores = tl.dot(
            q.to(number), tl.trans(tl.load(keys + where, mask=fits, other=0.0).to(number)), input_precision="ieee"
        )
        scores *= scaling
        top, total, shrink, weights = _update_softmax(
            top, total, scores, (near >= hidden) & (near < tokens), softcap, capped
        )
        read = tl.load(values + where, mask=fits, other=0.0).to(number)
        sums = sums * shrink[:, None] + tl.dot(weights.to(number), read, input_precision="ieee")
    return top, total, sums


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def attend_split(
    q_rotated, q_plain, out, tops, totals, keys, k_shift, values, v_shifts, full, heads, group, start, tokens, prefix,
    rest, per_split, packed_splits, first_split, all_splits, first, scaling, softcap, dim: tl.constexpr,
    kw0: tl.constexpr, kw1: tl.constexpr, kw2: tl.constexpr, vw0: tl.constexpr, vw1: tl.constexpr, vw2: tl.constexpr,
    k_channel: tl.constexpr, v_channel: tl.constexpr, k_kind: tl.constexpr, v_kind: tl.constexpr, k_top: tl.constexpr,
    v_top: tl.constexpr, normed_k: tl.constexpr, normed_v: tl.constexpr, shifted_k: tl.constexpr,
    shifted_v: tl.constexpr, capped: tl.constexpr, n: tl.constexpr, d: tl.constexpr, rows: tl.constexpr,
    half: tl.constexpr,
):  # fmt: skip
    """One range of packed tokens, or (the last split of a launch, if there are any) the full-precision tokens after.

    Sums are stored relative to their own maximum, those of codes in the rotated space; `combine` joins them. `keys`
    and `values` are a `Side`, `v_shifts` is `Shifts`, `full` is `Full`. The `tokens` packed tokens of this launch
    follow `start` others. `k_shift` `[batch, heads, group, prefix]`: what keys' shifts add to scores before `scaling`.
    """
    split, place = tl.program_id(0), tl.program_id(1)
    # Offsets of a batch entry or head may not fit 32 bits.
    b, h = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    channels, queries = tl.arange(0, d), tl.arange(0, rows)
    seen = (queries[:, None] < group) & (channels[None, :] < dim)
    at = (place * group + queries[:, None]) * dim + channels[None, :]
    top, total = tl.full((rows,), -1.0e30, tl.float32), tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, d), tl.float32)
    if split < packed_splits:
        q = tl.load(q_rotated + at, mask=seen, other=0.0)
        k, v, strides = _at_head(keys, b, h), _at_head(values, b, h), v_shifts.strides
        moves = k_shift + (place.to(tl.int64) * group + queries[:, None]) * prefix + start
        shifts = Shifts(
            v_shifts.vectors + b * strides[0] + h * strides[1], v_shifts.factors + b * strides[2] + h * strides[3],
            strides, v_shifts.length,
        )  # fmt: skip
        for token in range(split * per_split, tl.minimum((split + 1) * per_split, tokens), n):
            near = token + tl.arange(0, n)
            scores = _scores(q, k, token, tokens, channels, dim, kw0, kw1, kw2, k_channel, k_kind, k_top, n, d, half)
            if normed_k:
                scores *= tl.load(k.norms + near, mask=near < tokens, other=0.0)[None, :]
            if shifted_k:
                there = (queries[:, None] < group) & (near[None, :] < tokens)
                scores += tl.load(moves + near[None, :], mask=there, other=0.0)
            top, total, shrink, weights = _update_softmax(
                top, total, scores * scaling, (near + start >= first) & (near < tokens), softcap, capped
            )
            sums *= shrink[:, None]
            if shifted_v:
                sums += _mix_shift(weights, shifts, near, token, tokens, channels, dim)
            if normed_v:
                weights *= tl.load(v.norms + near, mask=near < tokens, other=0.0)[None, :]
            sums += _mix(weights, v, token, tokens, channels, dim, vw0, vw1, vw2, v_channel, v_kind, v_top, n, d, half)
    else:
        strides = full.strides
        top, total, sums = _attend_full(
            tl.load(q_plain + at, mask=seen, other=0.0),
            full.k + b * strides[0] + h * strides[1], full.v + b * strides[2] + h * strides[3],
            top, total, sums, rest, first - start - tokens, channels, dim, scaling, softcap, capped, n, half,
        )  # fmt: skip
    line = (place.to(tl.int64) * all_splits + first_split + split) * group + queries
    tl.store(out + line[:, None] * dim + channels[None, :], sums, mask=seen)
    tl.store(tops + line, top, mask=queries < group)
    tl.store(totals + line, total, mask=queries < group)


@triton.jit
@no_type_check
def combine(out, tops, totals, rotated, plain, group, splits, packed_splits, dim: tl.constexpr, d: tl.constexpr):
    """Join the splits of one query by their log-sum-exp: those of codes, and the one of full-precision tokens."""
    place, query = tl.program_id(0), tl.program_id(1)
    channels = tl.arange(0, d)
    top, total = tl.full((), -1.0e30, tl.float32), tl.full((), 0.0, tl.float32)
    of_codes = tl.zeros((d,), tl.float32)
    of_rest = tl.zeros((d,), tl.float32)
    for split in range(splits):
        line = (place.to(tl.int64) * splits + split) * group + query
        high = tl.load(tops + line)
        more = tl.load(totals + line)
        sums = tl.load(out + line * dim + channels, mask=channels < dim, other=0.0)
        best = tl.maximum(top, high)
        shrink, scale = tl.exp(top - best), tl.exp(high - best)
        scale = tl.where(high > -1.0e29, scale, 0.0)
        total = total * shrink + more * scale
        of_codes *= shrink
        of_rest *= shrink
        if split < packed_splits:
            of_codes += sums * scale
        else:
            of_rest += sums * scale
        top = best
    at = (place * group + query) * dim + channels
    tl.store(rotated + at, of_codes / total, mask=channels < dim)
    tl.store(plain + at, of_rest / total, mask=channels < dim)
