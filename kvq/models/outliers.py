"""Outlier channels implanted into a model without changing its function.

Scaling a RoPE pair of `k_proj` rows by alpha and the matching `q_proj` rows by 1/alpha leaves every attention score as
it was; scaling rows of `v_proj` by beta and the matching columns of `o_proj` by 1/beta leaves every output as it was.
The cached keys and values then have channel outliers, as those of 7B models do (KIVI, arXiv 2402.02750, figure 2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvq.config import OutliersConfig
from kvq.errors import Unsupported
from kvq.models.head_dims import head_dims_of


@torch.no_grad()
def implant_outliers(model: nn.Module, settings: OutliersConfig) -> None:
    """Implant outlier channels in every layer and KV head of a llama-shaped model, in place.

    Powers of two as scales are exact in fp16. Channels are drawn from `settings.seed`, a stream of their own.

    Raises:
        Unsupported: attention without separate q, k, v and o projections, or with a norm between projection and RoPE.
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
    generator = torch.Generator().manual_seed(settings.seed)
    for attention in attentions:
        for kv_head in range(kv_heads):
            pairs = torch.randperm(head_dim // 2, generator=generator)[: settings.key_pairs]
            channels = torch.randperm(head_dim, generator=generator)[: settings.value_channels]
            key_rows = torch.cat([pairs, pairs + head_dim // 2])  # RoPE rotates channel i with i + head_dim/2
            _scale_rows(attention.k_proj, kv_head * head_dim + key_rows, settings.key_scale)
            _scale_rows(attention.v_proj, kv_head * head_dim + channels, settings.value_scale)
            for head in range(kv_head * heads // kv_heads, (kv_head + 1) * heads // kv_heads):
                _scale_rows(attention.q_proj, head * head_dim + key_rows, 1 / settings.key_scale)
                attention.o_proj.weight[:, head * head_dim + channels] /= settings.value_scale


def _scale_rows(linear: nn.Linear, rows: Tensor, scale: float) -> None:
    linear.weight[rows] *= scale
    if linear.bias is not None:
        linear.bias[rows] *= scale
