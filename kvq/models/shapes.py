"""The shape of a model's cache without its weights: shipped for the papers' models, else from its configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from kvq.models.layers import kv_layers_of, state_layers_of
from kvq.models.load import text_config_of

if TYPE_CHECKING:
    from kvq.config import ModelConfig


@dataclass(frozen=True)
class CacheShape:
    """Numbers of layers by KV heads and head dim, as (layers, kv_heads, head_dim), and the longest context.

    Attributes:
        window: the smallest window of a layer; None: all keep the whole past.
        others: what layers cache beside keys and values, in words.
    """

    layers: tuple[tuple[int, int, int], ...]
    context: int | None
    window: int | None = None
    others: str = ""

    @property
    def head_dims(self) -> list[int]:
        """The head dims that occur, ascending."""
        return sorted({head_dim for _, _, head_dim in self.layers})

    @property
    def name(self) -> str:
        """The model's name in the key of a run that reads no weights."""
        return "shape " + ", ".join(f"{layers}x{heads}x{dim}" for layers, heads, dim in self.layers)


@lru_cache(maxsize=1)
def shipped() -> dict[str, dict[str, int]]:
    """The shapes that come with the package, by hub id."""
    known: dict[str, dict[str, int]] = yaml.safe_load(files(__package__).joinpath("shapes.yaml").read_text("utf-8"))
    return known


def cache_shape(config: ModelConfig) -> CacheShape:
    """The shape of `model.path`; of a hub id that is not shipped, from its configuration file.

    Raises:
        DataError: the model cannot be found.
        Unsupported: as `kv_layers_of`.
    """
    known = shipped().get(config.path)
    if known is not None:
        return CacheShape(
            ((known["layers"], known["kv_heads"], known["head_dim"]),), config.context or known["context"]
        )
    text = text_config_of(config)
    held = kv_layers_of(text)
    counts = Counter((_kv_heads(text, layer.index), layer.head_dim) for layer in held)
    layers = tuple((count, heads, dim) for (heads, dim), count in counts.items())
    window = min((layer.window for layer in held if layer.window is not None), default=None)
    latent = "latents" if any(layer.value_dim != layer.head_dim for layer in held) else ""
    others = " and ".join(filter(None, (latent, "states of fixed size" if state_layers_of(text) else "")))
    return CacheShape(layers, config.context or getattr(text, "max_position_embeddings", None), window, others)


def _kv_heads(text: Any, index: int) -> int:
    own = getattr(text, "per_layer_config", None)  # since transformers 5.18, where layers may differ
    layer = text if own is None else own[index]
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
