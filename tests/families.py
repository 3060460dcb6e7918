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
from kvq.models.load import LoadedModel
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


_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_FEW_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def _state_space(prefix: str, **other: Any) -> dict[str, Any]:
    """Settings of Mamba 2 layers, whose names differ by family."""
    sizes = {"n_heads": 4, "d_state": 8, "n_groups": 1, "chunk_size": 16}
    return {f"{prefix}{name}": size for name, size in sizes.items()} | other


def _latent(head_dim: int, **other: Any) -> dict[str, Any]:
    """Multi-head latent attention with a latent of `head_dim` channels."""
    ranks = {"kv_lora_rank": head_dim, "q_lora_rank": 32}
    dims = {"qk_nope_head_dim": 16, "qk_rope_head_dim": head_dim // 2, "v_head_dim": 16}
    return _without(_llama_like(head_dim, num_key_value_heads=4, **ranks, **dims, **other), "head_dim")


def _latent_experts(head_dim: int) -> dict[str, Any]:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    return _latent(head_dim, n_group=1, topk_group=1, first_k_dense_replace=1, **experts)


def _with_states(name: str, head_dim: int) -> tuple[str, dict[str, Any]] | None:
    """Families with linear attention or convolutions, or as `_with_state_spaces`."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    found = {
        "qwen3_next": (
            "Qwen3NextConfig",
            _llama_like(head_dim, shared_expert_intermediate_size=32, **experts, **_LINEAR, **_HALF_LINEAR),
        ),
        "qwen3_5": ("Qwen3_5TextConfig", _llama_like(head_dim, **_LINEAR, **_HALF_LINEAR)),
        "olmo_hybrid": ("OlmoHybridConfig", _llama_like(head_dim, **_LINEAR, **_HALF_LINEAR)),
        "kimi_linear": (
            "KimiLinearConfig",
            _latent(head_dim, num_experts=2, moe_intermediate_size=32, num_experts_per_token=1, **_HALF_LINEAR),
        ),
        "lfm2": ("Lfm2Config", _wide(head_dim, conv_L_cache=3, layer_types=["conv", "full_attention"])),
    }
    return found.get(name) or _with_state_spaces(name, head_dim)


_ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "mamba_ngroups": 1,
    "chunk_size": 16,
    "num_mem_blocks": 1,
    "time_step_min": 1e-30,
}


def _with_state_spaces(name: str, head_dim: int) -> tuple[str, dict[str, Any]] | None:
    """Families with layers of Mamba 1 or 2, beside attention or in its place."""
    mamba = {"mamba_d_head": 24}
    return {
        "falcon_h1": (
            "FalconH1Config",
            _llama_like(head_dim, mamba_d_ssm=48, mamba_d_head=12, **_state_space("mamba_")),
        ),
        "bamba": ("BambaConfig", _wide(head_dim, attn_layer_indices=[1], mamba_d_head=64, **_state_space("mamba_"))),
        "granitemoehybrid": (
            "GraniteMoeHybridConfig",
            _llama_like(
                head_dim,
                layer_types=["mamba", "attention"],
                shared_intermediate_size=32,
                **mamba,
                **_FEW_EXPERTS,
                **_state_space("mamba_"),
            ),
        ),
        "zamba2": ("Zamba2Config", _without(_llama_like(head_dim, 4, hidden_size=2 * head_dim, **_ZAMBA), "head_dim")),
        # transformers clamps the time step where it reads several tokens, and not where it reads one; so in zamba2.
        "nemotron_h": (
            "NemotronHConfig",
            _llama_like(
                head_dim,
                3,
                layer_types=["linear_attention", "full_attention", "mlp"],
                mamba_num_heads=4,
                mamba_head_dim=12,
                ssm_state_size=8,
                n_groups=1,
                chunk_size=16,
                time_step_min=1e-30,
            ),
        ),
        "jamba": (
            "JambaConfig",
            _wide(
                head_dim,
                attn_layer_period=2,
                attn_layer_offset=1,
                expert_layer_period=4,
                expert_layer_offset=3,
                num_experts=2,
                mamba_d_state=8,
                mamba_dt_rank=4,
                use_mamba_kernels=False,
            ),
        ),
    }.get(name)


def _settings(name: str, head_dim: int) -> tuple[str, dict[str, Any]]:
    """Class of the configuration, and its settings."""
    if (found := _with_states(name, head_dim)) is not None:
        return found
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
        "gpt_oss": ("GptOssConfig", _llama_like(head_dim, **_FEW_EXPERTS, **sliding)),
        "cohere2": ("Cohere2Config", _llama_like(head_dim, logit_scale=1.0, **sliding)),
        "olmo3": ("Olmo3Config", _llama_like(head_dim, **sliding)),
        "exaone4": ("Exaone4Config", _llama_like(head_dim, **sliding)),
        "starcoder2": ("Starcoder2Config", _wide(head_dim, sliding_window=WINDOW)),
        "llama4": (
            "Llama4TextConfig",
            _llama_like(
                head_dim,
                intermediate_size_mlp=64,
                attention_chunk_size=WINDOW,
                layer_types=["chunked_attention", "full_attention"],
                **_FEW_EXPERTS,
            ),
        ),
        "glm4": ("Glm4Config", _llama_like(head_dim)),
        "deepseek_v2": ("DeepseekV2Config", _latent_experts(head_dim)),
        "deepseek_v3": ("DeepseekV3Config", _latent_experts(head_dim)),
        "minicpm3": ("MiniCPM3Config", _latent(head_dim)),
        "glm4_moe_lite": ("Glm4MoeLiteConfig", _latent_experts(head_dim)),
    }[name]


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3n", "gemma4"]
FAMILIES += ["gpt2", "gpt_neox", "gptj", "phi3", "falcon", "falcon_alibi", "bloom"]
WINDOWED = ["mistral", "starcoder2", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "cohere2", "olmo3", "exaone4"]
"""Families with layers that look back `WINDOW` tokens."""
LATENT = ["deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "kimi_linear"]
"""Families that cache the latent of multi-head latent attention."""
HYBRID = ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2", "falcon_h1", "bamba", "granitemoehybrid"]
"""Families with layers that keep a state of fixed size."""
PLAIN = ["gpt_oss", "cohere2", "olmo3", "exaone4", "starcoder2", "llama4", "glm4"]
MORE = [*PLAIN, *LATENT[:-1], *HYBRID, "nemotron_h", "zamba2"]
"""Families beside `FAMILIES`."""


def family(name: str, head_dim: int = 32, seed: int = 0) -> LoadedModel:
    """A random model of this family, as tasks take it, with peaked attention, so that what the cache holds matters."""
    torch.manual_seed(seed)
    kind, settings = _settings(name, head_dim)
    config: PretrainedConfig = getattr(transformers, kind)(**settings)
    # The grouped product of experts has no double precision.
    given = {"experts_implementation": "eager"} if any("experts" in setting for setting in settings) else {}
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
