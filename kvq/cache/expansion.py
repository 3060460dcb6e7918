"""Expanded keys and values of multi-head latent attention, which a cache is handed in the place of the latent.

transformers' attentions give the latent and the rotated part of the keys to the cache, and expand what it returns
(`expand_kv`). An `Expansion` in that place expands new tokens for the cache, and gives what the cache read where the
attention would expand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kvq.cache.hooks import layer_number
from kvq.errors import Unsupported

_STEP = "expand_kv"

States = tuple[Tensor, Tensor]


class Expansion:
    """An attention's `expand_kv`; after `put`, its next call returns those keys and values in place of expanding."""

    def __init__(self, step: Callable[[Tensor, Tensor], States]) -> None:
        self._step = step
        self._ready: States | None = None

    def __call__(self, latent: Tensor, rotated: Tensor) -> States:
        ready, self._ready = self._ready, None
        return self._step(latent, rotated) if ready is None else ready

    def expand(self, latent: Tensor, rotated: Tensor) -> States:
        """Expand the latent and rotated part of new tokens to keys and values `[batch, heads, tokens, channels]`."""
        if self._ready is not None:
            self._ready = None
            raise Unsupported("cache.mla=expanded: the model's attention does not expand what a cache returns")
        return self._step(latent, rotated)

    def put(self, read: States) -> None:
        """Set the keys and values that the next call returns."""
        self._ready = read


def install_expansions(attentions: Sequence[nn.Module], layers: Sequence[int]) -> Mapping[int, weakref.ref[Expansion]]:
    """Replace `expand_kv` of these attentions by an `Expansion`, once, and return them by layer number."""
    found = {}
    for module in attentions:
        given: Any = getattr(module, _STEP, None)
        index = layer_number(module, {})
        if index not in layers:
            continue
        if given is None:
            raise Unsupported(
                f"cache.mla=expanded: model: {type(module).__name__} has no step that expands the latent alone; use "
                "cache.mla=latent"
            )
        if not isinstance(given, Expansion):
            given = Expansion(given)
            setattr(module, _STEP, given)
        found[index] = weakref.ref(given)  # a cache holds no model
    return found
