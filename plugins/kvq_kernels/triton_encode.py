"""Encoding in one pass (Triton): a program turns a tile of tokens of one head into codes and statistics.

States are read once if a group of tokens fits a tile; longer groups are read twice, for their ranges and for their
codes. Divisions and roundings are IEEE operations, as in a codec. There is no autotuning; sizes are arguments.

Trellises: strings are read in parallel, and Viterbi's search is a program for each row. Sums are rounded as in torch.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

HALF_MAX = tl.constexpr(65504.0)
EVEN = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding and subtracting it rounds half to even."""
INT16_MAX = tl.constexpr(32767.0)
FP16_TINY = tl.constexpr(2.0**-24)


@triton.jit
@no_type_check
def _round(x):
    """Round to integers, halves to even; numbers of 2^22 and more are unchanged."""
    return tl.where(tl.abs(x) < 4194304.0, (x + EVEN) - EVEN, x)


@triton.jit
@no_type_check
def _to_fp16(x):
    """Cast to fp16, saturating, as statistics are stored."""
    return tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX).to(tl.float16)


@triton.jit
@no_type_check
def _transform(
    x, matrix, offsets, inside, dim, root, norm_root,
    rotated: tl.constexpr, signs: tl.constexpr, normed: tl.constexpr, n: tl.constexpr, d: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Tokens `[n, d]` after rotation and norm, and their norms; `signs`: the matrix is exact in the states' dtype."""
    channels = tl.arange(0, d)
    squares = tl.zeros((n,), tl.float32)
    if rotated:
        y = tl.zeros((n, d), tl.float32)
        for start in range(0, dim, k):
            some = start + tl.arange(0, k)
            part = tl.load(
                x + offsets[:, None] + some[None, :], mask=inside[:, None] & (some[None, :] < dim), other=0.0
            )
            turn = tl.load(
                matrix + some[:, None] * dim + channels[None, :],
                mask=(some[:, None] < dim) & (channels[None, :] < dim), other=0.0,
            )  # fmt: skip
            if signs:
                y += tl.dot(part, turn.to(part.dtype), input_precision="ieee")
            else:
                y += tl.dot(part.to(tl.float32), turn, input_precision="ieee")
            squares += tl.sum(part.to(tl.float32) * part.to(tl.float32), 1)
        if signs:
            y = y * root
    else:
        fits = inside[:, None] & (channels[None, :] < dim)
        y = tl.load(x + offsets[:, None] + channels[None, :], mask=fits, other=0.0).to(tl.float32)
        squares = tl.sum(y * y, 1)
    norms = tl.div_rn(tl.sqrt_rn(squares), norm_root)
    if normed:
        y = tl.div_rn(y, tl.where(norms == 0, 1.0, norms)[:, None])
    return y, norms


@triton.jit
@no_type_check
def _grid(low, high, clip, levels, kind: tl.constexpr):
    """Step, base and zero that choose codes, and the step and minimum to store (`uniform_chain.fit_grids`)."""
    if kind == 2:
        step = tl.div_rn(tl.maximum(tl.abs(low), tl.abs(high)) * clip, levels)
        base, zero, used = low * 0.0, low * 0.0 + levels, tl.where(step == 0, 1.0, step)
    else:
        low, high = low * clip, high * clip
        step = tl.div_rn(high - low, levels)
        if kind == 0:
            base, zero, used = low, low * 0.0, tl.where(step == 0, 1.0, step)
        else:
            least = tl.div_rn(tl.abs(low), INT16_MAX)
            # The next power of two, from the bits of the number.
            up = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
            step = tl.maximum(tl.where(step < least, up, step), FP16_TINY)
            base, zero, used = low * 0.0, _round(tl.div_rn(-low, step)), step
    return used, base, zero, step, low


@triton.jit
@no_type_check
def _store_grid(scale, low_at, where, mask, step, low, zero, kind: tl.constexpr):
    """Store the steps of groups in fp16, and their lowest values in fp16 (kind 0) or zero points in int16 (kind 1)."""
    tl.store(scale + where, _to_fp16(step), mask=mask)
    if kind == 0:
        tl.store(low_at + where, _to_fp16(low), mask=mask)
    if kind == 1:
        tl.store(low_at + where, zero.to(tl.int16), mask=mask)


@triton.jit
@no_type_check
def _decode(codes, step, low, zero, kind: tl.constexpr):
    """Decoded values of codes, from the stored statistics."""
    scale = _to_fp16(step).to(tl.float32)
    if kind == 0:
        return codes * scale + _to_fp16(low).to(tl.float32)
    return (codes - zero) * scale


@triton.jit
@no_type_check
def _pack(
    codes, plane, line, first, left, tokens, dim,
    shift: tl.constexpr, width: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """One plane of `left` tokens from `first` on: `8 / width` consecutive tokens of a channel to a byte."""
    per: tl.constexpr = 8 // width
    channels, rows = tl.arange(0, d), tl.arange(0, n // per)
    base = (line * ((tokens * width + 7) // 8) + first * width // 8) * dim
    bits = tl.reshape((codes >> shift) & ((1 << width) - 1), (n // per, per, d))
    out = tl.sum(bits << (tl.arange(0, per) * width)[None, :, None], 1)
    mask = (rows[:, None] * per < left) & (channels[None, :] < dim)
    tl.store(plane + base + rows[:, None] * dim + channels[None, :], out.to(tl.uint8), mask=mask)


@triton.jit
@no_type_check
def _channel_codes(
    y, inside, line, first, scale, low_at, low_given, high_given, size, clip, levels, top, dim,
    given: tl.constexpr, kind: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Codes of a tile, decoded too, by statistics per channel, which are fitted (or `given`) and stored at `scale`."""
    channels = tl.arange(0, d)
    where = (line + first // size) * dim + channels
    if given:
        low = tl.load(low_given + where, mask=channels < dim, other=0.0)
        high = tl.load(high_given + where, mask=channels < dim, other=0.0)
    else:
        low = tl.min(tl.where(inside[:, None], y, float("inf")), 0)
        high = tl.max(tl.where(inside[:, None], y, float("-inf")), 0)
    used, base, zero, step, least = _grid(low, high, clip, levels, kind)
    # Of the tiles of a group the first stores its statistics.
    columns = tl.where(first // size * size == first, dim, 0)
    _store_grid(scale, low_at, where, channels < columns, step, least, zero, kind)
    codes = _round(tl.div_rn(y - base[None, :], used[None, :])) + zero[None, :]
    codes = tl.minimum(tl.maximum(codes, 0.0), top)
    return codes, _decode(codes, step[None, :], least[None, :], zero[None, :], kind)


@triton.jit
@no_type_check
def _token_codes(
    y, inside, line, scale, low_at, groups, clip, levels, top, dim,
    kind: tl.constexpr, span: tl.constexpr, n: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Codes of a tile and their decoded values, by statistics per token and `span` channels, from token `line` on."""
    parts = tl.reshape(y, (n, d // span, span))
    there = tl.reshape(tl.broadcast_to(tl.arange(0, d)[None, :] < dim, (n, d)), (n, d // span, span))
    low = tl.min(tl.where(there, parts, float("inf")), 2)
    high = tl.max(tl.where(there, parts, float("-inf")), 2)
    group = tl.arange(0, d // span)[None, :]
    low, high = tl.where(group < groups, low, 0.0), tl.where(group < groups, high, 0.0)
    used, base, zero, step, least = _grid(low, high, clip, levels, kind)
    where = (line + tl.arange(0, n))[:, None] * groups + group
    _store_grid(scale, low_at, where, inside[:, None] & (group < groups), step, least, zero, kind)
    codes = _round(tl.div_rn(parts - base[:, :, None], used[:, :, None])) + zero[:, :, None]
    codes = tl.minimum(tl.maximum(codes, 0.0), top)
    read = _decode(codes, step[:, :, None], least[:, :, None], zero[:, :, None], kind)
    return tl.reshape(codes, (n, d)), tl.reshape(read, (n, d))


@triton.jit
@no_type_check
def _gains(y, read, inside, gain: tl.constexpr):
    """The gain of each token `y` with decoded form `read`, 1 where its denominator is 0; `inside`: mask of elements."""
    y, read = tl.where(inside, y, 0.0), tl.where(inside, read, 0.0)
    if gain == 1:  # l2
        top, bottom = tl.sum(y * read, 1), tl.sum(read * read, 1)
    elif gain == 2:  # norm
        top, bottom = tl.sqrt_rn(tl.sum(y * y, 1)), tl.sqrt_rn(tl.sum(read * read, 1))
    elif gain == 3:  # parallel
        top, bottom = tl.sum(y * y, 1), tl.sum(y * read, 1)
    else:  # unit
        bottom = tl.sqrt_rn(tl.sum(read * read, 1))
        top = bottom * 0.0 + 1.0
    return tl.where(bottom == 0, 1.0, tl.div_rn(top, tl.where(bottom == 0, 1.0, bottom)))


@triton.jit
@no_type_check
def ranges(
    x, matrix, low, high, x_b, x_n, x_h, x_t, heads, blocks, tokens, tiles, root, norm_root, dim: tl.constexpr,
    rotated: tl.constexpr, signs: tl.constexpr, normed: tl.constexpr, n: tl.constexpr, d: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Write each channel's minimum and maximum over a tile of `n` tokens: `[batch, heads, blocks, tiles, dim]`."""
    block, tile, place = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    b, h = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    near, channels = tile * n + tl.arange(0, n), tl.arange(0, d)
    inside = near < tokens
    start = x + b * x_b + h * x_h + block.to(tl.int64) * x_n
    y, _ = _transform(
        start, matrix, near.to(tl.int64) * x_t, inside, dim, root, norm_root, rotated, signs, normed, n, d, k
    )
    at = ((place.to(tl.int64) * blocks + block) * tiles + tile) * dim + channels
    tl.store(low + at, tl.min(tl.where(inside[:, None], y, float("inf")), 0), mask=channels < dim)
    tl.store(high + at, tl.max(tl.where(inside[:, None], y, float("-inf")), 0), mask=channels < dim)


@triton.jit
@no_type_check
def encode_tile(
    x, matrix, p0, p1, p2, scale, low_at, norm_at, low_given, high_given,
    x_b, x_n, x_h, x_t, heads, blocks, tokens, tiles, size, groups, clip, levels, top, root, norm_root,
    dim: tl.constexpr, w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr,
    per_channel: tl.constexpr, span: tl.constexpr, given: tl.constexpr, kind: tl.constexpr, gain: tl.constexpr,
    rotated: tl.constexpr, signs: tl.constexpr, normed: tl.constexpr, step_n: tl.constexpr,
    n: tl.constexpr, d: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Encode `step_n` tokens of a block: with statistics per channel (they are one group), or per token.

    `given`: ranges per channel and group are known. `span`: channels of a group per token, padded ones included.
    """
    block, tile, place = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    b, h = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    near, channels = tl.arange(0, n), tl.arange(0, d)
    first = tile * step_n
    inside = (near < step_n) & (first + near < tokens)
    fits = inside[:, None] & (channels[None, :] < dim)
    start = x + b * x_b + h * x_h + block.to(tl.int64) * x_n
    y, norms = _transform(
        start, matrix, (first + near).to(tl.int64) * x_t, inside, dim, root, norm_root,
        rotated, signs, normed, n, d, k,
    )  # fmt: skip
    line = place.to(tl.int64) * blocks + block
    if per_channel:
        codes, read = _channel_codes(
            y, inside, line * groups, first, scale, low_at, low_given, high_given, size, clip, levels, top, dim,
            given, kind, d,
        )  # fmt: skip
    else:
        codes, read = _token_codes(
            y, inside, line * tokens + first, scale, low_at, groups, clip, levels, top, dim, kind, span, n, d
        )
    if gain > 0:
        factor = _gains(y, read, fits, gain)
        norms = norms * factor if normed else factor
    if normed or gain > 0:
        tl.store(norm_at + line * tokens + first + near, _to_fp16(norms), mask=inside)
    whole = tl.where(fits, codes, 0.0).to(tl.int32)
    left = tl.minimum(step_n, tokens - first)
    _pack(whole, p0, line, first, left, tokens, dim, 0, w0, n, d)
    if w1 > 0:
        _pack(whole, p1, line, first, left, tokens, dim, w0, w1, n, d)
    if w2 > 0:
        _pack(whole, p2, line, first, left, tokens, dim, w0 + w1, w2, n, d)


@triton.jit
@no_type_check
def search(vectors, columns, codes, signs, scores, count, signed: tl.constexpr, n: tl.constexpr):
    """Find the nearest of 256 entries for `n` vectors of 8 channels (of a signed codebook: for their magnitudes).

    `columns` `[9, 256]`: entries, then -|c|²/2. Of equal scores the first entry wins, as in the codec.
    """
    rows, entries = tl.program_id(0).to(tl.int64) * n + tl.arange(0, n), tl.arange(0, 256)
    inside = rows < count
    score = tl.zeros((n, 256), tl.float32) + tl.load(columns + 8 * 256 + entries)[None, :]
    negative = tl.zeros((n,), tl.int32)
    for channel in tl.static_range(8):
        part = tl.load(vectors + rows * 8 + channel, mask=inside, other=0.0)
        if signed:
            negative += tl.where(part < 0, 1 << channel, 0)
            part = tl.abs(part)
        score += part[:, None] * tl.load(columns + channel * 256 + entries)[None, :]
    top, place = tl.max(score, 1, return_indices=True)
    tl.store(codes + rows, place.to(tl.uint8), mask=inside)
    tl.store(scores + rows, top, mask=inside)
    if signed:
        tl.store(signs + rows, negative.to(tl.uint8), mask=inside)


@triton.jit
@no_type_check
def read_fields(strings, places, shifts, masks, entries, books, out, fields, nbytes, tile: tl.constexpr):
    """Values of a tile of fields of one string, which has zeros around it; arguments as `kvq.codecs.trellis.Loops`."""
    row = tl.program_id(0).to(tl.int64)
    field = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = field < fields
    at = strings + row * nbytes + tl.load(places + field, mask=inside, other=0)
    word = tl.zeros((tile,), tl.int32)
    for offset in tl.static_range(3):
        word = (word << 8) | tl.load(at + offset, mask=inside, other=0).to(tl.int32)
    number = (word >> tl.load(shifts + field, mask=inside, other=0)) & tl.load(masks + field, mask=inside, other=0)
    value = tl.load(books + tl.load(entries + field, mask=inside, other=0) + number, mask=inside, other=0.0)
    tl.store(out + row * fields + field, value, mask=inside)


@triton.jit
@no_type_check
def _step(cost, value, weight, books, back, states: tl.constexpr, width: tl.constexpr):
    """Costs of all states after a component of `width` bits; which predecessor each prefix has goes to `back`."""
    choices: tl.constexpr = 1 << width
    prefixes: tl.constexpr = states >> width
    best, least = tl.min(tl.reshape(cost, (choices, prefixes)), 0, return_indices=True)
    tl.store(back + tl.arange(0, prefixes), least.to(tl.uint8))
    error = value - tl.load(books + (width - 1) * states + tl.arange(0, states))
    spread = tl.reshape(tl.broadcast_to(tl.expand_dims(best, 1), (prefixes, choices)), (states,))
    return error * error * weight + spread


@triton.jit
@no_type_check
def search_trellis(x, widths, weights, books, back, codes, fields, memory: tl.constexpr, widest: tl.constexpr):
    """Codes of least weighted error of one row `[fields]`, of equal ones those of the lowest earlier states.

    `books` `[widths, 2^memory]`; `back` `[rows, fields, 2^(memory - 1)]`: room for the predecessors; `codes` `[rows,
    fields]`, zeros.
    """
    states: tl.constexpr = 1 << memory
    row = tl.program_id(0).to(tl.int64)
    back += row * fields * (states // 2)
    cost = tl.where(tl.arange(0, states) == 0, 0.0, float("inf"))
    for i in range(fields):
        width = tl.load(widths + i)
        value, weight, predecessors = tl.load(x + row * fields + i), tl.load(weights + i), back + i * (states // 2)
        for one in tl.static_range(1, widest + 1):
            if width == one:
                cost = _step(cost, value, weight, books, predecessors, states, one)
    state = tl.argmin(cost, 0).to(tl.int32)
    tl.debug_barrier()  # what other threads of the program have written is read from here on
    for step in range(fields):
        i = fields - 1 - step
        width = tl.load(widths + i).to(tl.int32)
        if width > 0:
            tl.store(codes + row * fields + i, (state & ((1 << width) - 1)).to(tl.uint8))
            prefix = state >> width
            state = prefix | (tl.load(back + i * (states // 2) + prefix).to(tl.int32) << (memory - width))
