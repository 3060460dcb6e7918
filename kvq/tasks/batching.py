"""Which prompts go through a model together: the one rule for every task with items.

A batch has `task.batch_size` prompts; by default (null) as many as `ROWS`, and no more tokens than `TOKENS`. Prompts of
unequal length share a batch where method and model hold sequences apart; elsewhere those of equal length do. Equal or
not, the answers are those of each prompt alone, up to the last bits of what a batch rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from kvq.cache import KVCache
from kvq.config.tasks import Prefill
from kvq.tasks.reader import Reader

ROWS = 8
"""Prompts of a batch where `task.batch_size` is null."""
TOKENS = 16_384
"""Tokens of a batch of several prompts, padding included, where `task.batch_size` is null."""


def has_room(prompts: int, longest: int, rows: int | None) -> bool:
    """Whether a batch may have so many prompts, the longest of so many tokens; `rows`: as `task.batch_size`."""
    if rows is not None:
        return prompts <= rows
    return prompts == 1 or (prompts <= ROWS and prompts * longest <= TOKENS)


def batches_of(lengths: Sequence[int], rows: int | None, unequal: bool) -> list[list[int]]:
    """Indices of the prompts of each batch, by length.

    Args:
        lengths: tokens of each prompt.
        rows: `task.batch_size`.
        unequal: whether lengths in a batch may differ.
    """
    out: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda one: lengths[one]):  # little padding
        same = bool(out) and (unequal or lengths[out[-1][0]] == lengths[index])
        if same and has_room(len(out[-1]) + 1, lengths[index], rows):
            out[-1].append(index)
        else:
            out.append([index])
    return out


def read_in_batches(
    reader: Reader, prompts: Sequence[Sequence[int]], rows: int | None
) -> Iterator[tuple[list[int], KVCache, Float[Tensor, "batch vocab"]]]:
    """All prompts in batches: their indices, the cache that holds them, and the logits after each.

    Under `prefill=chunked`, prompts are read one after the other, what they share once, and answered together.
    """
    if reader.prefill is Prefill.whole or not reader.joins:
        for batch in batches_of([len(prompt) for prompt in prompts], rows, reader.unequal):
            yield batch, *reader.begin_together([prompts[index] for index in batch])
        return
    waiting: list[tuple[int, KVCache, Tensor]] = []
    longest = 0
    for found in reader.each(prompts):
        tokens = len(prompts[found[0]])
        if waiting and not has_room(len(waiting) + 1, max(longest, tokens), rows):
            yield _joined(waiting)
            waiting, longest = [], 0
        waiting.append(found)
        longest = max(longest, tokens)
    if waiting:
        yield _joined(waiting)


def _joined(read: Sequence[tuple[int, KVCache, Tensor]]) -> tuple[list[int], KVCache, Tensor]:
    indices, caches, logits = zip(*read, strict=True)
    return list(indices), *Reader.join(caches, logits)
