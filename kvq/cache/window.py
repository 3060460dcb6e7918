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
    """How many of `tokens` tokens are outside of the next query's window (None: no window)."""
    return 0 if window is None else max(tokens - window + 1, 0)


def drop(sides: Sequence[CacheSide], tokens: int) -> None:
    """Drop as many of the first `tokens` cached tokens as all sides can."""
    tokens = common_droppable(tokens, [side.droppable for side in sides])
    if tokens:
        for side in sides:
            side.drop(tokens)


def common_droppable(tokens: int, droppable: Sequence[Callable[[int], int]]) -> int:
    """The largest number up to `tokens` that every side can drop; `droppable(n)`: how many of n tokens a side can."""
    before = tokens + 1
    while before > tokens:  # until no side has to give less than another
        before, tokens = tokens, min(one(tokens) for one in droppable)
    return tokens


def skip_hidden(moves: Transitions, hidden: int) -> Transitions:
    """The same moves with tokens counted from index `hidden` on; moves of the tokens before are left out."""
    gone = max(hidden - moves.start, 0)
    return Transitions(max(moves.start - hidden, 0), moves.queries[gone:])


@dataclass(frozen=True)
class RecordedUpdate:
    """The sides before an update, and its states: the first `head` tokens came together, the others one by one."""

    key: CacheSide
    value: CacheSide
    key_states: Tensor
    value_states: Tensor
    head: int

    def repeat_without(self, last: int, quantized_prefill: bool) -> tuple[CacheSide, CacheSide]:
        """Repeat the update without its `last` tokens, and return the sides for keys and values."""
        count = self.key_states.shape[2] - last
        for side, states in ((self.key, self.key_states), (self.value, self.value_states)):
            side.forget(side.tokens + count)
            if count:
                side.append_then_steps(states[:, :, :count], min(self.head, count), quantized_prefill)
        return self.key, self.value
