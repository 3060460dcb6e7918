"""`task=memory`: bytes of a cache by part, after a prompt, from stored tensors, or for long prompts from their layout.

No weights are read. Layers with a window hold what `kvq.cache.layer` leaves after a prompt that is read at once;
latents count as they are cached, states of fixed size at 16 bits. The papers' results, against 16 bits: nsn's 5.09x at
2,048 tokens and 3 bits, OScaR's 5.3x at 128K tokens and 2 bits.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvq.cache.layer import common_droppable, outside
from kvq.cache.store import UNIT, BlockStore, TokenStore
from kvq.codecs import Codec, Packed, Rope
from kvq.config.diagnostics import MemoryConfig
from kvq.config.method import Policy, PrefillBlock, ResidualSide, leaving
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import CacheShape, Inputs, LayerKind, cache_shape
from kvq.results.files import Journal
from kvq.results.metrics import metric_of
from kvq.tasks.measurement import Baseline, Measurement, Task

KINDS = ("codes", "scales", "norms", "shift", "other", "residual")
_KIND_OF = {
    **dict.fromkeys(("codes", "signs", "values"), "codes"),
    **dict.fromkeys(("scale", "zero_point", "gain"), "scales"),
    "residual": "residual",
    "rest": "norms",
}
FP16 = torch.float16
"""Dtype of the papers' reference and of the residual here, whatever the model's dtype."""


def kind_of(part: str) -> str:
    """Which of `KINDS` a stored part belongs to, by its name (`kvq.codecs.packed`) and its stage's."""
    first, *rest = [piece for piece in part.split(".") if piece not in ("high", "low", "base")]
    if first.startswith("norm"):
        return "norms"
    return _KIND_OF.get(first) or {"offset": "shift", "scale": "scales"}.get(rest[0] if rest else "", "other")


def _bytes_of(packed: Packed) -> Counter[str]:
    """Bytes of each stored part, by name."""
    return Counter({name: part.numel() * part.element_size() for name, part in packed.parts.items()})


def layout(codec: Codec, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, block: int | None) -> Counter[str]:
    """Bytes of every part of `tokens` tokens without storing them: those of one block times the number of blocks."""
    if codec.stores_lists:
        raise Unsupported(f"{type(codec).__name__}: its bytes follow the values, of which shapes say nothing")

    def of(count: int, device: str) -> Counter[str]:  # on the device `meta` no values are computed
        states = torch.zeros(1, heads, count, head_dim, dtype=dtype, device=device)
        nothing = torch.zeros(1, count, 0, device=device)
        rope = Rope(nothing, nothing) if codec.uses_rope else None
        return _bytes_of(codec.encode(states, None, rope)) if count else Counter()

    if block is None:
        try:
            return of(tokens, "meta")
        except RuntimeError as error:
            raise Unsupported("residual.prefill_block=whole: this quantizer's layout needs values") from error
    count, tail = divmod(tokens, block)
    whole, rest = of(block if count else 0, "cpu"), of(tail, "cpu")
    return Counter({name: size * count for name, size in whole.items()}) + rest


