"""What each layer of a model caches: keys and values, a state of fixed size, both, or nothing; and channels in GGUF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import Unsupported

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding")
_STATE = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_NOTHING = ("mlp", "moe")
_OUTSIDE = {
    "xlm": "keeps no keys and values in a cache that it is given",
    "recurrent_gemma": "keeps its recurrent states in its modules, outside of any cache",
}
"""Families whose states a cache does not hold, by `model_type`."""


@dataclass(frozen=True)
class KvLayer:
    """A layer with keys and values of its own, number `index` among all layers of the model (`layer_idx`).

    Attributes:
        head_dim, value_dim: channels of a cached key and value per head. Of multi-head latent attention: of the
            latent, one head, and of the rotated part of the keys, which is cached in values' place.
        window: how many tokens back a query reads, itself included; None: all.
    """

    index: int
    head_dim: int
    value_dim: int
    window: int | None


def kv_layers_of(config: Any) -> list[KvLayer]:
    """The layers that have keys and values of their own, in order, by a model's transformers text configuration."""
    name, kinds = type(config).__name__, _layer_types(config)
    unknown = set(kinds) - {*_ATTENTION, *_STATE, *_NOTHING}
    if unknown:
        given = ", ".join(sorted(unknown))
        raise Unsupported(f"model: {name} has layers of {given}, whose state is not keys and values of every token")
    if (outside := _OUTSIDE.get(getattr(config, "model_type", ""))) is not None:
        raise Unsupported(f"model: {name} {outside}")
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    found = [_kv_layer(config, index) for index in range(count) if kinds[index] in _ATTENTION]
    if not found:
        raise Unsupported(f"model: {name} has no keys and values, only states of fixed size")
    return found


def latent_numbers(config: Any) -> int | None:
    """Numbers that multi-head latent attention caches for a token in a layer; None: another attention."""
    try:
        rank = getattr(config, "kv_lora_rank", None)
    except RuntimeError as error:  # transformers refuses a setting that differs by layer
        raise Unsupported(f"model: {type(config).__name__} has latents of another size in some layers") from error
    return int(rank) + int(config.qk_rope_head_dim) if rank else None


def head_dims_of(config: Any) -> list[int]:
    """Channels of a cached key per head, of every layer that has keys and values of its own."""
    return [layer.head_dim for layer in kv_layers_of(config)]


def places_of(config: Any) -> dict[int, int]:
    """The place of each layer with keys and values of its own among these, by its number among all layers."""
    return {layer.index: place for place, layer in enumerate(kv_layers_of(config))}


def state_layers_of(config: Any) -> list[int]:
    """Numbers of the layers that keep a state of fixed size (linear attention, convolution, state space)."""
    return [index for index, kind in enumerate(_layer_types(config)) if kind in _STATE]


def window_of(config: Any, index: int) -> int | None:
    """How many tokens back a query of a layer reads, itself included; None: all.

    Without `layer_types`, a `sliding_window` is that of every layer, as transformers has it.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] not in ("sliding_attention", "hybrid_sliding"):
        return None
    window: int | None = getattr(layer_config(config, index), "sliding_window", None)
    return window


def _layer_types(config: Any) -> Sequence[str]:
    """The type of each layer, `full_attention` for all where the configuration has none."""
    given: Sequence[str] | None = getattr(config, "layer_types", None)
    return ["full_attention"] * config.num_hidden_layers if given is None else given


def layer_config(config: Any, index: int) -> Any:
    """The configuration of one layer."""
    own = getattr(config, "per_layer_config", None)  # since transformers 5.18, where layers may differ
    return config if own is None else own[index]


def _kv_layer(config: Any, index: int) -> KvLayer:
    """The `KvLayer` of layer `index`: key and value channels per head and the attention window."""
    window = window_of(config, index)
    if rank := getattr(config, "kv_lora_rank", None):
        return KvLayer(index, int(rank), int(config.qk_rope_head_dim), window)
    try:
        given = getattr(layer_config(config, index), "head_dim", None)
        head_dim = int(given or config.hidden_size // config.num_attention_heads)
    except Exception as error:  # of a kind of its own where layers differ
        raise Unsupported(f"model: {type(config).__name__} does not say the head_dim of each layer") from error
    return KvLayer(index, head_dim, head_dim, window)
