"""GGUF files of models in memory: architectures whose tensors llama.cpp knows by these names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvq.errors import Unsupported
from kvq.models.layers import interleaved_in_gguf

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's name of an architecture, by transformers' `model_type`."""
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Any, file: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a model's weights and shape as GGUF, without a vocabulary.

    Args:
        model: a transformers causal language model of one of `ARCHITECTURES`.
        file: where to.
        dtype: of its matrices, float32 or float16; vectors stay in float32.

    Raises:
        Unsupported: another architecture, scaled RoPE, attention to a window, a weight without a name in GGUF.
    """
    import gguf

    config = model.config
    name = ARCHITECTURES.get(config.model_type)
    if name is None:
        raise Unsupported(
            f"task.engine: no GGUF is written of model_type={config.model_type}, only of {', '.join(ARCHITECTURES)}; "
            "give task.engine.file"
        )
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" or getattr(config, "use_sliding_window", False):
        raise Unsupported("task.engine: no GGUF is written of scaled RoPE or of attention to a window")
    writer = gguf.GGUFWriter(str(file), name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for given, weight in model.state_dict().items():
        if given != "lm_head.weight" or not config.tie_word_embeddings:
            known, kind = _name(given), given.rpartition(".")[2]
            if interleaved_in_gguf(config) and known.endswith(("attn_q", "attn_k")):
                weight = _interleaved(weight, head_dim)
            stored = weight.detach().to("cpu", dtype if weight.ndim > 1 else torch.float32)
            writer.add_tensor(f"{known}.{kind}", np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(given: str) -> str:
    module = given.rpartition(".")[0]
    if module in _OF_MODEL:
        return _OF_MODEL[module]
    layers, _, rest = module.partition(".layers.")
    number, _, part = rest.partition(".")
    if layers != "model" or part not in _OF_LAYER:
        raise Unsupported(f"task.engine: GGUF has no name for the weight {given}")
    return f"blk.{number}.{_OF_LAYER[part]}"


def _interleaved(weight: Float[Tensor, "*rows"], head_dim: int) -> Float[Tensor, "*rows"]:
    """Rows of queries or keys with the two halves of each head's channels interleaved, as llama.cpp's RoPE wants."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
