"""Channels of one attention head in the layers of a model, and which models keep no keys and values per head."""

from __future__ import annotations

from typing import Any

from kvq.errors import Unsupported


def head_dims_of(config: Any) -> list[int]:
    """Channels of one attention head in every layer that has keys and values of its own.

    Args:
        config: a transformers text configuration.

    Raises:
        Unsupported: some layer keeps something other than keys and values per head.
    """
    name = type(config).__name__
    if getattr(config, "kv_lora_rank", None):
        raise Unsupported(
            f"model: {name} has multi-head latent attention (kv_lora_rank={config.kv_lora_rank}): it caches latent "
            "vectors, not keys and values per head"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        given = ", ".join(sorted(kinds))
        raise Unsupported(f"model: {name} has layers of {given}, whose state is not keys and values of every token")
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    own = getattr(config, "per_layer_config", None)  # since transformers 5.18, where layers may differ
    return [_head_dim(config if own is None else own[index], config) for index in range(count)]


def _head_dim(layer: Any, config: Any) -> int:
    try:
        return int(getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    except Exception as error:  # of a kind of its own where layers differ
        raise Unsupported(f"model: {type(config).__name__} does not say the head_dim of each layer") from error
