"""`task=memory`: bytes of the cache by part after a prompt, from stored tensors, or for long prompts from their layout.

No weights are read: bytes depend on a model's shape alone. The papers' results: nsn's 5.09x at 2,048 tokens and 3 bits,
OScaR's 5.3x at 128K tokens and 2 bits, both against 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch

from kvq.cache.store import UNIT, BlockStore, TokenStore
from kvq.codecs import Codec, Rope
from kvq.config.diagnostics import MemoryConfig
from kvq.config.residual import Policy, PrefillBlock, ResidualSide, leaving
from kvq.diagnostics.layout import KINDS, by_kind, layout, plain_bytes
from kvq.errors import ConfigError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.shapes import CacheShape, cache_shape
from kvq.results.journal import Journal
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.stepwise import check_codecs_alone, check_layers_alike

FP16 = torch.float16
"""Dtype of the papers' reference and of the residual here, whatever the model's dtype."""


def schedule(residual: ResidualSide, codec: Codec, tokens: int) -> tuple[int, int | None, bool]:
    """Packed tokens after a prompt of `tokens`, their block size (None: one block), and whether each is independent."""
    if residual.policy is Policy.none or (not residual.size and not residual.keeps_nothing):
        whole = residual.prefill_block is PrefillBlock.whole or not residual.size
        return tokens, None if whole else residual.size, False
    kept, group = residual.schedule(codec.token_group)
    whole = residual.prefill_block is PrefillBlock.whole
    alone = residual.policy is Policy.sliding and group == 1
    return leaving(tokens, kept, group, whole), None if whole and not alone else group, alone


def side_parts(
    codec: Codec | None, residual: ResidualSide, tokens: int, heads: int, head_dim: int, measured: bool
) -> dict[str, int]:
    """Bytes of keys or values of one layer by part; full-precision tokens are part `residual`.

    `measured`: random states are encoded and stored; else bytes follow from the layout.
    """
    if codec is None:
        return {"residual": plain_bytes(tokens, heads, head_dim, FP16)}
    packed, block, alone = schedule(residual, codec, tokens)
    rest = {"residual": plain_bytes(tokens - packed, heads, head_dim, FP16)} if tokens > packed else {}
    if not packed:
        return rest
    if not measured:
        return layout(codec, packed, heads, head_dim, FP16, UNIT if alone else block) | rest
    states = torch.randn(1, heads, packed, head_dim, generator=torch.Generator().manual_seed(0)).to(FP16)
    store = (TokenStore if alone else BlockStore)(codec, keep_decoded=False)
    nothing = torch.zeros(1, packed, 0)  # angles follow from positions and are not stored
    store.add(states, block, Rope(nothing, nothing) if codec.uses_rope else None)
    out: dict[str, int] = {}
    for run in store.packed:
        for name, part in run.parts.items():
            out[name] = out.get(name, 0) + part.numel() * part.element_size()
    return out | rest


def rows_of(shape: CacheShape, method: Method, tokens: int, measured: bool) -> list[dict[str, Any]]:
    """One row per side: bytes of all layers by kind, and their bytes in fp16."""
    rows = []
    for side in ("key", "value"):
        kinds, plain = dict.fromkeys(KINDS, 0), 0
        for layers, heads, head_dim in shape.layers:
            parts = side_parts(getattr(method, side), getattr(method.residual, side), tokens, heads, head_dim, measured)
            for kind, size in by_kind(parts).items():
                kinds[kind] += layers * size
            plain += layers * plain_bytes(tokens, heads, head_dim, FP16)
        rows.append(
            {
                "kind": "bytes",
                "side": side,
                "tokens": tokens,
                "measured": measured,
                **kinds,
                "total": sum(kinds.values()),
                "fp16": plain,
                "packed_tokens": _packed(method, side, tokens),
            }
        )
    return rows


def _packed(method: Method, side: str, tokens: int) -> int:
    codec = getattr(method, side)
    return 0 if codec is None else schedule(getattr(method.residual, side), codec, tokens)[0]


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Bytes by part for every length, keys and values apart."""
    task: MemoryConfig = inputs.config.task
    shape = cache_shape(inputs.config.model)
    rows = [row for tokens in sorted(task.lengths) for row in rows_of(shape, method, tokens, tokens <= task.measured)]
    metrics, units = {}, {}
    for tokens in sorted(task.lengths):
        here = [row for row in rows if row["tokens"] == tokens]
        total, plain = (sum(row[name] for row in here) for name in ("total", "fp16"))
        residual = sum(row["residual"] for row in here)
        in_packed = sum(row["fp16"] * row["packed_tokens"] // tokens for row in here)
        found = {"total_bytes": (float(total), "bytes"), "compression": (plain / total, "x") if total else (0.0, "x")}
        if total > residual:
            found["compression_without_residual"] = (in_packed / (total - residual), "x")
            found["bits_without_residual"] = (16 * (total - residual) / in_packed, "bits")
        for name, (value, unit) in found.items():
            metrics[f"{name}_{tokens}"], units[f"{name}_{tokens}"] = value, unit
    return Measurement(metrics, units, rows)


def check(inputs: Inputs, method: Method) -> None:
    """Check prompts, method and model.

    Raises:
        ConfigError: prompts longer than the model takes.
        Unsupported: more than one codec per side, or layers that hold other things than all keys and values.
    """
    task: MemoryConfig = inputs.config.task
    check_codecs_alone(method, task.name)
    check_layers_alike(method, task.name)
    shape = cache_shape(inputs.config.model)
    if shape.others:
        raise Unsupported(
            f"task=memory: counts keys and values; layers of {inputs.config.model.name} cache {shape.others}"
        )
    if shape.window is not None and max(task.lengths) >= shape.window:
        raise Unsupported(
            f"task.lengths={task.lengths}: task=memory counts layers that keep the whole past; some of "
            f"model={inputs.config.model.name} drop what has left a window of {shape.window}"
        )
    longest = shape.context
    if longest is not None and max(task.lengths) > longest:
        raise ConfigError(
            f"task.lengths={task.lengths}: model={inputs.config.model.name} takes at most {longest} tokens"
        )


def fingerprint(inputs: Inputs) -> str:
    """The shape: bytes do not depend on text."""
    return cache_shape(inputs.config.model).name


TASK = Task(check, measure, fingerprint)
