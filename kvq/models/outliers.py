"""Outlier channels implanted into a model without changing its function.

Scaling a RoPE pair of `k_proj` rows by alpha and the matching `q_proj` rows by 1/alpha leaves every attention score as
it was; scaling rows of `v_proj` by beta and the matching columns of `o_proj` by 1/beta leaves every output as it was.
The cached keys and values then have channel outliers, as those of 7B models do (KIVI, arXiv 2402.02750, figure 2).

A sink can lack them only where its key is next to nothing in the scaled pairs anyway: a query meets every key with
the same 1/alpha, so a key left unscaled would lose the pair's part of its score, and no other pair rotates as that one
does, which could make up for it. So `sink: false` takes the channels in which the sink has least.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvq.config import OutliersConfig
from kvq.errors import Unsupported
from kvq.models.layers import head_dims_of


@torch.no_grad()
def implant_outliers(model: nn.Module, settings: OutliersConfig) -> None:
    """Implant outlier channels in every layer and KV head of a llama-shaped model, in place.

    Powers of two as scales are exact in fp16. Channels are drawn from `settings.seed`, a stream of their own, or are
    those in which the begin-of-text token has least.

    Raises:
        Unsupported: attention without separate q, k, v and o projections, or with a norm between projection and RoPE;
            no begin-of-text token, which `settings.sink=False` asks for.
    """
    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    for attention in attentions or [model]:
        plain = all(hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        if not plain or hasattr(attention, "k_norm"):
            raise Unsupported(f"model.outliers: {type(attention).__name__} has no plain q, k, v and o projections")
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads, kv_heads, (head_dim, *others) = config.num_attention_heads, config.num_key_value_heads, head_dims_of(config)
    if set(others) - {head_dim}:
        raise Unsupported(f"model.outliers: {type(model).__name__} has several head dims")
    if settings.key_pairs > head_dim // 2 or settings.value_channels > head_dim:
        raise Unsupported(f"model.outliers: head_dim={head_dim} has {head_dim // 2} pairs and {head_dim} channels")
    begin, sinks = config.bos_token_id, None
    if not settings.sink:
        if begin is None:
            raise Unsupported(f"model.outliers.sink=false: {type(model).__name__} has no begin-of-text token")
        sinks = _first_keys_and_values(model, begin)
    generator = torch.Generator().manual_seed(settings.seed)
    for layer, attention in enumerate(attentions):
        for kv_head in range(kv_heads):
            if sinks is None:
                pairs = torch.randperm(head_dim // 2, generator=generator)[: settings.key_pairs]
                channels = torch.randperm(head_dim, generator=generator)[: settings.value_channels]
            else:
                key, value = (each[kv_head] for each in sinks[layer])
                pairs = key.view(2, -1).norm(dim=0).argsort()[: settings.key_pairs]
                channels = value.abs().argsort()[: settings.value_channels]
            key_rows = torch.cat([pairs, pairs + head_dim // 2])  # RoPE rotates channel i with i + head_dim/2
            _scale_rows(attention.k_proj, kv_head * head_dim + key_rows, settings.key_scale)
            _scale_rows(attention.v_proj, kv_head * head_dim + channels, settings.value_scale)
            for head in range(kv_head * heads // kv_heads, (kv_head + 1) * heads // kv_heads):
                _scale_rows(attention.q_proj, head * head_dim + key_rows, 1 / settings.key_scale)
                attention.o_proj.weight[:, head * head_dim + channels] /= settings.value_scale


def _first_keys_and_values(model: Any, token: int) -> list[tuple[Float[Tensor, "kv_heads head_dim"], ...]]:
    """What each layer's cache holds of `token` at position 0 before whatever text; RoPE turns it by nothing."""
    found = model(torch.tensor([[token]], device=model.get_input_embeddings().weight.device), use_cache=True)
    return [(layer.keys[0, :, 0].cpu(), layer.values[0, :, 0].cpu()) for layer in found.past_key_values.layers]


def _scale_rows(linear: nn.Linear, rows: Tensor, scale: float) -> None:
    linear.weight[rows] *= scale
    if linear.bias is not None:
        linear.bias[rows] *= scale