def plain_bytes(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys or values of one layer in full precision."""
    return tokens * heads * head_dim * dtype.itemsize


def schedule(residual: ResidualSide, codec: Codec, tokens: int) -> tuple[int, int | None, bool]:
    """Packed tokens after a prompt of `tokens`, their block size (None: one block), and whether each is independent."""
    if residual.policy is Policy.none or (not residual.size and not residual.keeps_nothing):
        whole = residual.prefill_block is PrefillBlock.whole or not residual.size
        return tokens, None if whole else residual.size, False
    kept, group = residual.schedule(codec.token_group)
    whole = residual.prefill_block is PrefillBlock.whole
    independent = residual.policy is Policy.sliding and group == 1
    return leaving(tokens, kept, group, whole), None if whole and not independent else group, independent


def side_parts(
    codec: Codec | None,
    residual: ResidualSide,
    tokens: int,
    heads: int,
    head_dim: int,
    measured: bool,
    dropped: int = 0,
) -> Counter[str]:
    """Bytes of one side of a layer by part; `measured`: of random states; `dropped`: first tokens not held."""
    if codec is None:
        return Counter(residual=plain_bytes(tokens - dropped, heads, head_dim, FP16))
    packed, block, independent = schedule(residual, codec, tokens)
    rest = Counter(residual=plain_bytes(tokens - packed, heads, head_dim, FP16))
    packed -= dropped
    if not packed:
        return rest
    if not measured:
        return layout(codec, packed, heads, head_dim, FP16, UNIT if independent else block) + rest
    states = torch.randn(1, heads, packed, head_dim, generator=torch.Generator().manual_seed(0)).to(FP16)
    store = (TokenStore if independent else BlockStore)(codec, keep_decoded=False)
    nothing = torch.zeros(1, packed, 0)  # angles follow from positions and are not stored
    store.add(states, block, Rope(nothing, nothing) if codec.uses_rope else None)
    return sum(map(_bytes_of, store.packed), rest)


def droppable(codec: Codec | None, residual: ResidualSide, tokens: int, wanted: int) -> int:
    """How many of the `wanted` first tokens of a side can be forgotten, after a prompt of `tokens`: whole blocks."""
    if codec is None:
        return wanted
    packed, block, independent = schedule(residual, codec, tokens)
    if codec.stores_lists:
        return 0
    if independent:
        block, packed = UNIT, packed // UNIT * UNIT
    if wanted >= packed:
        return packed
    return 0 if block is None else wanted // block * block


@dataclass(frozen=True)
class _StoredSide:
    """What one side of layers of a kind holds: `packed` encoded tokens; the first `dropped` tokens are forgotten."""

    side: str
    kind: LayerKind
    codec: Codec | None
    residual: ResidualSide
    packed: int
    dropped: int


def _stored_sides(shape: CacheShape, method: Method, tokens: int) -> Iterator[_StoredSide]:
    for kind in shape.layers:
        gone = outside(tokens, kind.window)
        sides = {side: (getattr(method, side), getattr(method.residual, side)) for side in ("key", "value")}
        if kind.window is not None:
            sides = {side: (codec, method.residual_in_window(codec, kept)) for side, (codec, kept) in sides.items()}
        dropped = common_droppable(gone, [functools.partial(droppable, *side, tokens) for side in sides.values()])
        for side, (codec, residual) in sides.items():
            packed = 0 if codec is None else schedule(residual, codec, tokens)[0] - dropped
            yield _StoredSide(side, kind, codec, residual, packed, dropped)


def rows_of(shape: CacheShape, method: Method, tokens: int, measured: bool) -> list[dict[str, Any]]:
    """One row per side: bytes of all layers by kind, and those of full precision; and a row of states, if there are."""
    rows: dict[str, dict[str, Any]] = {
        side: {"kind": "bytes", "side": side, "tokens": tokens, "measured": measured, **dict.fromkeys(KINDS, 0)}
        | {"total": 0, "fp16": 0, "packed_tokens": 0}
        for side in ("key", "value")
    }
    for stored in _stored_sides(shape, method, tokens):
        row, kind, dim = rows[stored.side], stored.kind, stored.kind.dim(stored.side)
        parts = side_parts(stored.codec, stored.residual, tokens, kind.heads, dim, measured, stored.dropped)
        for name, size in parts.items():
            row[kind_of(name)] += kind.count * size
        row["packed_tokens"] = max(row["packed_tokens"], stored.packed)
        row["fp16"] += kind.count * plain_bytes(tokens - outside(tokens, kind.window), kind.heads, dim, FP16)
    for row in rows.values():
        row["total"] = sum(row[name] for name in KINDS)
    out = list(rows.values())
    if size := shape.state_bytes:
        out.append({"kind": "bytes", "side": "state", "tokens": tokens, "total": size, "fp16": size})
    return out


def decoding_bytes(shape: CacheShape, method: Method, tokens: int) -> int:
    """Bytes beside the stored ones while dense attention reads the largest layer in 16 bits: the peak of decoding.

    Keys and values are decoded, and the larger of the two is copied where its full-precision tokens are joined to it;
    in full precision, where the new token is.
    """
    largest = 0
    for kind in shape.layers:
        held = tokens - outside(tokens, kind.window)
        sides = {side: plain_bytes(held, kind.heads, kind.dim(side), FP16) for side in ("key", "value")}
        decoded = sum(size for side, size in sides.items() if getattr(method, side) is not None)
        largest = max(largest, decoded + max(sides.values()))
    return largest


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Bytes by part for every length, keys and values apart."""
    task: MemoryConfig = inputs.config.task
    shape = cache_shape(inputs.config.model)
    rows = [row for tokens in sorted(task.lengths) for row in rows_of(shape, method, tokens, tokens <= task.measured)]
    metrics: dict[str, float] = {}
    for tokens in sorted(task.lengths):
        here = [row for row in rows if row["tokens"] == tokens]
        total, plain = (sum(row[name] for row in here) for name in ("total", "fp16"))
        plain_parts = shape.state_bytes + sum(row.get("residual", 0) for row in here)
        in_packed = sum(
            stored.kind.count * plain_bytes(stored.packed, stored.kind.heads, stored.kind.dim(stored.side), FP16)
            for stored in _stored_sides(shape, method, tokens)
        )
        found = {"total_bytes": float(total), "compression": plain / total if total else 0.0}
        found["peak_bytes"] = float(total + decoding_bytes(shape, method, tokens))
        if total > plain_parts:
            found["compression_without_residual"] = in_packed / (total - plain_parts)
            found["bits_without_residual"] = 16 * (total - plain_parts) / in_packed
        if shape.state_bytes:
            found["state_bytes"] = float(shape.state_bytes)
        metrics |= {f"{name}_{tokens}": value for name, value in found.items()}
    return Measurement(metrics, {name: metric_of(name).unit for name in metrics}, rows)


def check_shapes_suffice(method: Method) -> None:
    """Raise `Unsupported` for a method whose bytes do not follow from its codecs and a model's shape alone."""
    needed = ("codecs_alone", "all_at_once", "same_stages", "one_width", "all_layers", "all_tokens")
    method.check_needs("task=memory", *needed)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` or `Unsupported` for prompts, a method or a model whose bytes cannot be counted."""
    task: MemoryConfig = inputs.config.task
    check_shapes_suffice(method)
    for kind, side in itertools.product(cache_shape(inputs.config.model).layers, ("key", "value")):
        if (codec := getattr(method, side)) is not None:
            codec.check(kind.dim(side))
    inputs.check_tokens(max(task.lengths), f"task.lengths={task.lengths}:")


# Bytes depend on the model's shape, not on text.
TASK = Task(check, measure, lambda inputs: cache_shape(inputs.config.model).name)
