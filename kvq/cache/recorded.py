"""The last update of a layer, so that `crop` can undo it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvq.cache.side import CacheSide


@dataclass(frozen=True)
class Recorded:
    """An update that can be undone: the sides before it and the states it added.

    The first `head` tokens came together, the others as if one per forward.
    """

    key: CacheSide
    value: CacheSide
    key_states: Tensor
    value_states: Tensor
    head: int

    def without(self, last: int, quantized_prefill: bool) -> tuple[CacheSide, CacheSide]:
        """The sides as they would be if the `last` tokens of the update had never come."""
        count = self.key_states.shape[2] - last
        for side, states in ((self.key, self.key_states), (self.value, self.value_states)):
            side.forget(side.tokens + count)
            if count:
                side.append_behind(states[:, :, :count], min(self.head, count), quantized_prefill)
        return self.key, self.value
