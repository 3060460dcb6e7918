"""Decode attention on packed codes on a GPU: launches of `triton_loops` over the packed prefix and the residual."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import (
    BlockRun,
    LloydMaxQuantizer,
    Packed,
    SignedMaxQuantizer,
    UniformQuantizer,
    VectorQuantizer,
    plane_widths,
)
from kvq.codecs.quantizers import Quantizer
from kvq.errors import Unsupported
from kvq.kernels.linear_chain import (
    LinearChain,
    PackedStates,
    Shift,
    build_linear_chain,
    group_size,
    is_affine,
    is_contiguous,
    is_per_channel,
    score_rotated,
)
from kvq.kernels.pieces import decode_shift, iter_runs
from kvq_kernels import triton_loops
from kvq_kernels.encode_gpu import WIDEST

TILE = 32
"""Tokens that a program holds in registers."""
_PROGRAMS = 512
"""Number of programs that a launch is split into: a few for each multiprocessor of a large GPU."""
STAGES = {"grids": 3, "tables": 1}
"""Triton's loop stages: more would copy entries that are looked up through shared memory."""


@dataclass(frozen=True)
class _Side:
    """The arguments of a launch for keys or values: one run of contiguous blocks.

    Attributes:
        kind, top: how codes are decoded (a constant of `triton_loops`), and the code of 0 on a symmetric grid.
        shifts: of values, after all rotations; None: there are none, or the side is keys (`_shift_scores`).
    """

    chain: LinearChain
    tokens: int
    widths: tuple[int, int, int]
    per_channel: bool
    kind: int
    top: int
    normed: bool
    stored: triton_loops.Side
    shifts: triton_loops.Shifts | None


def unfit_reason(states: PackedStates) -> str | None:
    """The reason why these kernels cannot read a side; None: they can."""
    if states.codec is None or not states.packed:
        return "nothing is packed"
    chain, quantizer = build_linear_chain(states.codec), states.codec.quantizer
    name = type(quantizer).__name__
    if isinstance(quantizer, LloydMaxQuantizer) and quantizer.unit:
        return f"{name} with tokens scaled to norm 1 has no Triton kernel"
    if not is_affine(quantizer) and not isinstance(quantizer, LloydMaxQuantizer | SignedMaxQuantizer | VectorQuantizer):
        return f"{name} has no Triton kernel"
    if states.shape[-1] > WIDEST:
        return f"heads of {states.shape[-1]} channels have no Triton kernel"
    if quantizer.bits > 8:
        return f"{name} of {quantizer.bits} bits has no Triton kernel"
    if len(chain.shifts) > 1:
        return f"{len(chain.shifts)} shifts have no Triton kernel"
    return _unfit_run_reason(chain, quantizer, states.packed[0].runs[0])


def _unfit_run_reason(chain: LinearChain, quantizer: Quantizer, run: BlockRun) -> str | None:
    """The reason why the kernels cannot read the blocks of a run; None: they can."""
    if not is_contiguous(run, quantizer):
        return f"blocks of {run.tokens} tokens do not continue each other"
    if chain.shifts and run.count > 1 and run.tokens % TILE:
        return f"blocks of {run.tokens} tokens with a shift each are no multiple of {TILE}"
    size = min(group_size(quantizer) or run.tokens, run.tokens)
    if is_per_channel(quantizer) and size % TILE and size < run.tokens * run.count:
        return f"groups of {size} tokens are no multiple of {TILE}"
    return None


def _sides(states: PackedStates, mixed: bool) -> Iterator[_Side]:
    """The runs of the packed prefix, up to the first that the kernels do not support; `mixed`: they are values."""
    reason = unfit_reason(states)
    if reason is not None:
        raise Unsupported(f"cache.attention=packed: {reason}")
    assert states.codec is not None
    chain, quantizer = build_linear_chain(states.codec), states.codec.quantizer
    for packed in states.packed:
        for run, views in packed.by_run():
            if _unfit_run_reason(chain, quantizer, run) is not None:
                return
            # Rows are contiguous in a cache; the output of a codec need not be.
            parts = {name: part if part[0, 0].is_contiguous() else part.contiguous() for name, part in views.items()}
            yield _side(chain, parts, run, packed.head_dim, mixed)


