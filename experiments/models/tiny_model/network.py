"""Loss of the Llama network in training: the function of transformers' model, laid out for bf16 units of a CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, scaled_dot_product_attention, silu
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from tiny_model.recipe import Recipe

TokenLosses = Callable[[Int[Tensor, "batch tokens+1"]], Float[Tensor, "batch tokens"]]
# Rotated queries [batch, heads, tokens, size], rotated keys and values [batch, KV heads, tokens, size].
Attended = tuple[Tensor, Tensor, Tensor]
# Up to this length one product over all pairs of tokens is faster than the fused kernel, whose backward pass is slow.
DENSE_TOKENS = 512
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def keep_memory() -> None:
    """Let the allocator of glibc keep large blocks: each step wants the same ones, and fresh pages cost half of it."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, top_pad, mmap_max = -1, -2, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 2**28)


def build_model(recipe: Recipe, vocabulary: int) -> LlamaForCausalLM:
    """Return the untrained model: 4 query and 2 KV heads of head_dim 128."""
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def token_losses(model: LlamaForCausalLM, precision: str, compiled: bool) -> TokenLosses:
    """Return the function from sequences to the loss of each next token, in nats.

    Products and the weights in them have `precision`; the residual stream, norms, softmaxes and gradients of the
    weights are fp32.
    """
    dtype = DTYPES[precision]

    def losses(tokens: Int[Tensor, "batch tokens+1"]) -> Float[Tensor, "batch tokens"]:
        logits = token_logits(model, tokens[:, :-1], dtype)
        flat = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return flat.view(logits.shape[:2])

    return torch.compile(losses, dynamic=False) if compiled else losses


def token_logits(
    model: LlamaForCausalLM,
    tokens: Int[Tensor, "batch tokens"],
    dtype: torch.dtype,
    attended: list[Attended] | None = None,
) -> Float[Tensor, "batch tokens vocabulary"]:
    """Return fp32 logits; `attended` gets each layer's queries, keys and values as they are attended."""
    words = model.model.embed_tokens.weight.to(dtype)
    hidden = embedding(tokens, words).float()
    rotation = _rotation(model, hidden.shape[1], dtype)
    for layer in model.model.layers:
        hidden = _layer(layer, hidden, rotation, dtype, attended)
    return linear(_norm(hidden, model.model.norm, dtype), words).float()


def _rotation(model: LlamaForCausalLM, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [tokens, head_dim / 2]."""
    config: Any = model.config
    size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    frequencies = theta ** -(torch.arange(0, size, 2).float() / size)
    angles = torch.arange(length).float()[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _norm(hidden: Float[Tensor, "batch tokens dim"], norm: LlamaRMSNorm, dtype: torch.dtype) -> Tensor:
    scaled = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return scaled.to(dtype) * norm.weight.to(dtype)


def _layer(
    layer: LlamaDecoderLayer,
    hidden: Float[Tensor, "batch tokens dim"],
    rotation: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    attended: list[Attended] | None,
) -> Float[Tensor, "batch tokens dim"]:
    attention, mlp = layer.self_attn, layer.mlp
    size, groups = attention.head_dim, attention.num_key_value_groups
    # One product for three projections, and one for two: wide products use the matrix units better.
    weight = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)).to(dtype)
    heads = linear(_norm(hidden, layer.input_layernorm, dtype), weight).unflatten(-1, (-1, size)).transpose(1, 2)
    kv = heads.shape[1] // (groups + 2)
    query, key, value = heads.split((kv * groups, kv, kv), dim=1)
    query, key = _rotate(query, rotation), _rotate(key, rotation)
    if attended is not None:
        attended.append((query, key, value))
    mixed = _attend(query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1))
    hidden = hidden + linear(mixed.transpose(1, 2).flatten(2), attention.o_proj.weight.to(dtype))
    weight = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).to(dtype)
    gate, up = linear(_norm(hidden, layer.post_attention_layernorm, dtype), weight).chunk(2, -1)
    return hidden + linear(silu(gate) * up, mlp.down_proj.weight.to(dtype))


def _rotate(
    heads: Float[Tensor, "batch heads tokens size"], rotation: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch heads tokens size"]:
    (cos, sin), (first, second) = rotation, heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attend(
    query: Float[Tensor, "batch heads tokens size"],
    key: Float[Tensor, "batch heads tokens size"],
    value: Float[Tensor, "batch heads tokens size"],
) -> Float[Tensor, "batch heads tokens size"]:
    tokens = query.shape[-2]
    if tokens > DENSE_TOKENS:
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    future = torch.full((tokens, tokens), float("-inf")).triu(1)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    return torch.matmul(torch.softmax(scores + future, -1).to(value.dtype), value)
