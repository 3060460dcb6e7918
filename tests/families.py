"""A tiny random model of every architecture that the harness is tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from kvq.cache import KVCache
from kvq.methods.method import Method
from kvq.models import LoadedModel
from tests.random_models import VOCABULARY

WINDOW = 24
"""Tokens that a sliding attention layer looks back."""
_KINDS = ["sliding_attention", "full_attention"]
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _llama_like(head_dim: int, layers: int = 2, **other: Any) -> dict[str, Any]:
    """Settings of the families that followed Llama."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        **_NO_TOKENS,
        **other,
    }


def _wide(head_dim: int, **other: Any) -> dict[str, Any]:
    """Of those without a head_dim of its own: the hidden size decides it."""
    settings = _llama_like(head_dim, hidden_size=4 * head_dim, **other)
    del settings["head_dim"]
    return settings


def _gpt(head_dim: int, **other: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 4 * head_dim, "n_layer": 2, "n_head": 4}
    return {**sizes, "initializer_range": 0.2, **_NO_TOKENS, **other}


def _bloom(head_dim: int) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 4 * head_dim, "n_layer": 2, "n_head": 4}
    return {**sizes, "initializer_range": 0.2, **_NO_TOKENS}


def _mpt(head_dim: int) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "d_model": 4 * head_dim, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}
    return {**sizes, "initializer_range": 0.2, **_NO_TOKENS}


def _shared(head_dim: int, **other: Any) -> dict[str, Any]:
    """Gemma with layers that read the keys and values of earlier ones."""
    kinds = {"layer_types": 2 * _KINDS, "sliding_window": WINDOW, "num_kv_shared_layers": 2}
    inputs = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    return _llama_like(head_dim, 4, **kinds, **inputs, **other)


def _settings(name: str, head_dim: int) -> tuple[str, dict[str, Any]]:
    """Class of the configuration, and its settings."""
    sliding = {"sliding_window": WINDOW, "layer_types": _KINDS}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return {
        "llama": ("LlamaConfig", _llama_like(head_dim)),
        "mistral": ("MistralConfig", _llama_like(head_dim, sliding_window=WINDOW)),
        "qwen2": ("Qwen2Config", _wide(head_dim)),
        "qwen3": ("Qwen3Config", _llama_like(head_dim)),
        "qwen3_moe": ("Qwen3MoeConfig", _llama_like(head_dim, **experts)),
        "gemma2": ("Gemma2Config", _llama_like(head_dim, query_pre_attn_scalar=head_dim, **sliding)),
        "gemma3": ("Gemma3TextConfig", _llama_like(head_dim, query_pre_attn_scalar=head_dim, **sliding)),
        "gemma3n": ("Gemma3nTextConfig", _shared(head_dim, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4)),
        "gemma4": ("Gemma4TextConfig", _shared(head_dim, global_head_dim=2 * head_dim)),
        "gpt2": ("GPT2Config", _gpt(head_dim)),
        "gpt_neox": ("GPTNeoXConfig", _without(_wide(head_dim), "num_key_value_heads")),
        "gptj": ("GPTJConfig", _gpt(head_dim, rotary_dim=head_dim // 2)),
        "phi3": ("Phi3Config", _wide(head_dim)),
        "falcon": ("FalconConfig", _without(_wide(head_dim), "num_key_value_heads", "intermediate_size")),
        "falcon_alibi": (
            "FalconConfig",
            _without(_wide(head_dim, alibi=True), "num_key_value_heads", "intermediate_size"),
        ),
        "bloom": ("BloomConfig", _bloom(head_dim)),
        "mpt": ("MptConfig", _mpt(head_dim)),
    }[name]


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt2",
    "gpt_neox",
    "gptj",
    "phi3",
    "falcon",
    "falcon_alibi",
    "bloom",
]


def family(name: str, head_dim: int = 32, seed: int = 0) -> LoadedModel:
    """A random model of this family, as tasks take it, with peaked attention, so that what the cache holds matters."""
    torch.manual_seed(seed)
    kind, settings = _settings(name, head_dim)
    config: PretrainedConfig = getattr(transformers, kind)(**settings)
    # The grouped product of experts has no double precision.
    given = {"experts_implementation": "eager"} if "num_experts" in settings else {}
    model = AutoModelForCausalLM.from_config(config, **given)
    return LoadedModel(model.eval().requires_grad_(False), torch.device("cpu"))


def generates_greedily(loaded: LoadedModel, make: Callable[[], Method], tokens: Tensor, steps: int) -> KVCache:
    """`generate` writes what feeding its own tokens back one by one gives; returns the cache of `generate`."""
    settings = {
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": steps,
        "do_sample": False,
        "pad_token_id": 0,
    }
    cache, again = KVCache(loaded.model, make()), KVCache(loaded.model, make())
    out = loaded.model.generate(tokens, past_key_values=cache, **settings)
    piece = tokens
    for step in range(steps):
        piece = loaded.model(piece, past_key_values=again).logits[:, -1].argmax(-1, keepdim=True)
        assert torch.equal(piece[:, 0], out[:, tokens.shape[1] + step])
    return cache