def _side(chain: LinearChain, parts: dict[str, Tensor], run: BlockRun, head_dim: int, mixed: bool) -> _Side:
    """The arguments of a launch for one run of blocks with these `parts`; `mixed`: they are values."""
    quantizer = chain.codec.quantizer
    # An index of a codebook has 8 or 16 bits, which are planes like those of other codes.
    w0, w1, w2 = (*plane_widths(quantizer.index_bits["codes"]), 0, 0)[:3]
    p0, p1, p2 = (parts[f"codes.{index if width else 0}"] for index, width in enumerate((w0, w1, w2)))
    kind, top, scale, low = _grid(quantizer, parts, head_dim)
    norms = _norms(chain, parts, run)
    strides = [stride for part in (p0, p1, p2, scale) for stride in part.stride()[:2]]
    along = run.tokens if is_per_channel(quantizer) else head_dim
    stored = triton_loops.Side(
        p0, p1, p2, scale, low, scale if norms is None else norms,
        strides=(*strides, *((0, 0) if norms is None else _strides(norms))),
        size=min(group_size(quantizer) or along, along),
    )  # fmt: skip
    shifts = _shifts(chain, run.blocks(parts), run, head_dim) if mixed and chain.shifts else None
    tokens, per_channel = run.tokens * run.count, is_per_channel(quantizer)
    return _Side(chain, tokens, (w0, w1, w2), per_channel, kind, top, norms is not None, stored, shifts)


def _grid(quantizer: Quantizer, parts: dict[str, Tensor], dim: int) -> tuple[int, int, Tensor, Tensor]:
    """How codes are decoded, the code of 0 on a symmetric grid, and statistics or tables as `triton_loops.Side`."""
    if isinstance(quantizer, LloydMaxQuantizer | VectorQuantizer):
        codes = parts["codes.0"]
        kind, *tables = _tables(quantizer, dim, codes.device)
        first, second = (table.expand(*codes.shape[:2], *table.shape) for table in tables)
        return kind, 0, first, second
    scale = parts["scale"]
    if isinstance(quantizer, SignedMaxQuantizer):
        return triton_loops.SYMMETRIC, 2 ** (quantizer.bits - 1), scale, scale
    assert isinstance(quantizer, UniformQuantizer)
    if quantizer.symmetric:
        return triton_loops.SYMMETRIC, 2 ** (quantizer.bits - 1) - 1, scale, scale
    return getattr(triton_loops, quantizer.zero_point.upper()), 0, scale, parts["zero_point"]


@functools.lru_cache(maxsize=64)
def _tables(
    quantizer: LloydMaxQuantizer | VectorQuantizer, dim: int, device: torch.device
) -> tuple[int, Tensor, Tensor]:
    """The kind of code, and its tables for `triton_loops.Side`: levels, twice, or entries and sign and shift bits."""
    if isinstance(quantizer, LloydMaxQuantizer):
        levels = quantizer.levels(dim, torch.float32).to(device)
        return triton_loops.LEVELS, levels, levels
    entries, flips, shifts = quantizer.tables()
    kind = triton_loops.BOOK
    if quantizer.bits == 2:
        kind = triton_loops.SHIFTED_BOOK if shifts.any() else triton_loops.SIGNED_BOOK
    masks = torch.stack([flips, shifts.view(torch.int32)])
    return kind, entries.contiguous().to(device), masks.to(device)


