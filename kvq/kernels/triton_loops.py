"""Split-KV flash-decoding on packed codes (Triton): one program reads a range of tokens for all queries of a head.

Codes are loaded in stored form, unpacked in registers, and multiplied with the queries in matrix products whose rows
are the queries that share the head. There is no autotuning; sizes are arguments.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

FLOAT, INTEGER, SYMMETRIC = 0, 1, 2
"""Storage of a group's lowest value: fp16, integer zero point, or none (symmetric)."""


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
    p0, p1, p2, token, tokens, channels, dim,
    w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    codes = _plane(p0, token, tokens, channels, dim, w0, n, d)
    if w1 > 0:
        codes += _plane(p1, token, tokens, channels, dim, w1, n, d) << w0
    if w2 > 0:
        codes += _plane(p2, token, tokens, channels, dim, w2, n, d) << (w0 + w1)
    return codes


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
def _per_token(codes, scale, low, near, tokens, channels, dim, size, kind: tl.constexpr, top: tl.constexpr):
    """Decoded values of codes, by statistics of `size` channels of a token."""
    where = near[:, None] * ((dim + size - 1) // size) + channels[None, :] // size
    step, least = _grid(scale, low, where, (near[:, None] < tokens) & (channels[None, :] < dim), kind, top)
    return codes.to(tl.float32) * step + least


@triton.jit
@no_type_check
def _scores(
    q, codes, scale, low, near, token, tokens, channels, dim, size,
    per_channel: tl.constexpr, kind: tl.constexpr, top: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Products of queries and keys, with steps per channel folded into the queries."""
    number = tl.float16 if half else tl.float32
    if per_channel:
        step, least = _grid(scale, low, token // size * dim + channels, channels < dim, kind, top)
        out = tl.dot((q * step[None, :]).to(number), tl.trans(codes.to(number)), input_precision="ieee")
        return out + tl.sum(q * least[None, :], 1)[:, None]
    else:
        keys = _per_token(codes, scale, low, near, tokens, channels, dim, size, kind, top)
        return tl.dot(q.to(number), tl.trans(keys.to(number)), input_precision="ieee")


@triton.jit
@no_type_check
def _mixed(
    weights, codes, scale, low, near, token, tokens, channels, dim, size,
    per_channel: tl.constexpr, kind: tl.constexpr, top: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Weighted sums of values; steps per channel are applied after the product."""
    number = tl.float16 if half else tl.float32
    if per_channel:
        step, least = _grid(scale, low, token // size * dim + channels, channels < dim, kind, top)
        out = tl.dot(weights.to(number), codes.to(number), input_precision="ieee") * step[None, :]
        return out + tl.sum(weights, 1)[:, None] * least[None, :]
    else:
        values = _per_token(codes, scale, low, near, tokens, channels, dim, size, kind, top)
        return tl.dot(weights.to(number), values.to(number), input_precision="ieee")


@triton.jit
@no_type_check
def _joined(top, total, scores, seen, softcap, capped: tl.constexpr):
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
def _rest(
    q, keys, values, top, total, sums, tokens, hidden, channels, dim, scaling, softcap,
    capped: tl.constexpr, n: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Full-precision tokens, the first `hidden` of which are masked."""
    number = tl.float16 if half else tl.float32
    for token in range(0, tokens, n):
        near = token + tl.arange(0, n)
        where = near[:, None] * dim + channels[None, :]
        fits = (near[:, None] < tokens) & (channels[None, :] < dim)
        scores = tl.dot(
            q.to(number), tl.trans(tl.load(keys + where, mask=fits, other=0.0).to(number)), input_precision="ieee"
        )
        scores *= scaling
        top, total, shrink, weights = _joined(top, total, scores, (near >= hidden) & (near < tokens), softcap, capped)
        read = tl.load(values + where, mask=fits, other=0.0).to(number)
        sums = sums * shrink[:, None] + tl.dot(weights.to(number), read, input_precision="ieee")
    return top, total, sums


@triton.jit
@no_type_check
def attend_split(
    q_rotated, q_plain, out, tops, totals,
    k0, k1, k2, k_scale, k_low, k_norm, v0, v1, v2, v_scale, v_low, v_norm, k_full, v_full,
    k0_b, k0_h, k1_b, k1_h, k2_b, k2_h, ks_b, ks_h, kn_b, kn_h,
    v0_b, v0_h, v1_b, v1_h, v2_b, v2_h, vs_b, vs_h, vn_b, vn_h, kf_b, kf_h, vf_b, vf_h,
    heads, group, start, tokens, rest, per_split, packed_splits, first_split, all_splits, first,
    k_size, v_size, scaling, softcap,
    dim: tl.constexpr, kw0: tl.constexpr, kw1: tl.constexpr, kw2: tl.constexpr,
    vw0: tl.constexpr, vw1: tl.constexpr, vw2: tl.constexpr,
    k_channel: tl.constexpr, v_channel: tl.constexpr, k_kind: tl.constexpr, v_kind: tl.constexpr,
    k_top: tl.constexpr, v_top: tl.constexpr, normed_k: tl.constexpr, normed_v: tl.constexpr, capped: tl.constexpr,
    n: tl.constexpr, d: tl.constexpr, rows: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """One range of packed tokens, or (the last split of a launch, if there are any) the full-precision tokens after.

    Sums are stored relative to their own maximum, those of codes in the rotated space; `combine` joins them. The
    `tokens` packed tokens of this launch follow `start` others. Strides `_b` and `_h` are those of batch and head.
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
        ks, vs = b * ks_b + h * ks_h, b * vs_b + h * vs_h
        kp0, kp1, kp2 = k0 + b * k0_b + h * k0_h, k1 + b * k1_b + h * k1_h, k2 + b * k2_b + h * k2_h
        vp0, vp1, vp2 = v0 + b * v0_b + h * v0_h, v1 + b * v1_b + h * v1_h, v2 + b * v2_b + h * v2_h
        for token in range(split * per_split, tl.minimum((split + 1) * per_split, tokens), n):
            near = token + tl.arange(0, n)
            codes = _codes(kp0, kp1, kp2, token, tokens, channels, dim, kw0, kw1, kw2, n, d)
            scores = _scores(
                q, codes, k_scale + ks, k_low + ks, near, token, tokens, channels, dim, k_size,
                k_channel, k_kind, k_top, half,
            )  # fmt: skip
            scores *= scaling
            if normed_k:
                scores *= tl.load(k_norm + b * kn_b + h * kn_h + near, mask=near < tokens, other=0.0)[None, :]
            top, total, shrink, weights = _joined(
                top, total, scores, (near + start >= first) & (near < tokens), softcap, capped
            )
            if normed_v:
                weights *= tl.load(v_norm + b * vn_b + h * vn_h + near, mask=near < tokens, other=0.0)[None, :]
            codes = _codes(vp0, vp1, vp2, token, tokens, channels, dim, vw0, vw1, vw2, n, d)
            mixed = _mixed(
                weights, codes, v_scale + vs, v_low + vs, near, token, tokens, channels, dim, v_size,
                v_channel, v_kind, v_top, half,
            )  # fmt: skip
            sums = sums * shrink[:, None] + mixed
    else:
        top, total, sums = _rest(
            tl.load(q_plain + at, mask=seen, other=0.0), k_full + b * kf_b + h * kf_h, v_full + b * vf_b + h * vf_h,
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
