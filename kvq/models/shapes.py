"""The shape of a model's cache without its weights: shipped for the papers' models, else from its configuration.

Bytes of states of fixed size are those that transformers' layers allocate. A layer keeps the last inputs of a short
convolution and, unless it is nothing but a convolution, a recurrent state: of gated linear attention a matrix of keys
by values for each head, of Mamba one of `d_state` numbers for each channel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from kvq.config.run import Mla
from kvq.errors import Unsupported
from kvq.models.layers import KvLayer, kv_layers_of, latent_numbers, layer_config, state_layers_of
from kvq.models.load import longest_context, text_config_of

if TYPE_CHECKING:
    from kvq.config import ModelConfig


def state_bytes_of(config: Any) -> int:
    """Bytes of the states of all layers and one sequence in a model of 16 bits, whose recurrent states are in fp32.

    Args:
        config: a transformers text configuration.
    """
    layers = state_layers_of(config)
    if not layers:
        return 0
    for sizes in (_gated_delta_sizes, _kimi_linear_sizes, _convolution_sizes, _mamba_sizes):
        try:
            convolved, recurrent = sizes(config)
        except (AttributeError, TypeError):
            continue
        return len(layers) * (2 * convolved + 4 * recurrent)
    raise Unsupported(f"model: {type(config).__name__} does not say how large its states are, in a form that kvq knows")


Sizes = tuple[int, int]
"""Numbers of the convolution and of the recurrent state of one layer."""


def _gated_delta_sizes(config: Any) -> Sizes:
    """State sizes of gated-delta-rule layers (Qwen3-Next, Qwen3.5, OLMo Hybrid)."""
    dim = config.linear_key_head_dim
    keys, values = config.linear_num_key_heads * dim, config.linear_num_value_heads * config.linear_value_head_dim
    return (2 * keys + values) * config.linear_conv_kernel_dim, values * dim


def _kimi_linear_sizes(config: Any) -> Sizes:
    """State sizes of Kimi Linear's delta-attention layers."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return 3 * heads * dim * config.linear_conv_kernel_dim, heads * dim * dim


def _convolution_sizes(config: Any) -> Sizes:
    """State sizes of LFM2's convolution layers, which have no recurrent state."""
    return config.hidden_size * config.conv_L_cache, 0


def _mamba_sizes(config: Any) -> Sizes:
    """State sizes of Mamba 2 (Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba 2) and Mamba 1 (Jamba) layers."""
    state = _first(config, "mamba_d_state", "ssm_state_size")
    if (inner := getattr(config, "mamba_d_ssm", None)) is None:
        heads, dim = (getattr(config, name, None) for name in ("mamba_num_heads", "mamba_head_dim"))
        inner = heads * dim if heads and dim else int(config.mamba_expand * config.hidden_size)
    groups = 0 if hasattr(config, "mamba_dt_rank") else _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    convolved = (inner + 2 * groups * state) * _first(config, "mamba_d_conv", "conv_kernel")
    return convolved, inner * state


def _first(config: Any, *names: str) -> int:
    """The setting of the first of these names that the configuration has. Raises: AttributeError: it has none."""
    for name in names[:-1]:
        if (found := getattr(config, name, None)) is not None:
            return int(found)
    return int(getattr(config, names[-1]))


@dataclass(frozen=True)
class LayerKind:
    """Layers that cache alike.

    Attributes:
        count: how many.
        heads: KV heads; of multi-head latent attention 1.
        head_dim, value_dim, window: as `KvLayer` has them; `value_dim` None: `head_dim`.
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
    """What the layers of a model cache, and its longest context.

    Attributes:
        layers: those with keys and values of their own.
        state_bytes: of all states of fixed size of one sequence, in a model of 16 bits.
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


def cache_shape(config: ModelConfig, mla: Mla = Mla.latent) -> CacheShape:
    """The shape of `model.path`; of a hub id that is not shipped, from its configuration file."""
    known = load_shapes().get(config.path)
    if known is not None and mla is Mla.latent:
        kind = LayerKind(known["layers"], known["kv_heads"], known["head_dim"])
        return CacheShape((kind,), longest_context(config, SimpleNamespace(max_position_embeddings=known["context"])))
    text = text_config_of(config)
    cached = kv_layers_of(text, mla)
    held = None if latent_numbers(text) else held_shapes(text)
    if held is None:
        kinds = [_layer_kind(text, layer, mla) for layer in cached]
    elif held:
        kinds = [_layer_kind(text, layer, mla, held[layer.index]) for layer in cached if layer.index in held]
    else:
        raise Unsupported(f"model: {type(text).__name__} keeps no keys and values in a cache that it is given")
    counts = Counter(kinds)
    layers = tuple(replace(kind, count=count) for kind, count in counts.items())
    return CacheShape(layers, longest_context(config, text), state_bytes_of(text))


def held_shapes(text: Any) -> dict[int, tuple[int, int, int]] | None:
    """KV heads, channels of a key and of a value by layer, as the model's class caches them: a forward without weights.

    None where a class cannot be built or run so: then only names of settings say it. Empty: it used no cache.
    """
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    cache = DynamicCache(config=text)
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16, attn_implementation="eager")
            model.eval()(torch.zeros(1, 2, dtype=torch.long), past_key_values=cache, use_cache=True)
    except Exception:  # each class fails in its own way where it needs values, or code from the hub
        return None
    states = {
        index: (getattr(one, "keys", None), getattr(one, "values", None)) for index, one in enumerate(cache.layers)
    }
    return {
        index: (key.shape[1], key.shape[-1], value.shape[-1])
        for index, (key, value) in states.items()
        if isinstance(key, torch.Tensor) and key.ndim == 4 and value is not None
    }


def _layer_kind(text: Any, layer: KvLayer, mla: Mla, held: tuple[int, int, int] | None = None) -> LayerKind:
    """The `LayerKind` of one layer, from KV heads, key and value dim (`held`: see `held_shapes`) or its settings."""
    dim, value_dim = layer.head_dim, layer.value_dim
    if held is not None:
        heads, dim, value_dim = held
    elif latent_numbers(text) is None:
        own = layer_config(text, layer.index)
        heads = int(getattr(own, "num_key_value_heads", None) or own.num_attention_heads)
    else:
        heads = 1 if mla is Mla.latent else int(text.num_attention_heads)
    return LayerKind(1, heads, dim, None if value_dim == dim else value_dim, layer.window)
