"""Which models' GGUF files hold queries and keys in another order of channels than transformers."""

from __future__ import annotations

from typing import Any

INTERLEAVED_IN_GGUF = frozenset(
    (
        "llama mistral mixtral ministral ministral3 granite granitemoe minicpm internlm2 olmo smollm3 arcee baichuan "
        "xverse deepseek"
    ).split()
)
"""By `model_type`: llama.cpp's converter permutes rows of `q_proj` and `k_proj` (`LlamaModel.permute`, `undo_permute`).

Its RoPE then takes neighbouring channels as pairs (`LLAMA_ROPE_TYPE_NORM`). Qwen, Gemma, Phi, Falcon, OLMo 2, GPT-NeoX,
StarCoder 2 and others keep transformers' rows (`LLAMA_ROPE_TYPE_NEOX`); Cohere and GLM have neighbouring pairs in both.
"""


def interleaved_in_gguf(config: Any) -> bool:
    """Whether the GGUF file of a model with this transformers text configuration interleaves halves of its heads."""
    return getattr(config, "model_type", None) in INTERLEAVED_IN_GGUF
