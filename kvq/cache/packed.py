"""Attention that a cache computes itself: on packed codes, and in full precision with room for all tokens (timings).

A model whose attention is `kvq_sdpa` (or `kvq_eager`) computes what `sdpa` (`eager`) does, except where a cache hands
over an object that computes attention (`SelfAttending`) in place of keys. So the switch affects no other cache.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvq.cache.hooks import attentions
from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import scaling_of
from kvq.cache.padded import JoinedLayer
from kvq.cache.side import CacheSide
from kvq.cache.store import narrow_rope
from kvq.codecs import Codec
from kvq.config.method import ResidualSide
from kvq.errors import Unsupported
from kvq.kernels import PackedStates, attend, fuse_codec
from kvq.models.layers import head_dims_of, state_layers_of
from kvq.models.load import base_of

PREFIX = "kvq_"
ORIGINALS = ("sdpa", "eager")
"""Attention implementations of transformers that have a form which also reads packed codes."""


class SelfAttending(abc.ABC):
    """An object that a cache returns in place of keys, and which computes the attention itself."""

    @abc.abstractmethod
    def attend(
        self, module: nn.Module, query: Tensor, values: Any, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Float[Tensor, "batch one heads dim"]:
        """Output for one new token per sequence; `arguments`: the others of the model's attention function, by name."""


