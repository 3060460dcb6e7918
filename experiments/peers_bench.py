"""Decoded tokens per second and bytes of caches beside transformers' own, on random layers of an 8B model's shape.

Every cache is given the same random past; then all decode a few tokens in turns, so that ratios are paired.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attention_bench import ratios
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from kvq.cache import KVCache
from kvq.cache.layer import KVCacheLayer
from kvq.methods.build import build_method
from kvq.methods.transformers_caches import installed

LAYERS, CONTEXT, DECODED = 2, 16384, 4
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 2 * CONTEXT,
}  # fmt: skip
"""Llama 3.1 8B's layers; the vocabulary is smaller, so that its head takes no time that no cache changes."""
PACKED = (
    ("q8_0", 8),
    ("q4_0", 4),
    ("kivi", 4),
    ("kivi", 2),
    ("nsn", 2),
    ("oscar", 2),
    ("nsnquant", 2),
    ("turboquant", 2),
)
PEERS = (("quanto", 4), ("hqq", 4))
REFERENCE = "DynamicCache"


def stack() -> PreTrainedModel:
    """Random weights in bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=LAYERS, dtype=torch.bfloat16, **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()  # type: ignore[no-any-return]


def caches(model: PreTrainedModel) -> dict[str, Callable[[], Any]]:
    """How each cache is made, by its label; packages that are not installed are left out."""
    made: dict[str, Callable[[], Any]] = {REFERENCE: lambda: DynamicCache(config=model.config)}
    for name, bits in PEERS:
        if installed(name):
            made[f"{name} {bits} (QuantizedCache)"] = lambda name=name, bits=bits: KVCache(
                model, build_method(name, bits=bits, head_dim=128)
            )
    for name, bits in PACKED:
        made[f"{name} {bits}"] = lambda name=name, bits=bits: KVCache(
            model, build_method(name, bits=bits, head_dim=128), attention="packed"
        )
    return made


def filled(make: Callable[[], Any], model: PreTrainedModel) -> Any:
    """A cache that holds `CONTEXT` random tokens in every layer, as if it had read them in one prefill."""
    cache, generator = make(), torch.Generator().manual_seed(1)
    for index in range(LAYERS):
        shape = (1, SHAPE["num_key_value_heads"], CONTEXT, SHAPE["head_dim"])
        keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
        layer = cache.layers[index]
        if isinstance(cache, KVCache) and isinstance(layer, KVCacheLayer) and layer.key.rope is not None:
            layer.key.rope.extend(0, CONTEXT, model.model.rotary_emb(keys, torch.arange(CONTEXT)[None]), keys)
        layer.update(keys, values)
    return cache


def bytes_of(cache: Any) -> int:
    """Bytes of everything that a cache holds."""
    if isinstance(cache, KVCache):
        return cache.nbytes
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


def measure(pairs: int) -> dict[str, Any]:
    """Tokens per second of each cache, in turns; ratios of speed over DynamicCache, and of its bytes over theirs."""
    model = stack()
    with torch.inference_mode():
        held = {label: filled(make, model) for label, make in caches(model).items()}
        seconds: dict[str, list[float]] = {label: [] for label in held}
        for turn in range(pairs + 1):
            for label, cache in held.items():
                start = time.perf_counter()
                for token in range(DECODED):
                    model(torch.tensor([[token + 1]]), past_key_values=cache, use_cache=True)
                if turn:  # the first compiles and warms up
                    seconds[label].append((time.perf_counter() - start) / DECODED)
    reference = bytes_of(held[REFERENCE])
    return {
        "shape": {**SHAPE, "layers": LAYERS, "context": CONTEXT},
        "threads": torch.get_num_threads(),
        "cells": {
            label: {
                **ratios(seconds[REFERENCE], seconds[label]),
                "tokens_per_second": 1 / statistics.median(seconds[label]),
                "bytes": bytes_of(cache),
                "memory_ratio": reference / bytes_of(cache),
            }
            for label, cache in held.items()
        },
    }


def show(report: dict[str, Any]) -> None:
    """Print a line for each cache."""
    for label, cell in report["cells"].items():
        print(
            f"{'peers':<34}{label:<26}{cell['ratio_median']:8.2f}x of DynamicCache's speed ({cell['ratio_min']:.2f} to "
            f"{cell['ratio_max']:.2f}), {cell['tokens_per_second']:.2f} tokens/s, {cell['bytes'] / 1e6:.1f} MB, "
            f"memory 1/{cell['memory_ratio']:.2f}"
        )
