"""The shape of a model's cache without its weights: shipped for the papers' models, else from its configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from kvq.models.layers import head_dims_of
from kvq.models.load import text_config_of

if TYPE_CHECKING:
    from kvq.config import ModelConfig


@dataclass(frozen=True)
class CacheShape:
    """Numbers of layers by KV heads and head dim, as (layers, kv_heads, head_dim), and the longest context."""

    layers: tuple[tuple[int, int, int], ...]
    context: int | None

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
        Unsupported: some layer caches no keys and values per head.
    """
    known = shipped().get(config.path)
    if known is not None:
        return CacheShape(
            ((known["layers"], known["kv_heads"], known["head_dim"]),), config.context or known["context"]
        )
    text = text_config_of(config)
    counts = Counter((_kv_heads(text, index), dim) for index, dim in enumerate(head_dims_of(text)))
    layers = tuple((count, heads, dim) for (heads, dim), count in counts.items())
    return CacheShape(layers, config.context or getattr(text, "max_position_embeddings", None))


def _kv_heads(text: Any, index: int) -> int:
    own = getattr(text, "per_layer_config", None)  # since transformers 5.18, where layers may differ
    layer = text if own is None else own[index]
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