@dataclass(frozen=True)
class PackedKeys(SelfAttending):
    """Keys in stored form, whose first `hidden` tokens are outside the window; `attend` takes `PackedStates` values."""

    states: PackedStates
    hidden: int = 0

    def attend(
        self, module: nn.Module, query: Tensor, values: Any, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Float[Tensor, "batch one heads dim"]:
        scaling = scaling_of(module, query, arguments, "alibi")
        first = self.hidden + first_seen(mask, self.states.tokens - self.hidden, arguments.get("sliding_window"))
        out = attend(query, self.states, values, scaling, first, arguments.get("softcap"))
        return out.transpose(1, 2).contiguous()


class PackedSide(CacheSide):
    """A side that can return its tokens in stored form, and encodes in one pass where the codec allows it."""

    def __init__(self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool = False) -> None:
        super().__init__(None if codec is None else fuse_codec(codec), residual, label, keep_decoded)

    def append_packed(self, states: Float[Tensor, "batch heads 1 head_dim"]) -> PackedStates:
        """Add one token; return what attention reads now, in stored form, then encode what leaves the residual."""
        return self._append(states, self._stored, self._stored)

    def _stored(self) -> PackedStates:
        """The cached tokens: parts of the packed prefix, the residual, and the rotations that the codec undid."""
        packed = tuple(self.packed)
        full = None if self._full is None else self._full.view
        return PackedStates(self.codec, packed, full, narrow_rope(self._rotations, 0, self.packed_tokens))


class PackedLayer(KVCacheLayer):
    """A layer for attention on codes: for a single new token it returns `PackedKeys` and `PackedStates`."""

    no_padding_reason = "with attention=packed reads the same columns in every sequence"
    irreversible = "cache.attention=packed reads codes for one token at a time; use cache.attention=dense"

    key: PackedSide
    value: PackedSide

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append states `[batch, heads, tokens, head_dim]`; for a single token, return `PackedKeys`, `PackedStates`."""
        if key_states.shape[2] != 1:
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        hidden = self._hidden_tokens
        keys, values = self._map_sides(lambda side, states: side.append_packed(states), key_states, value_states)  # type: ignore[attr-defined]
        self._drop_hidden()
        return PackedKeys(keys, hidden), values


class PackedJoinedLayer(PackedLayer, JoinedLayer):
    """A `PackedLayer` whose keys and values one codec stores together."""


def packed_layer(like: KVCacheLayer, side: Callable[[CacheSide], PackedSide]) -> PackedLayer:
    """An empty `PackedLayer` with the settings of `like`; `side` makes an empty `PackedSide` like a `CacheSide`."""
    if isinstance(like, JoinedLayer):
        return PackedJoinedLayer(side(like.key), like.window)
    return PackedLayer(side(like.key), side(like.value), like.window)


def use_packed_attention(model: nn.Module) -> None:
    """Switch a model to attention that also reads packed codes; `Unsupported`: its function is not in `ORIGINALS`."""
    base = base_of(model)
    configs = {module: getattr(module, "config", None) for module in attentions(base)}
    for module, config in configs.items():
        way = getattr(config, "_attn_implementation", None)
        if not hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise Unsupported(f"cache.attention=packed: {type(module).__name__} takes no attention function")
        if str(way).removeprefix(PREFIX) not in ORIGINALS:
            raise Unsupported(f"cache.attention=packed: attention {way}; load the model with {' or '.join(ORIGINALS)}")
    for name in ORIGINALS:
        if PREFIX + name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(PREFIX + name, _function(name))
            AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    for config in [*configs.values(), base.config]:
        if config._attn_implementation in ORIGINALS:
            config._attn_implementation = PREFIX + config._attn_implementation


def _function(original: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function `original` of transformers, except that a `SelfAttending` key computes by itself."""

    def attention(
        module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(key, SelfAttending):
            return key.attend(module, query, value, attention_mask, arguments), None
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        plain = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        return plain(module, query, key, value, attention_mask, **arguments)

    return attention


def first_seen(mask: Tensor | None, tokens: int, window: int | None) -> int:
    """Index of the first of `tokens` tokens that the mask (None: the window) shows; `Unsupported`: a mask with gaps."""
    if mask is None:
        return 0 if window is None else max(0, tokens - window)
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    one = seen.reshape(-1, tokens)
    first = tokens - int(one[0].sum())
    if not bool(one[:, first:].all()) or bool(one[:, :first].any()):
        raise Unsupported("attention_mask: attention on packed codes sees all tokens from one on, the same in a batch")
    return first


@dataclass(frozen=True)
class DenseStates(SelfAttending):
    """Keys or values in full precision; as keys, they compute attention for grouped queries.

    The queries that share a head are rows of one attention, which reads every key and value once: with 4 to a head 1.7
    to 1.9 times as fast as `enable_gqa=True` (`results/bench/cpu.json`).
    """

    states: Float[Tensor, "batch heads tokens head_dim"]

    def attend(
        self, module: nn.Module, query: Tensor, values: Any, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Float[Tensor, "batch one heads dim"]:
        batch, heads, _, dim = query.shape
        first = first_seen(mask, self.states.shape[2], arguments.get("sliding_window"))
        keys, read = self.states[:, :, first:], values.states[:, :, first:]
        rows = query.reshape(batch, keys.shape[1], -1, dim)
        out = nn.functional.scaled_dot_product_attention(rows, keys, read, scale=arguments.get("scaling"))
        return out.reshape(batch, 1, heads, -1)


class PreallocatedLayer(DynamicLayer):
    """Keys and values in tensors with room for `room` tokens; `keys` and `values` are views of the tokens so far."""

    is_croppable = False
    supports_early_init = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeros for `room` tokens, shaped, typed and placed as these states."""
        super().lazy_initialization(key_states, value_states)
        states = key_states, value_states
        self.allocated = [one.new_zeros(*one.shape[:2], self.room, one.shape[3]) for one in states]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.get_seq_length(), key_states.shape[2]
        for held, states in zip(self.allocated, (key_states, value_states), strict=True):
            held[:, :, start : start + count] = states
        self.keys, self.values = (held[:, :, : start + count] for held in self.allocated)
        return (DenseStates(self.keys), DenseStates(self.values)) if count == 1 else (self.keys, self.values)


class PreallocatedCache(Cache):
    """The full-precision reference for timings: room for `room` tokens in every layer, in the dtype of the model."""

    def __init__(self, model: nn.Module, room: int) -> None:
        use_packed_attention(model)
        config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        if state_layers_of(config):
            raise Unsupported("task.references=preallocated: has room for keys and values only, not for states")
        super().__init__(layers=[PreallocatedLayer(room) for _ in head_dims_of(config)])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, room that is not filled included."""
        layers: list[Any] = self.layers
        return sum(states.nbytes for layer in layers if layer.is_initialized for states in layer.allocated)
