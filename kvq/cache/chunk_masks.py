"""Keys, values and masks of a chunk in which tokens become quantized between two queries.

Fed one per forward, a query reads a token in full precision until it leaves the residual, and decoded from then on. In
a chunk, keys and values therefore contain such a token twice (three times where its key and its value leave at
different queries), and the mask of each query shows exactly one copy. One softmax covers all copies, so the result is
that of one query per forward, with any attention that takes a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from kvq.errors import Unsupported

States = Float[Tensor, "batch heads _tokens head_dim"]


@dataclass(frozen=True)
class Transitions:
    """Tokens `start`, `start + 1`, ... of one side leave full precision within a chunk.

    `queries[i]` is the first query of the chunk, counted from 0, that reads token `start + i` decoded; never 0.
    """

    start: int
    queries: tuple[int, ...]


@dataclass(frozen=True)
class CopySources:
    """Sources of one side's copies: copy `full_at[i]` is token `full[i]` in full precision, copy `decoded_at[i]` is the
    decoded form of token `Transitions.start + decoded[i]`.
    """

    full_at: Int[Tensor, " some"]
    full: Int[Tensor, " some"]
    decoded_at: Int[Tensor, " others"]
    decoded: Int[Tensor, " others"]

    def join(self, first: States, decoded: States | None) -> States:
        """The tokens as the first query reads them, followed by the copies."""
        tokens, copies = first.shape[2], self.full_at.numel() + self.decoded_at.numel()
        out = first.new_empty(*first.shape[:2], tokens + copies, first.shape[3])
        out[:, :, :tokens] = first
        for at, which, source in ((self.full_at, self.full, first), (self.decoded_at, self.decoded, decoded)):
            if source is not None:  # a layer may live on another device than its input
                at, which = at.to(source.device), which.to(source.device)
                out.index_copy_(2, at + tokens, source.index_select(2, which))
        return out


@dataclass(frozen=True)
class SourceColumns:
    """Key columns that a chunk attends to: each token as the first query reads it, then copies of those that change.

    Attributes:
        moves: which keys and which values leave full precision, and when.
        copies: token index of each copy (first those with one side decoded, then both); `keys`, `values`: sources.
        visible: whether a query reads a column; of the columns of a token it reads exactly one.
    """

    moves: tuple[Transitions, Transitions]
    copies: Int[Tensor, " copies"]
    keys: CopySources
    values: CopySources
    visible: Bool[Tensor, "queries columns"]
    _masks: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens, each counted once."""
        return self.visible.shape[1] - self.copies.numel()

    def fit_layer(
        self, moves: tuple[Transitions, Transitions], tokens: int, queries: int, device: torch.device
    ) -> bool:
        """Whether these columns are also those of a layer with these transitions, tokens, queries and device."""
        same = (self.moves, self.tokens, self.visible.shape[0]) == (moves, tokens, queries)
        return same and self.visible.device == device

    def mask(self, token_mask: Tensor | None) -> Tensor:
        """The mask `[.., queries, columns]` made from the model's mask `[.., queries, tokens]` (None: causal)."""
        if id(token_mask) not in self._masks:
            # The entry holds `token_mask`, so that no other mask gets its id.
            self._masks[id(token_mask)] = (token_mask, self._extend(token_mask))
        return self._masks[id(token_mask)][1]

    def _extend(self, token_mask: Tensor | None) -> Tensor:
        """Append columns for the copies to a mask `[.., queries, tokens]`, and hide columns that are not `visible`."""
        queries, tokens = self.visible.shape[0], self.tokens
        if token_mask is None:
            causal = torch.ones(queries, tokens, dtype=torch.bool, device=self.visible.device)
            token_mask = causal.tril(tokens - queries)[None, None]
        if not isinstance(token_mask, Tensor) or token_mask.ndim != 4 or token_mask.shape[-2:] != (queries, tokens):
            shape = list(token_mask.shape) if isinstance(token_mask, Tensor) else type(token_mask).__name__
            raise Unsupported(f"model: attention mask {shape}, where residual=sliding needs [.., {queries}, {tokens}]")
        mask = torch.cat([token_mask, token_mask.index_select(-1, self.copies)], -1)
        if mask.dtype is torch.bool:
            return mask & self.visible
        return mask.masked_fill(~self.visible, torch.finfo(mask.dtype).min)


def columns_of(
    moves: tuple[Transitions, Transitions], tokens: int, queries: int, device: torch.device
) -> SourceColumns:
    """The columns of a chunk, whose `queries` tokens are the last of `tokens`, with the copies that `moves` need."""
    never = queries
    keys, values = moves
    # Laid out on the host, from numbers that it knows: nothing waits for the device.
    # The first query that reads a token decoded.
    key_at, value_at = np.full(tokens, never), np.full(tokens, never)
    for at, side in ((key_at, keys), (value_at, values)):
        at[side.start : side.start + len(side.queries)] = side.queries
    both = np.maximum(key_at, value_at)
    # From the earlier of its two departures (key, value) on, a token is a second copy, from the later a third.
    second, third = np.flatnonzero(key_at != value_at), np.flatnonzero(both < never)
    key_moved = np.concatenate([(key_at < value_at)[second], np.ones_like(third, dtype=bool)])
    value_moved = np.concatenate([(value_at < key_at)[second], np.ones_like(third, dtype=bool)])
    copies = np.concatenate([second, third])
    earlier = np.minimum(key_at, value_at)
    start = np.concatenate([np.zeros_like(earlier), earlier[second], both[third]])
    end = np.concatenate([earlier, both[second], np.full_like(third, never)])
    query = np.arange(queries)[:, None]
    return SourceColumns(
        moves,
        torch.from_numpy(copies).to(device),
        _copy_sources(copies, key_moved, keys.start, device),
        _copy_sources(copies, value_moved, values.start, device),
        torch.from_numpy((query >= start) & (query < end)).to(device),
    )


def _copy_sources(
    copies: Int64[np.ndarray, " copies"], moved: Bool[np.ndarray, " copies"], start: int, device: torch.device
) -> CopySources:
    """Split a side's copies, given by token index, by whether they are read decoded (`moved`)."""
    still, gone = np.flatnonzero(~moved), np.flatnonzero(moved)
    picked = still, copies[still], gone, copies[gone] - start
    return CopySources(*(torch.from_numpy(index).to(device) for index in picked))
