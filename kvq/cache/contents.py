"""Recurrent states in a `KVCache`, and the count of all bytes that a cache stores.

Recurrent states are those of linear attention, convolutions and state space models. They are neither quantized nor
cast. `KVCache` holds them for the model, counts them under their own name, and forks and selects them with these.
"""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from kvq.cache.store import Recompression
from kvq.errors import Unsupported
from kvq.models.layers import KvLayer, state_layers_of
from kvq.models.load import base_of, device_of

NO_CROP = "a layer keeps a state of fixed size, from which tokens cannot be taken back (fork() the cache before)"
"""The reason why `crop` is refused."""
_PARTS = ("conv_states", "recurrent_states")
_PROBE_CUTS = (0, 16, 23, 24)
"""The probe reads a prompt, several tokens, and one token."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of a hidden state relative to the largest; of narrower dtypes `_NARROW`."""
_NARROW = 1e-1
_PROBED: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


class StateLayer(LinearAttentionLayer):
    """The recurrent and convolution states of one layer; empty for a layer that caches nothing."""

    @property
    def is_croppable(self) -> bool:
        """False: see `NO_CROP`."""
        return False

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for name in _PARTS for state in getattr(self, name).values() if state is not None)

    def reset(self) -> None:
        """Forget everything, also the shapes."""
        vars(self).update(vars(StateLayer(self.number_of_states)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_states(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_states(lambda state: state.repeat_interleave(repeats, 0))

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every state tensor by what `change` makes of it."""
        for name in _PARTS:
            states = getattr(self, name)
            setattr(self, name, {key: None if state is None else change(state) for key, state in states.items()})

    def write(self) -> dict[str, Any]:
        """Return the state to save in a file: attributes by name."""
        return {name: vars(self)[name] for name in sorted(vars(self).keys() - {"device"})}

    def read(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore into this empty layer the state that `write` returned, with tensors on `device`."""
        vars(self).update(state)
        self.device = None if self.dtype is None else device

    @staticmethod
    def join(layers: Sequence[StateLayer]) -> StateLayer:
        """One layer with the states of the sequences of all `layers`, along the batch axis."""
        other = layers[0].fork()
        for name in _PARTS:
            held = [getattr(layer, name) for layer in layers]
            parts = {key: [one[key] for one in held] for key, first in held[0].items() if first is not None}
            setattr(other, name, held[0] | {key: torch.cat(states) for key, states in parts.items()})
        return other

    def fork(self) -> StateLayer:
        """A copy that changes independently: models write into their states."""
        other = copy.copy(self)
        for name, held in vars(self).items():
            if isinstance(held, dict):
                setattr(other, name, dict(held))
        other._change_states(torch.clone)
        return other


class CountedCache(Cache):
    """A cache some of whose layers may keep recurrent states, with keys and values or without; it counts its bytes."""

    kv_layers: list[Any]
    """The layers with keys and values of their own (`Layer`)."""
    _states: Mapping[int, StateLayer]

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states, which have a fixed size and are never quantized."""
        return sum(state.nbytes for state in self._states.values())

    def check_part(self, model: nn.Module | None, tokens: int) -> None:
        """Raise `Unsupported` for a later chunk of several tokens if the model would reset its recurrent states."""
        if self._states and tokens > 1 and model is not None and not reads_in_parts(model):
            raise Unsupported(
                f"model: {type(model).__name__} begins anew with every part of several tokens; read a text at once and "
                "later tokens one by one"
            )

    def reset(self) -> None:
        for layer in self._layers_and_states:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self._layers_and_states:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self._layers_and_states:
            layer.batch_select_indices(indices)

    @property
    def _layers_and_states(self) -> list[Any]:
        """The layers with keys and values, then the `StateLayer`s of all layers."""
        return [*(layer for layer in self.layers if not isinstance(layer, StateLayer)), *self._states.values()]

    @property
    def _state_cache(self) -> Cache:
        """A cache whose layers are the states, also of layers that have keys and values too."""
        return Cache(layers=[self._states.get(index, layer) for index, layer in enumerate(self.layers)])

    # transformers' methods look for states in `layers`, where a layer has one kind of content.
    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._state_cache.get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._state_cache.update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._state_cache.get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._state_cache.update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return self._state_cache.has_previous_state(*args, **kwargs)

    def _sides(self, which: str | None = None) -> list[Any]:
        """The sides of all layers: keys, values (`which`: `key`, `value`), or both."""
        names = ("key", "value") if which is None else (which,)
        return [getattr(layer, name) for layer in self.kv_layers for name in names]

    @property
    def packed_bytes(self) -> int:
        return sum(side.packed_bytes for side in self._sides())

    @property
    def nbytes(self) -> int:
        """Bytes of everything the next token needs: packed prefixes, full-precision residuals, recurrent states."""
        return self.packed_bytes + sum(side.residual_bytes for side in self._sides()) + self.state_bytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of packed keys and values; a side that packs none counts in full precision."""
        return self.side_bits()

    @property
    def effective_bits(self) -> float:
        """Stored bits per element of all tokens in reach, residual included; evicted tokens count with 0 bits."""
        sides = [(layer, side) for layer in self.kv_layers for side in (layer.key, layer.value)]
        elements = sum(side.elements_per_token * (side.tokens + layer.evicted) for layer, side in sides)
        return 8 * self.nbytes / elements if elements else 0.0

    def side_bits(self, which: str | None = None) -> float:
        """Stored bits per element of `key`, `value` or both: of packed tokens, or of full precision if none are."""
        sides = [side for side in self._sides(which) if side.tokens]
        sides = sides if which is None else [getattr(side, "holder", side) for side in sides]
        elements = sum(side.elements_per_token for side in sides)
        return sum(side.bits_per_element * side.elements_per_token for side in sides) / elements if sides else 0.0

    @property
    def recompression(self) -> Recompression | None:
        """Errors from encoding packed tokens again, summed over all layers; None: the method never does that."""
        reports = [done for side in self._sides() if (done := getattr(side, "recompression", None)) is not None]
        return Recompression(*map(sum, zip(*reports, strict=True))) if reports else None


def states_of(model: Any, layers: Sequence[int]) -> dict[int, StateLayer]:
    """Empty `StateLayer`s by layer index, for layers with recurrent states or without a cache; {}: no layer has any."""
    config = model.config.get_text_config(decoder=True)
    with_state = state_layers_of(config)
    if not with_state:
        return {}
    family = sys.modules[type(model).__module__]
    for kind in vars(family).values():
        if isinstance(kind, type) and issubclass(kind, Cache | CacheLayerMixin) and kind.__module__ == family.__name__:
            raise Unsupported(f"model: {type(model).__name__} takes a cache of its own ({kind.__name__}) and no other")
    if set(with_state) & set(layers) and not hasattr(Cache, "get_conv_state"):
        raise Unsupported(f"model: {type(model).__name__} has states beside keys; this needs a newer transformers")
    count = getattr(config, "number_of_conv_states", 1)
    wanted = set(range(config.num_hidden_layers)) - set(layers) | set(with_state)
    return {index: StateLayer(count) for index in sorted(wanted)}


def place_layers(held: Sequence[KvLayer], kv_layers: Sequence[Any], states: Mapping[int, StateLayer]) -> list[Any]:
    """All layers in the model's order: `kv_layers[i]` for attention `held[i]`, `states` for layers without one."""
    by_index: dict[int, Any] = {**states} | {layer.index: one for layer, one in zip(held, kv_layers, strict=True)}
    return [by_index[index] for index in sorted(by_index)]


@torch.no_grad()
def reads_in_parts(model: Any) -> bool:
    """Whether a model with recurrent states computes the same for a text in chunks as for all of it (by a probe).

    In some families, each chunk of several tokens begins with empty states.
    """
    if model in _PROBED:
        return _PROBED[model]
    base, embedding = base_of(model), model.get_input_embeddings()
    tokens = torch.arange(1, _PROBE_CUTS[-1] + 1, device=device_of(embedding))[None] % embedding.weight.shape[0]
    whole = base(input_ids=tokens, use_cache=False).last_hidden_state
    cache, parts = DynamicCache(config=model.config), []
    for start, end in itertools.pairwise(_PROBE_CUTS):
        at = torch.arange(start, end, device=tokens.device)[None]
        out = base(input_ids=tokens[:, start:end], position_ids=at, past_key_values=cache, use_cache=True)
        parts.append(out.last_hidden_state)
    joined = torch.cat(parts, 1)
    _PROBED[model] = float((joined - whole).abs().max() / whole.abs().max()) <= _TOLERANCE.get(joined.dtype, _NARROW)
    return _PROBED[model]


def bytes_together(caches: Sequence[CountedCache]) -> int:
    """Sum of the caches' `nbytes`, where rows that forks share count once.

    Of a tensor that forks share, the rows of the longest fork count. Other storage (sinks, kept keys, recurrent states,
    transformers' own caches) counts for each cache.
    """
    unshared, shared = 0, dict[int, int]()
    for cache in caches:
        views = dict[int, int]()
        for side in cache._sides():  # packed parts and full-precision tokens, as views of the rows written
            full = getattr(side, "_full", None)
            parts = [part for packed in getattr(side, "packed", ()) for part in packed.parts.values()]
            views |= {view.data_ptr(): view.nbytes for view in [*parts, *([] if full is None else [full.view])]}
        unshared += cache.nbytes - sum(views.values())
        shared |= {place: max(size, shared.get(place, 0)) for place, size in views.items()}
    return unshared + sum(shared.values())
