"""Expanded keys and values of multi-head latent attention, cached in the place of the latent.

transformers' attentions hand the latent and the rotated part of the keys to the cache, and expand what it returns
(`expand_kv`). Here the cache expands new tokens, stores and reads keys and values of every head, and hands these over
where the attention would expand.
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
    """The step of one attention that expands; it gives what the cache read, once, where this is ready."""

    def __init__(self, step: Callable[[Tensor, Tensor], States]) -> None:
        self._step = step
        self._ready: States | None = None

    def __call__(self, latent: Tensor, rotated: Tensor) -> States:
        ready, self._ready = self._ready, None
        return self._step(latent, rotated) if ready is None else ready

    def of(self, latent: Tensor, rotated: Tensor) -> States:
        """Keys and values `[batch, heads, tokens, channels]` of new tokens.

        Raises:
            Unsupported: what was read before has not been asked for.
        """
        if self._ready is not None:
            self._ready = None
            raise Unsupported("cache.latent=expanded: the model's attention does not expand what a cache returns")
        return self._step(latent, rotated)

    def put(self, read: States) -> None:
        """Give these in the next expansion."""
        self._ready = read


def expansions(attentions: Sequence[nn.Module], layers: Sequence[int]) -> Mapping[int, weakref.ref[Expansion]]:
    """The step of each attention, by layer; each is put into its attention once, where other caches do not meet it.

    Raises:
        Unsupported: an attention without such a step.
    """
    found = {}
    for module in attentions:
        given: Any = getattr(module, _STEP, None)
        index = layer_number(module, {})
        if index not in layers:
            continue
        if given is None:
            raise Unsupported(
                f"cache.latent=expanded: model: {type(module).__name__} has no step that expands the latent alone; use "
                "cache.latent=latent"
            )
        if not isinstance(given, Expansion):
            given = Expansion(given)
            setattr(module, _STEP, given)
        found[index] = weakref.ref(given)  # a cache holds no model
    return found