def _norms(chain: LinearChain, parts: dict[str, Tensor], run: BlockRun) -> Tensor | None:
    """The factor of each token `[batch, heads or 1, tokens]`: one stored in fp16 as it is, others in fp32."""
    names = [f"{name}.scale" for name in chain.norms] + ["gain"] * ("gain" in parts)
    if not names:
        return None
    if len(names) == 1 and names[0] in parts:
        return parts[names[0]][..., 0]
    product = chain.norm_factors(run.blocks(parts), None, run.tokens, torch.float32)
    assert product is not None
    return product.transpose(1, 2).flatten(2).contiguous()


def _shifts(chain: LinearChain, blocks: dict[str, Tensor], run: BlockRun, dim: int) -> triton_loops.Shifts:
    """The shifts of the values in a run of blocks, after all rotations of the chain, with each token's factor."""
    (shift,) = chain.shifts
    vectors = decode_shift(shift, blocks, dim, torch.float32)[..., 0, :]
    norms = chain.norm_factors(blocks, shift.norms, run.tokens, torch.float32)
    factors = None if norms is None else norms.transpose(1, 2).flatten(2).contiguous()
    # What a chain adds before its last rotations is added behind them once it is rotated itself.
    turned = chain.rotate(vectors[..., None, :], start=shift.rotations)[..., 0, :].transpose(1, 2).contiguous()
    if factors is None:
        factors = turned.new_ones(1, 1, run.tokens * run.count)
    return triton_loops.Shifts(turned, factors, (*turned.stride()[:2], *_strides(factors)), run.tokens)


def _strides(factors: Float[Tensor, "_batch _heads tokens"]) -> tuple[int, int]:
    """The strides of batch and head; 0 along an axis of size 1, which all sequences or heads share."""
    batch, head = (factors.stride(axis) if factors.shape[axis] > 1 else 0 for axis in (0, 1))
    return batch, head


def _launches(keys: PackedStates, values: PackedStates) -> list[tuple[_Side, _Side, int, int]]:
    """Runs of keys and values, first token and number of tokens; ends with the first pair of unequal length."""
    out, start = [], 0
    for key, value in zip(_sides(keys, False), _sides(values, True), strict=False):
        tokens = min(key.tokens, value.tokens)
        out.append((key, value, start, tokens))
        start += tokens
        if key.tokens != value.tokens:
            break
    return out


def attend(
    query: Float[Tensor, "batch heads 1 dim"],
    keys: PackedStates,
    values: PackedStates,
    scaling: float,
    first: int = 0,
    softcap: float | None = None,
    per_split: int | None = None,
) -> Float[Tensor, "batch heads 1 _dim"]:
    """As `kvq.kernels.eager.attend`, for queries up to fp32; of 16-bit ones, states beyond 65,504 overflow.

    Args:
        per_split: tokens that a program reads, a multiple of `TILE`; None: as many as give `_PROGRAMS` programs.

    Tokens after the runs that keys and values share (residual, or packed on one side) are read in full precision.

    Raises:
        Unsupported: a codec or layout that the kernels do not support; `eager` supports more.
    """
    batch, heads, dim = keys.shape
    launches = _launches(keys, values)
    q = query.float().reshape(batch, heads, -1, dim).contiguous()
    group, half = q.shape[2], query.dtype is not torch.float32
    packed = sum(tokens for *_, tokens in launches)
    rest_k, rest_v = (_tokens_from(states, packed, query.dtype) for states in (keys, values))
    rest = rest_k.shape[2]
    if per_split is None:
        per_split = max(TILE, triton.cdiv(triton.cdiv(packed * batch * heads, _PROGRAMS), TILE) * TILE)
    splits = [triton.cdiv(tokens, per_split) for *_, tokens in launches]
    every = sum(splits) + (1 if rest else 0)
    sums = q.new_empty(batch, heads, every, group, dim)
    tops, totals = (q.new_empty(batch, heads, every, group) for _ in range(2))
    d, rows = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(group))
    rotated = launches[0][0].chain.rotate(q).contiguous()
    moved = _shift_scores(keys, launches[0][0].chain.shifts, launches[0][0].chain, q)
    moved = None if moved is None else moved.contiguous()
    full = triton_loops.Full(rest_k, rest_v, (*rest_k.stride()[:2], *rest_v.stride()[:2]))
    none = triton_loops.Shifts(q, q, (0, 0, 0, 0), 1)
    mix, plain = torch.empty_like(q), torch.empty_like(q)
    with torch.cuda.device_of(q):  # where Triton launches
        for index, (key, value, start, tokens) in enumerate(launches):
            here, last = splits[index], index == len(launches) - 1
            triton_loops.attend_split[(here + (1 if rest and last else 0), batch * heads)](
                rotated, q, sums, tops, totals,
                key.stored, q if moved is None else moved, value.stored, value.shifts or none, full,
                heads, group, start, tokens, keys.packed_tokens, rest, per_split, here, sum(splits[:index]), every,
                first, float(scaling), float(softcap or 1),
                dim, *key.widths, *value.widths, key.per_channel, value.per_channel, key.kind, value.kind,
                key.top, value.top, key.normed, value.normed, moved is not None, value.shifts is not None,
                softcap is not None, TILE, d, rows, half,
                num_stages=STAGES["tables" if max(key.kind, value.kind) >= triton_loops.LEVELS else "grids"],
            )  # fmt: skip
        triton_loops.combine[(batch * heads, group)](sums, tops, totals, mix, plain, group, every, sum(splits), dim, d)
    out = launches[0][1].chain.rotate_back(mix) + plain
    return out.reshape(batch, query.shape[1], 1, dim).to(query.dtype)


