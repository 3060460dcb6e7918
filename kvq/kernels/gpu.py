"""Decode attention on packed codes on a GPU: launches of `triton_loops` over the packed prefix and the residual."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import BlockRun, Packed, UniformQuantizer, plane_widths
from kvq.codecs.quantizers import Axis
from kvq.errors import Unsupported
from kvq.kernels import triton_loops
from kvq.kernels.form import Form, PackedStates, folds, form_of

TILE = 32
"""Tokens that a program holds in registers."""
_PROGRAMS = 512
"""Number of programs that a launch is split into: a few for each multiprocessor of a large GPU."""


@dataclass(frozen=True)
class _Side:
    """The arguments of a launch for keys or values: one run of contiguous blocks."""

    form: Form
    quantizer: UniformQuantizer
    tokens: int
    planes: list[Tensor]
    scale: Tensor
    low: Tensor
    size: int
    norms: Tensor | None

    @property
    def widths(self) -> tuple[int, int, int]:
        widths = plane_widths(self.quantizer.bits)
        return (*widths, *(0,) * (3 - len(widths)))  # type: ignore[return-value]

    @property
    def kind(self) -> int:
        if self.quantizer.symmetric:
            return triton_loops.SYMMETRIC
        return getattr(triton_loops, self.quantizer.zero_point.name.upper())

    @property
    def top(self) -> int:
        return 2 ** (self.quantizer.bits - 1) - 1

    @property
    def per_channel(self) -> bool:
        return self.quantizer.axis is Axis.per_channel


def unfit(states: PackedStates) -> str | None:
    """The reason why these kernels cannot read a side; None: they can."""
    if states.codec is None or not states.packed:
        return "nothing is packed"
    form, quantizer = form_of(states.codec), states.codec.quantizer
    if not folds(quantizer) or quantizer.bits > 8:
        return f"{type(quantizer).__name__} has no Triton kernel"
    if form.shifts or any(norm.double_quant is not None for norm in form.norms.values()):
        return "shifts and double quantized norms have no Triton kernel"
    return _unfit_run(quantizer, states.packed[0].runs[0])


def _unfit_run(quantizer: UniformQuantizer, run: BlockRun) -> str | None:
    size = min(quantizer.group_size or run.tokens, run.tokens)
    if run.count > 1 and (run.tokens % 8 or (quantizer.axis is Axis.per_channel and run.tokens % size)):
        return f"blocks of {run.tokens} tokens do not continue each other"
    if quantizer.axis is Axis.per_channel and size % TILE and size < run.tokens * run.count:
        return f"groups of {size} tokens are no multiple of {TILE}"
    return None


def _sides(states: PackedStates) -> Iterator[_Side]:
    """The runs of the packed prefix, up to the first that the kernels do not support."""
    reason = unfit(states)
    if reason is not None:
        raise Unsupported(f"cache.attention=packed: {reason}")
    assert states.codec is not None
    form, quantizer = form_of(states.codec), states.codec.quantizer
    assert folds(quantizer)
    for packed in states.packed:
        for run, views in packed.by_run():
            if _unfit_run(quantizer, run) is not None:
                return
            # Rows are contiguous in a cache; the output of a codec need not be.
            parts = {name: part if part[0, 0].is_contiguous() else part.contiguous() for name, part in views.items()}
            yield _side(form, quantizer, parts, run, packed.head_dim)


def _side(form: Form, quantizer: UniformQuantizer, parts: dict[str, Tensor], run: BlockRun, head_dim: int) -> _Side:
    norms = [part for name, part in parts.items() if name == "gain" or name.endswith(".scale")]
    if len(norms) > 1:
        product = form.factors(run.blocks(parts), None, run.tokens, torch.float32)
        assert product is not None
        norms = [product.transpose(1, 2).flatten(2).contiguous()[..., None]]
    along = run.tokens if quantizer.axis is Axis.per_channel else head_dim
    planes = [parts[f"codes.{index}"] for index in range(len(plane_widths(quantizer.bits)))]
    low = parts["scale"] if quantizer.symmetric else parts["zero_point"]
    size = min(quantizer.group_size or along, along)
    tokens = run.tokens * run.count
    return _Side(form, quantizer, tokens, planes, parts["scale"], low, size, norms[0][..., 0] if norms else None)


def _launches(keys: PackedStates, values: PackedStates) -> list[tuple[_Side, _Side, int, int]]:
    """Pairs of runs, first token and number of tokens; ends with the first pair whose last tokens differ."""
    out, start = [], 0
    for key, value in zip(_sides(keys), _sides(values), strict=False):
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
    """As `kvq.kernels.eager.attend`, for queries up to fp32.

    Args:
        per_split: tokens that a program reads, a multiple of `TILE`; None: as many as give `_PROGRAMS` programs.

    Tokens after the runs that keys and values share (a residual, and tokens that only one side has packed) are read in
    full precision.

    Raises:
        Unsupported: a codec or layout that the kernels do not support; `eager` supports more.
    """
    batch, heads, dim = keys.shape
    launches = _launches(keys, values)
    q = query.float().reshape(batch, heads, -1, dim).contiguous()
    group, half = q.shape[2], query.dtype is not torch.float32
    packed = sum(tokens for *_, tokens in launches)
    rest_k, rest_v = (_behind(states, packed, query.dtype) for states in (keys, values))
    rest = rest_k.shape[2]
    if per_split is None:
        per_split = max(TILE, triton.cdiv(triton.cdiv(packed * batch * heads, _PROGRAMS), TILE) * TILE)
    splits = [triton.cdiv(tokens, per_split) for *_, tokens in launches]
    every = sum(splits) + (1 if rest else 0)
    sums = q.new_empty(batch, heads, every, group, dim)
    tops, totals = (q.new_empty(batch, heads, every, group) for _ in range(2))
    d, rows = triton.next_power_of_2(dim), max(16, triton.next_power_of_2(group))
    rotated = launches[0][0].form.rotate(q).contiguous()
    for index, (key, value, start, tokens) in enumerate(launches):
        here, last = splits[index], index == len(launches) - 1
        triton_loops.attend_split[(here + (1 if rest and last else 0), batch * heads)](
            rotated, q, sums, tops, totals,
            *_three(key.planes), key.scale, key.low, q if key.norms is None else key.norms,
            *_three(value.planes), value.scale, value.low, q if value.norms is None else value.norms, rest_k, rest_v,
            *_strides(key), *_strides(value), *rest_k.stride()[:2], *rest_v.stride()[:2],
            heads, group, start, tokens, rest, per_split, here, sum(splits[:index]), every, first,
            key.size, value.size, float(scaling), float(softcap or 1),
            dim, *key.widths, *value.widths, key.per_channel, value.per_channel, key.kind, value.kind,
            key.top, value.top, key.norms is not None, value.norms is not None, softcap is not None,
            TILE, d, rows, half,
        )  # fmt: skip
    mixed, plain = torch.empty_like(q), torch.empty_like(q)
    triton_loops.combine[(batch * heads, group)](sums, tops, totals, mixed, plain, group, every, sum(splits), dim, d)
    out = launches[0][1].form.rotate_back(mixed, []) + plain
    return out.reshape(batch, query.shape[1], 1, dim).to(query.dtype)


def _three(planes: list[Tensor]) -> list[Tensor]:
    return planes + [planes[0]] * (3 - len(planes))


def _strides(side: _Side) -> list[int]:
    norms = side.norms
    of_norms = (0, 0) if norms is None else (norms.stride(0), norms.stride(1) if norms.shape[1] > 1 else 0)
    planes = [stride for plane in _three(side.planes) for stride in plane.stride()[:2]]
    return [*planes, *side.scale.stride()[:2], *of_norms]


def _behind(states: PackedStates, start: int, dtype: torch.dtype) -> Tensor:
    """Tokens from `start` on in full precision; packed ones among them, about as many as a residual, are decoded."""
    parts, at = [], 0
    for packed in states.packed:
        if at + packed.tokens > start:
            assert states.codec is not None
            blocks, skipped = _blocks_from(packed, max(0, start - at))
            parts.append(states.codec.decode(blocks)[:, :, max(0, start - at) - skipped :])
        at += packed.tokens
    if states.full is not None:
        parts.append(states.full)
    if not parts:
        batch, heads, dim = states.shape
        return torch.empty(batch, heads, 0, dim, dtype=dtype, device=states.packed[0].parts["scale"].device)
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    # In a cache, rows of a head are contiguous and followed by reserved rows.
    return out if out.dtype is dtype and out.stride()[2:] == (out.shape[3], 1) else out.to(dtype).contiguous()


def _blocks_from(packed: Packed, start: int) -> tuple[Packed, int]:
    """The blocks that hold tokens from `start` on, and the number of tokens before them."""
    rows, skipped = dict.fromkeys(packed.parts, 0), 0
    runs: list[BlockRun] = []
    for run in packed.runs:
        blocks = min(run.count, max(0, start - skipped) // run.tokens) if not runs else 0
        skipped += blocks * run.tokens
        rows = {name: first + blocks * run.rows[name] for name, first in rows.items()}
        if blocks < run.count:
            runs.append(dataclasses.replace(run, count=run.count - blocks))
    parts = {name: part[:, :, rows[name] :] for name, part in packed.parts.items()}
    return dataclasses.replace(packed, parts=parts, runs=tuple(runs)), skipped
