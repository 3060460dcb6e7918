"""Decoded tokens per second and bytes of caches beside transformers' own, on random layers of an 8B model's shape.

Every cache is given the same random past; then all decode a few tokens in turns, so that ratios are paired.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from attention_bench import ratios
from kvq_zoo.library_caches import is_installed
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from kvq.cache import KVCache
from kvq.cache.layer import KVCacheLayer
from kvq.methods.build import build_method

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


def quantized(model: Any, packed: Sequence[tuple[str, int]] = PACKED) -> dict[str, KVCache]:
    """Empty caches by label: transformers' quantized ones, where their packages are installed, and packed ones."""
    own = [(name, bits, {}) for name, bits in PEERS if is_installed(name)]
    own += [(name, bits, {"attention": "packed"}) for name, bits in packed]
    dim = model.config.head_dim
    return {
        f"{name} {bits}{'' if how else ' (QuantizedCache)'}": KVCache(
            model, build_method(name, bits=bits, head_dim=dim), **how
        )
        for name, bits, how in own
    }


def filled(cache: Any, states: Sequence[tuple[Tensor, Tensor]], model: Any) -> Any:
    """The cache with keys and values of each layer, as if it had read their tokens in one prefill."""
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        if isinstance(layer, KVCacheLayer) and layer.key.rope is not None:
            tokens = keys.shape[2]
            layer.key.rope.extend(0, tokens, model.model.rotary_emb(keys, torch.arange(tokens)[None]), keys)
        layer.update(keys, values)
    return cache


def random_states() -> list[tuple[Tensor, Tensor]]:
    """Keys and values of `CONTEXT` tokens in every layer."""
    generator, shape = torch.Generator().manual_seed(1), (1, SHAPE["num_key_value_heads"], CONTEXT, SHAPE["head_dim"])
    keys_and_values = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2 * LAYERS)]
    return list(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))


def bytes_of(cache: Any) -> int:
    """Bytes of everything that a cache holds."""
    if isinstance(cache, KVCache):
        return cache.nbytes
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


def measure(pairs: int) -> dict[str, Any]:
    """Tokens per second of each cache, in turns; ratios of speed over DynamicCache, and of its bytes over theirs."""
    model = stack()
    with torch.inference_mode():
        states, empty = random_states(), {REFERENCE: DynamicCache(config=model.config), **quantized(model)}
        held = {label: filled(cache, states, model) for label, cache in empty.items()}
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
            label: compared(seconds[REFERENCE], seconds[label], reference, bytes_of(cache))
            for label, cache in held.items()
        },
    }


def compared(reference: list[float], seconds: list[float], reference_bytes: int, size: int) -> dict[str, Any]:
    """Speed over the reference's, paired, and memory under its."""
    return {
        **ratios(reference, seconds),
        "tokens_per_second": 1 / statistics.median(seconds),
        "bytes": size,
        "memory_ratio": reference_bytes / size,
    }


def show(report: dict[str, Any]) -> None:
    """Print a line for each cache."""
    for label, cell in report["cells"].items():
        print(
            f"{'peers':<34}{label:<26}{cell['ratio_median']:8.2f}x of DynamicCache's speed ({cell['ratio_min']:.2f} to "
            f"{cell['ratio_max']:.2f}), {cell['tokens_per_second']:.2f} tokens/s, {cell['bytes'] / 1e6:.1f} MB, "
            f"memory 1/{cell['memory_ratio']:.2f}"
        )