def _shift_scores(
    states: PackedStates, shifts: Sequence[Shift], chain: LinearChain, query: Float[Tensor, "batch heads group dim"]
) -> Float[Tensor, "batch heads group tokens"] | None:
    """The products of queries with the shifts of packed keys, to add to scores, in fp32; None: there are no shifts."""
    total = None
    for shift in shifts:
        seen = chain.rotate(query, shift.rotations)[:, None]
        pieces = []
        for start, run, blocks in iter_runs(states):
            offset = decode_shift(shift, blocks, states.shape[2], torch.float32)
            if shift.after_rope and states.rope is not None:
                rope = states.rope.narrow(start, run.tokens * run.count).blocks(run.tokens, run.count)
                more = score_rotated(seen, offset, rope)
            else:
                more = (seen @ offset.mT).expand(*offset.shape[:3], query.shape[2], run.tokens)
            if (norms := chain.norm_factors(blocks, shift.norms, run.tokens, torch.float32)) is not None:
                more = more * norms[..., None, :]
            pieces.append(more.permute(0, 2, 3, 1, 4).flatten(-2))
        added = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
        total = added if total is None else total + added
    return total


def _tokens_from(states: PackedStates, start: int, dtype: torch.dtype) -> Tensor:
    """Tokens from `start` on in full precision; packed ones among them, about as many as a residual, are decoded."""
    parts, at = [], 0
    for packed in states.packed:
        if at + packed.tokens > start:
            assert states.codec is not None
            blocks, skipped = _blocks_from(packed, max(0, start - at))
            rope = None if states.rope is None else states.rope.narrow(at + skipped, blocks.tokens)
            parts.append(states.codec.decode(blocks, rope)[:, :, max(0, start - at) - skipped :])
        at += packed.tokens
    if states.full is not None:
        parts.append(states.full)
    if not parts:
        batch, heads, dim = states.shape
        return torch.empty(batch, heads, 0, dim, dtype=dtype, device=states.packed[0].parts["codes.0"].device)
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    # In a cache, rows of a head are contiguous and followed by reserved rows.
    return out if out.dtype is dtype and out.stride()[2:] == (out.shape[3], 1) else out.to(dtype).contiguous()


def _blocks_from(packed: Packed, start: int) -> tuple[Packed, int]:
    """The blocks that hold tokens from `start` on, and the number of tokens before them."""
    skipped = packed.whole_block_tokens(start)
    return packed.without_first(skipped), skipped
