"""Strings of bits and trellises on a GPU (Triton): reading in parallel, and Viterbi's search, a program for each row.

Sums are rounded as in the other forms (multiplications and additions are not fused), so codes are the same.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

TILE = 256
"""Fields that a program reads."""


@triton.jit
@no_type_check
def read_fields(strings, places, shifts, masks, entries, books, out, fields, nbytes, tile: tl.constexpr):
    """Values of a tile of fields of one string, which has zeros around it; arguments as `trellis_loops.reader`."""
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
def search(x, widths, weights, books, back, codes, fields, memory: tl.constexpr, widest: tl.constexpr):
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
        value, weight, own = tl.load(x + row * fields + i), tl.load(weights + i), back + i * (states // 2)
        for one in tl.static_range(1, widest + 1):
            if width == one:
                cost = _step(cost, value, weight, books, own, states, one)
    state = tl.argmin(cost, 0).to(tl.int32)
    tl.debug_barrier()  # what other threads of the program have written is read from here on
    for step in range(fields):
        i = fields - 1 - step
        width = tl.load(widths + i).to(tl.int32)
        if width > 0:
            tl.store(codes + row * fields + i, (state & ((1 << width) - 1)).to(tl.uint8))
            prefix = state >> width
            state = prefix | (tl.load(back + i * (states // 2) + prefix).to(tl.int32) << (memory - width))


def values_of(
    padded: UInt8[Tensor, "rows bytes_around"],
    places: tuple[Int[Tensor, " fields"], ...],
    first: Int[Tensor, " fields"],
    books: Float[Tensor, " entries"],
) -> Float[Tensor, "rows fields"]:
    """What `trellis_loops.reader` writes; `places`: starts, shifts and masks."""
    rows, fields = len(padded), len(first)
    out = torch.empty(rows, fields, dtype=books.dtype, device=padded.device)
    if rows and fields:
        grid = (rows, triton.cdiv(fields, TILE))
        read_fields[grid](padded, *places, first, books, out, fields, padded.shape[1], TILE)
    return out


def codes_of(
    x: Float[Tensor, "rows fields"],
    widths: UInt8[Tensor, " fields"],
    weights: Float[Tensor, " fields"],
    books: Float[Tensor, "widths states"],
) -> UInt8[Tensor, "rows fields"]:
    """The codes of least error of each row."""
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    states, memory = books.shape[1], books.shape[1].bit_length() - 1
    back = torch.empty(*x.shape, states // 2, dtype=torch.uint8, device=x.device)
    if x.numel():
        search[(len(x),)](
            x, widths, weights, books, back, codes, x.shape[1], memory, len(books),
            num_warps=max(1, min(8, states // 128)), enable_fp_fusion=False,
        )  # fmt: skip
    return codes
