"""Recurrent states of fixed size: of linear attention, convolutions and state space models.

They are neither quantized nor cast. `KVCache` holds them for the model, counts them under their own name, and forks and
selects them with the keys and values.
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

from kvq.cache.serialize import Field, Reader, Writer
from kvq.errors import Unsupported
from kvq.models.layers import KvLayer, state_layers_of
from kvq.models.placing import base_of, device_of

NO_CROP = "a layer keeps a state of fixed size, from which tokens cannot be taken back (fork() the cache before)"
"""The reason why `crop` is refused."""
_PARTS = ("conv_states", "recurrent_states")
_PROBE_CUTS = (0, 16, 23, 24)
"""The probe reads a prompt, several tokens, and one token."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of a hidden state relative to the largest; of narrower dtypes `_NARROW`."""
_NARROW = 1e-1


class StateLayer(LinearAttentionLayer):
    """The states of one layer. Of a layer that caches nothing, it stays empty."""

    @property
    def is_croppable(self) -> bool:
        """False: see `NO_CROP`."""
        return False

    @property
    def nbytes(self) -> int:
        return sum(state.numel() * state.element_size() for _, _, state in self._held())

    def reset(self) -> None:
        """Forget everything, also the shapes."""
        vars(self).update(vars(StateLayer(self.number_of_states)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda state: state.repeat_interleave(repeats, 0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in _PARTS:
            states = getattr(self, name)
            setattr(self, name, {key: None if state is None else change(state) for key, state in states.items()})

    def write(self, out: Writer) -> None:
        for name, number, state in self._held():
            out.tensor(f"{name}.{number}", state)

    def read(self, given: Reader, like: StateLayer) -> None:
        """Hold what a file has, in the shapes and dtypes of the states that `like` has of a few tokens.

        Raises:
            DataError: states that the model does not have.
        """
        vars(self).update(vars(like.fork()))
        for name, number, state in like._held():
            axes = " ".join(["batch", *map(str, state.shape[1:])])
            found = given.tensor(f"{name}.{number}", Field("tensor", axes, state.dtype))
            if found is None:
                raise given.error(f"{name}.{number} is missing")
            getattr(self, name)[number] = found
        given.finish()

    def _held(self) -> list[tuple[str, int, Tensor]]:
        parts = [(name, number, state) for name in _PARTS for number, state in getattr(self, name).items()]
        return [part for part in parts if part[2] is not None]

    @staticmethod
    def joined(layers: Sequence[StateLayer]) -> StateLayer:
        """The states of the sequences of several batches, in one."""
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
        other._each(torch.clone)
        return other


class StatefulCache(Cache):
    """A cache some of whose layers keep recurrent states, with keys and values or without."""

    _states: Mapping[int, StateLayer]

    @property
    def state_bytes(self) -> int:
        """Bytes of states of fixed size, which no method quantizes."""
        return sum(state.nbytes for state in self._states.values())

    def check_part(self, model: nn.Module | None, tokens: int) -> None:
        """Raise `Unsupported` for several tokens after others, in a model whose layers then begin anew."""
        if self._states and tokens > 1 and model is not None and not reads_in_parts(model):
            raise Unsupported(
                f"model: {type(model).__name__} begins anew with every part of several tokens; read a text at once and "
                "later tokens one by one"
            )

    def reset(self) -> None:
        for layer in self._all:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self._all:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self._all:
            layer.batch_select_indices(indices)

    @property
    def _all(self) -> list[Any]:
        return [*(layer for layer in self.layers if not isinstance(layer, StateLayer)), *self._states.values()]

    @property
    def _beside(self) -> Cache:
        """The states of layers that have keys and values too."""
        return Cache(layers=[self._states.get(index, layer) for index, layer in enumerate(self.layers)])

    # transformers' methods look for states in `layers`, where a layer has one kind of content.
    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._beside.get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._beside.update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._beside.get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._beside.update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return self._beside.has_previous_state(*args, **kwargs)


def states_of(model: Any, layers: Sequence[int]) -> dict[int, StateLayer]:
    """An empty state for every layer that has one or caches nothing, by its number; none where all have keys alone.

    Args:
        layers: numbers of the layers with keys and values of their own.

    Raises:
        Unsupported: a family with a cache of its own in the place of transformers', or an old transformers.
    """
    config = model.config.get_text_config()
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


def placed(held: Sequence[KvLayer], own: Sequence[Any], states: Mapping[int, StateLayer]) -> list[Any]:
    """All layers in the model's order: `own` at the places of `held`, and states where there are no keys and values."""
    found: dict[int, Any] = {**states} | {layer.index: one for layer, one in zip(held, own, strict=True)}
    return [found[index] for index in sorted(found)]


_PROBED: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def reads_in_parts(model: nn.Module) -> bool:
    """Whether a model with states computes the same, whether a text comes at once or in parts of several tokens.

    In some families, layers begin anew with every part of several tokens. The model reads a few tokens to find out.
    """
    if model not in _PROBED:
        _PROBED[model] = _probe(model)
    return _PROBED[model]


@torch.no_grad()
def states_behind(model: Any, cache: StatefulCache) -> Mapping[int, StateLayer]:
    """States after a few tokens in an empty cache; shapes and dtypes do not depend on how many."""
    tokens = _tokens(model, 2)
    at = torch.arange(2, device=tokens.device)[None]
    base_of(model)(input_ids=tokens, position_ids=at, past_key_values=cache, use_cache=True)
    return cache._states


def _tokens(model: Any, count: int) -> Tensor:
    embedding = model.get_input_embeddings()
    return torch.arange(1, count + 1, device=device_of(embedding))[None] % embedding.weight.shape[0]


@torch.no_grad()
def _probe(model: Any) -> bool:
    base, tokens = base_of(model), _tokens(model, _PROBE_CUTS[-1])
    whole = base(input_ids=tokens, use_cache=False).last_hidden_state
    cache, parts = DynamicCache(config=model.config), []
    for start, end in itertools.pairwise(_PROBE_CUTS):
        at = torch.arange(start, end, device=tokens.device)[None]
        out = base(input_ids=tokens[:, start:end], position_ids=at, past_key_values=cache, use_cache=True)
        parts.append(out.last_hidden_state)
    found = torch.cat(parts, 1)
    return float((found - whole).abs().max() / whole.abs().max()) <= _TOLERANCE.get(found.dtype, _NARROW)
