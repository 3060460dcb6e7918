"""The shape of a model's cache without its weights: shipped for the papers' models, else from its configuration.

Bytes of states of fixed size are those that transformers' layers allocate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from kvq.errors import Unsupported
from kvq.models.layers import KvLayer, kv_layers_of, latent_numbers, layer_config, state_layers_of
from kvq.models.load import longest_context, text_config_of

if TYPE_CHECKING:
    from kvq.config import ModelConfig


@dataclass(frozen=True)
class LayerKind:
    """`count` layers that cache alike, with `heads` KV heads (of a latent 1).

    `head_dim`, `value_dim` (None: `head_dim`) and `window` are as `KvLayer` has them.
    """

    count: int
    heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None

    def dim(self, side: str) -> int:
        """Channels of a head of `key` or `value`."""
        return self.head_dim if side == "key" or self.value_dim is None else self.value_dim

    def __str__(self) -> str:
        value = "" if self.value_dim is None else f"+{self.value_dim}"
        return f"{self.count}x{self.heads}x{self.head_dim}{value}" + (
            "" if self.window is None else f" of {self.window}"
        )


@dataclass(frozen=True)
class CacheShape:
    """What the layers of a model cache (`layers`: with keys and values of their own), and its longest context.

    `state_bytes`: of all states of fixed size of one sequence, in a model of 16 bits.
    """

    layers: tuple[LayerKind, ...]
    context: int | None
    state_bytes: int = 0

    @property
    def head_dims(self) -> list[int]:
        """The head dims that occur, ascending."""
        return sorted({kind.head_dim for kind in self.layers})

    @property
    def count(self) -> int:
        """Layers with keys and values of their own."""
        return sum(kind.count for kind in self.layers)

    @property
    def name(self) -> str:
        """The model's name in the key of a run that reads no weights."""
        states = f", {self.state_bytes} bytes of states" if self.state_bytes else ""
        return "shape " + ", ".join(map(str, self.layers)) + states


@lru_cache(maxsize=1)
def load_shapes() -> dict[str, dict[str, int]]:
    """The shapes that come with the package, by hub id."""
    known: dict[str, dict[str, int]] = yaml.safe_load(files(__package__).joinpath("shapes.yaml").read_text("utf-8"))
    return known


def cache_shape(config: ModelConfig) -> CacheShape:
    """The shape of `model.path`; of a hub id that is not shipped, from its configuration file."""
    known = load_shapes().get(config.path)
    if known is not None:
        kind = LayerKind(known["layers"], known["kv_heads"], known["head_dim"])
        return CacheShape((kind,), longest_context(config, SimpleNamespace(max_position_embeddings=known["context"])))
    text = text_config_of(config)
    cached, latent = kv_layers_of(text), latent_numbers(text) is not None
    stateful = bool(state_layers_of(text))
    layers = None if latent and not stateful else held_layers(text)
    if layers is None and stateful:
        raise Unsupported(f"model: {type(text).__name__} does not run without weights, so that its states have no size")
    held: dict[int, tuple[int, int, int] | None] = dict.fromkeys(layer.index for layer in cached)
    if layers is not None and not latent:
        states = ((index, getattr(one, "keys", None), getattr(one, "values", None)) for index, one in enumerate(layers))
        held = {
            index: (key.shape[1], key.shape[-1], value.shape[-1])
            for index, key, value in states
            if key is not None and key.ndim == 4 and value is not None
        }
        if not held:
            raise Unsupported(f"model: {type(text).__name__} keeps no keys and values in a cache that it is given")
    counts = Counter(_layer_kind(text, layer, held[layer.index]) for layer in cached if layer.index in held)
    kinds = tuple(replace(kind, count=count) for kind, count in counts.items())
    return CacheShape(kinds, longest_context(config, text), sum(map(_state_bytes, layers or ())))


def held_layers(text: Any) -> list[Any] | None:
    """The layers of a cache after a forward of the model's class without weights, in 16 bits.

    None where a class cannot be built or run so: then only names of settings say what it caches.
    """
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    cache = DynamicCache(config=text)
    settings: Any = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}  # which ask for no values
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16, **settings)
            model.eval()(torch.zeros(1, 2, dtype=torch.long), past_key_values=cache, use_cache=True)
    except Exception:  # each class fails in its own way where it needs values, or code from the hub
        return None
    return list(cache.layers)


def _state_bytes(layer: Any) -> int:
    """Bytes of what a layer of a transformers cache keeps of fixed size."""
    states = [getattr(layer, name, {}).values() for name in ("conv_states", "recurrent_states")]
    return sum(state.nbytes for held in states for state in held if state is not None)


def _layer_kind(text: Any, layer: KvLayer, held: tuple[int, int, int] | None) -> LayerKind:
    """The `LayerKind` of one layer, from KV heads, key and value dim (`held`) or its settings."""
    dim, value_dim = layer.head_dim, layer.value_dim
    if held is not None:
        heads, dim, value_dim = held
    elif latent_numbers(text) is None:
        own = layer_config(text, layer.index)
        heads = int(getattr(own, "num_key_value_heads", None) or own.num_attention_heads)
    else:
        heads = 1
    return LayerKind(1, heads, dim, None if value_dim == dim else value_dim, layer.window)
