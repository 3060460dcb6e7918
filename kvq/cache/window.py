"""What a layer forgets: tokens outside of the window that its queries read, and its last update.

A layer drops tokens once they have left the window of the next query: those of whole blocks, because a block is encoded
as in a layer without a window; single tokens where nothing is encoded. Keys and values drop the same tokens. So a layer
holds less than a block above its window; of a side that cannot drop, it holds the whole past. Attention reads the same
columns either way: those that transformers' own sliding layers return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvq.cache.chunk_masks import Transitions
from kvq.cache.side import CacheSide


def outside(tokens: int, window: int | None) -> int:
    """How many of `tokens` tokens the next query does not read."""
    return 0 if window is None else max(tokens - window + 1, 0)


def drop(sides: Sequence[CacheSide], tokens: int) -> None:
    """Forget as many of the first `tokens` cached tokens as all sides can."""
    tokens = in_common(tokens, [side.droppable for side in sides])
    if tokens:
        for side in sides:
            side.drop(tokens)


def in_common(tokens: int, droppable: Sequence[Callable[[int], int]]) -> int:
    """How many of the first `tokens` tokens all sides can forget, each as many as `droppable` says of a number."""
    before = tokens + 1
    while before > tokens:  # until no side has to give less than another
        before, tokens = tokens, min(one(tokens) for one in droppable)
    return tokens


def clipped(moves: Transitions, hidden: int) -> Transitions:
    """The departures of tokens without the first `hidden`, which are not read."""
    gone = max(hidden - moves.start, 0)
    return Transitions(max(moves.start - hidden, 0), moves.queries[gone:])


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
                side.append_then_steps(states[:, :, :count], min(self.head, count), quantized_prefill)
        return self.key, self.value
