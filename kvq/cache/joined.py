"""A layer whose keys and values are one store: both of a token are the heads of one side, keys first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvq.cache.layer import KVCacheLayer, Read, drop
from kvq.cache.rotary import RopeTable
from kvq.cache.side import CacheSide
from kvq.kernels import PackedStates


class ValuesOfKeys:
    """Stands for the values of a `JoinedLayer`, which its keys' side stores: 0 bytes here, tokens as there."""

    codec = None
    uses_rope = wants_hidden = False
    packed_bytes = residual_bytes = elements_per_token = 0
    bits_per_element = 0.0
    recompression = None

    def __init__(self, holder: CacheSide) -> None:
        self.holder = holder
        self.rope: RopeTable | None = None

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is the holder's."""
        if name == "holder":  # before it is set
            raise AttributeError(name)
        return getattr(self.holder, name)

    def fork(self) -> ValuesOfKeys:
        return ValuesOfKeys(self.holder)

    def _nothing(self, *_: Any) -> None:
        """Do nothing: the holder does it for both."""

    append_then_steps = reset = select = crop = check_crop = forget = _nothing
    write = read = check_finite = receive_hidden = receive_tokens = _nothing


class JoinedLayer(KVCacheLayer):
    """A layer whose `side` stores keys and values together: `[batch, 2 x heads, tokens, head_dim]`, keys first."""

    def __init__(self, side: CacheSide, window: int | None = None) -> None:
        super().__init__(side, side, window)
        self.value = ValuesOfKeys(side)

    def _map_sides(
        self, call: Callable[[CacheSide, Tensor], Read], key_states: Tensor, value_states: Tensor
    ) -> tuple[Read, Read]:
        found, heads = call(self.key, torch.cat([key_states, value_states], 1)), key_states.shape[1]
        return _select_heads(found, slice(0, heads)), _select_heads(found, slice(heads, 2 * heads))

    def _keep_state(self, key_states: Tensor, value_states: Tensor) -> int:
        """As the base, which records what undoes an update, on keys and values joined."""
        both = torch.cat([key_states, value_states], 1)
        return super()._keep_state(both, both)

    def _drop_hidden(self) -> None:
        if self._hidden_tokens:
            drop((self.key,), self._hidden_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.value = ValuesOfKeys(self.key)

    def fork(self) -> JoinedLayer:
        other = super().fork()
        assert isinstance(other, JoinedLayer)
        other.value = ValuesOfKeys(other.key)
        return other


def _select_heads(found: Any, which: slice) -> Any:
    """Some heads of what a side returns: states, `PackedStates`, or a pair of states of which one may be None."""
    if isinstance(found, PackedStates):
        return found.select_heads(which)
    if isinstance(found, Tensor):
        return found[:, which]
    return tuple(part if part is None else part[:, which] for part in found)
