"""One attention layer of the cache: keys and values, each with its own codec and residual policy.

A layer drops tokens once they have left the window of the next query: those of whole blocks, because a block is encoded
as in a layer without a window; single tokens where nothing is encoded. Keys and values drop the same tokens. So a layer
holds less than a block above its window; of a side that cannot drop, it holds the whole past. Attention reads the same
columns either way: those that transformers' own sliding layers return.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvq.cache.chunk_masks import SourceColumns, Transitions, columns_of
from kvq.cache.observe import Attended
from kvq.cache.side import CacheSide
from kvq.errors import ConfigError, Unsupported

Read = TypeVar("Read")
StatesInSteps = tuple[Tensor, Tensor | None]
"""Of one side: what a chunk's first query reads and later ones add; and the tokens that move, decoded (None: none)."""


class Layer(CacheLayerMixin):
    """The interface of every layer of a `KVCache`; `key` and `value` are its sides (`CacheSide`)."""

    keeps_order = True
    """The cached tokens are in the order of their arrival, without gaps."""
    supports_early_init = False
    irreversible: str | None = "what it does to a token stays"
    """The reason why `crop` cannot undo an update; None: it can undo a recorded one."""
    recording = False
    """Whether `crop` can undo the last update; `expect_candidates` is then called before each update."""
    evicted = 0
    """Number of tokens evicted so far."""
    token_by_token = False
    padding: Sequence[int] | None = None
    """Columns before the first token of each sequence; None: none."""
    no_padding_reason: str | None = None
    """The reason why sequences of a padded batch cannot be cached apart; None: they can."""
    window: int | None = None
    """How many tokens back a query reads, itself included; None: all."""
    dtype: torch.dtype
    key: Any
    value: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store dtype and device; the first append allocates storage."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def is_sliding(self) -> bool:
        """Whether the layer has a sliding window; transformers reads this when it makes the layer's mask."""
        return self.window is not None

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can restore the state before an update, once updates are recorded."""
        return self.irreversible is None

    @property
    def shuffled(self) -> bool:
        """Whether the index of a token in the cache may differ from its position in the text."""
        return self.evicted > 0

    @property
    def sequence_layers(self) -> list[Layer]:
        """The layers that hold the sequences: itself, or of a padded batch one for each number of padding columns."""
        return [self]

    @property
    def observes(self) -> bool:
        """Whether `observe` is to be called for the next attention."""
        return False

    def receive_tokens(self, tokens: Tensor | None) -> None:
        """Receive the ids of the next tokens, `[batch, tokens]`, before their states (None: they are not known)."""

    def receive_hidden(self, hidden: Tensor) -> None:
        """Receive the hidden states `[batch, tokens, channels]` at the layer's input, before `update`."""

    def receive_rotations(self, tokens: int, tables: tuple[Tensor, Tensor] | None, like: Tensor) -> None:
        """Receive the RoPE tables of the next tokens: cosines and sines `[rows, tokens, columns]` (None: no RoPE)."""
        self.key.rope.extend(self.get_seq_length(), tokens, tables, like)

    def observe(self, attended: Attended) -> None:
        """Receive the queries and keys of an attention, after `update`."""

    def record(self, on: bool) -> None:
        """Switch recording on or off; while it is on, `crop` can undo the last update."""
        self.recording = on

    def expect_candidates(self, candidates: int) -> None:
        """Set how many of the next update's last tokens are candidates, which attend as if they came one by one."""

    def get_seq_length(self) -> int:
        """Tokens seen: cached and evicted ones."""
        return self.key.tokens + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask over the cached tokens and `query_length` new ones."""
        return self.key.tokens + query_length, self.evicted

    def get_max_length(self) -> int:
        """-1: the cache grows without limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name in transformers 5.17

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first update (transformers asks before reusing a cache)."""
        return self.key.batch_size

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length():
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    @abc.abstractmethod
    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the batch by its sequences `indices`, which may repeat (beam search)."""

    @abc.abstractmethod
    def columns_for(self, queries: int, device: torch.device, known: SourceColumns | None) -> SourceColumns | None:
        """The key columns that the next update, of `queries` tokens, returns; None: one column for each token.

        `known`: the columns of the previous layer, reused by layers with the same residual.
        """

    @abc.abstractmethod
    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise the `ConfigError` or `Unsupported` that `crop` would raise."""

    def write(self) -> dict[str, Any]:
        """Return the state to save in a file: attributes by name."""
        raise Unsupported(f"{type(self).__name__}: has no form in a file")

    def read(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore into this empty layer the state that `write` returned, with tensors on `device`."""
        raise Unsupported(f"{type(self).__name__}: has no form in a file")

    @abc.abstractmethod
    def fork(self) -> Layer:
        """A copy that shares the tokens cached so far."""

    def check_rotations(self, layers: Sequence[Layer]) -> None:
        """Raise `Unsupported` where `layers`, all layers of a cache, cannot use the RoPE tables assigned to them."""

    def link(self, layers: Sequence[Layer]) -> None:
        """Receive all layers of the cache: called on its first layer when the cache is made and when it is forked."""


def outside(tokens: int, window: int | None) -> int:
    """How many of `tokens` tokens are outside of the next query's window (None: no window)."""
    return 0 if window is None else max(tokens - window + 1, 0)


def drop(sides: Sequence[CacheSide], tokens: int) -> None:
    """Drop as many of the first `tokens` cached tokens as all sides can."""
    if tokens := common_droppable(tokens, [side.droppable for side in sides]):
        for side in sides:
            side.drop(tokens)


def common_droppable(tokens: int, droppable: Sequence[Callable[[int], int]]) -> int:
    """The most of `tokens` tokens that all sides can drop; `droppable[i](n)`: how many of the first n side i can."""
    before = tokens + 1
    while before > tokens:  # until no side has to give less than another
        before, tokens = tokens, min(one(tokens) for one in droppable)
    return tokens


def skip_hidden(moves: Transitions, hidden: int) -> Transitions:
    """The same transitions with tokens counted from index `hidden` on, without those of earlier tokens."""
    gone = max(hidden - moves.start, 0)
    return Transitions(max(moves.start - hidden, 0), moves.queries[gone:])


@dataclass(frozen=True)
class RecordedUpdate:
    """The sides before an update and the states it added: `head` tokens came together, the others one by one."""

    key: CacheSide
    value: CacheSide
    key_states: Tensor
    value_states: Tensor
    head: int


class KVCacheLayer(Layer):
    """Keys and values of one attention layer, each with its own codec and residual policy."""

    irreversible: str | None = None
    saved: ClassVar[tuple[str, ...]] = ("evicted", "dtype")
    """Attributes that a file holds, besides those of the sides; classes with more state add to it."""

    def __init__(self, key: CacheSide, value: CacheSide, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.key, self.value = key, value
        self._columns: SourceColumns | None = None
        self._candidates: int | None = None
        self._recorded: RecordedUpdate | None = None

    def receive_tokens(self, tokens: Tensor | None) -> None:
        self.key.receive_tokens(tokens)

    def receive_hidden(self, hidden: Tensor) -> None:
        self.key.receive_hidden(hidden)
        self.value.receive_hidden(hidden)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states `[batch, heads, tokens, head_dim]`; return what attention reads, oldest token first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        hidden, queries = self._hidden_tokens, key_states.shape[2]
        candidates = self._keep_state(key_states, value_states) if self.recording else 0
        head = queries - candidates
        if candidates or self.token_by_token:
            columns, self._columns = self._columns, None
            if columns is None and any(side.queries for side in self._moves(queries, candidates)):
                raise self._unknown_attention()

            def append(side: CacheSide, states: Tensor) -> StatesInSteps:
                return side.append_then_steps(states, head) if candidates else side.append_in_steps(states)

            read = _order_columns(columns, *self._map_sides(append, key_states, value_states), hidden)
        else:
            keys, values = self._map_sides(lambda side, states: side.append(states), key_states, value_states)
            read = keys[:, :, hidden:], values[:, :, hidden:]
        self._drop_hidden()
        return read

    def _map_sides(
        self, call: Callable[[CacheSide, Tensor], Read], key_states: Tensor, value_states: Tensor
    ) -> tuple[Read, Read]:
        """Call `call(side, states)` for keys and for values."""
        return call(self.key, key_states), call(self.value, value_states)

    @property
    def _hidden_tokens(self) -> int:
        """Number of first cached tokens that are outside of the next query's window."""
        return outside(self.key.tokens, self.window)

    def _drop_hidden(self) -> None:
        """Drop tokens outside of the next query's window, as many as both sides can."""
        if self._hidden_tokens:
            drop((self.key, self.value), self._hidden_tokens)

    def get_seq_length(self) -> int:
        return super().get_seq_length() + self.key.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length)
        return length - self._hidden_tokens, offset + self.key.dropped + self._hidden_tokens

    def _unknown_attention(self) -> Unsupported:
        """The error for an attention that was not announced with `columns_for` or `expect_candidates`."""
        label = self.key.label.removesuffix(" and values").removesuffix(" keys")
        return Unsupported(f"model: {label} attends in a way that kvq cannot follow")

    def record(self, on: bool) -> None:
        """Switch recording on or off, and forget the recorded update."""
        super().record(on)
        self._candidates = self._recorded = None

    def expect_candidates(self, candidates: int) -> None:
        self._candidates = candidates

    def _keep_state(self, key_states: Tensor, value_states: Tensor) -> int:
        """Record sides and states, so that `crop` can undo this update; return the number of candidates in it."""
        candidates, self._candidates = self._candidates, None
        if candidates is None:
            raise self._unknown_attention()
        head = key_states.shape[2] - candidates
        self._recorded = RecordedUpdate(self.key.fork(), self.value.fork(), key_states, value_states, head)
        return candidates

    def columns_for(self, queries: int, device: torch.device, known: SourceColumns | None) -> SourceColumns | None:
        self._columns = None
        moves = self._moves(queries, (self._candidates or 0) if self.recording else 0)
        if any(side.queries for side in moves):
            tokens = self.key.tokens - self._hidden_tokens + queries
            if known is None or not known.fit_layer(moves, tokens, queries, device):
                known = columns_of(moves, tokens, queries, device)
            self._columns = known
        return self._columns

    def _moves(self, queries: int, candidates: int) -> tuple[Transitions, Transitions]:
        """The tokens of each side that leave full precision before the last of the next `queries` tokens attends.

        The last `candidates` of these count as if they came one by one; under `token_by_token` all do.
        """
        if not candidates and not self.token_by_token:
            return Transitions(0, ()), Transitions(0, ())
        steps = candidates or queries
        keys, values = (side.moves(steps, queries - steps) for side in (self.key, self.value))
        return skip_hidden(keys, self._hidden_tokens), skip_hidden(values, self._hidden_tokens)

    def write(self) -> dict[str, Any]:
        attributes = {name: getattr(self, name) for name in self.saved} if self.is_initialized else {}
        return {"key": self.key.write(), "value": self.value.write(), "own": attributes}

    def read(self, state: dict[str, Any], device: torch.device) -> None:
        self.key.read(state["key"])
        self.value.read(state["value"])
        vars(self).update(state["own"])
        self.device, self.is_initialized = device, bool(state["own"])

    def reset(self) -> None:
        self.key.reset()
        self.value.reset()
        self.is_initialized = False
        self.evicted = 0
        self.record(False)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.key.select(indices)
        self.value.select(indices)
        self._recorded = None

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): give a negative number of tokens to remove")
        if self._recorded is None or -tokens_to_remove > self._recorded.key_states.shape[2]:
            self._check_sides(-tokens_to_remove)

    def _check_sides(self, remove: int) -> None:
        """Raise `Unsupported` where the sides cannot drop their last `remove` tokens without a recorded update."""
        if remove and self.key.dropped > outside(self.get_seq_length() - remove, self.window):
            raise Unsupported(
                f"{self.key.label}: cannot remove {remove} tokens, others left the window of {self.window} then "
                "(fork() the cache before the tokens instead)"
            )
        for side in (self.key, self.value):
            side.check_crop(remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `n` tokens by `crop(-n)`, as in transformers; the state is as if they had never come."""
        self.check_crop(tokens_to_remove)
        remove, recorded, self._recorded = -tokens_to_remove, self._recorded, None
        try:
            self._check_sides(remove)
        except Unsupported:
            assert recorded is not None
            self.key, self.value = recorded.key, recorded.value
            count = recorded.key_states.shape[2] - remove
            for side, states in ((self.key, recorded.key_states), (self.value, recorded.value_states)):
                side.forget(side.tokens + count)
                if count:
                    side.append_then_steps(states[:, :, :count], min(recorded.head, count))
        else:
            for side in (self.key, self.value):
                side.crop(remove)
        self._drop_hidden()

    def fork(self) -> KVCacheLayer:
        other = copy.copy(self)
        other.key, other.value = self.key.fork(), self.value.fork()
        other._recorded = None
        return other


def _order_columns(
    columns: SourceColumns | None, keys: StatesInSteps, values: StatesInSteps, hidden: int
) -> tuple[Tensor, Tensor]:
    """Keys and values in the order of the columns (None: one for each token), without the first `hidden` tokens."""
    if columns is None:
        return keys[0][:, :, hidden:], values[0][:, :, hidden:]
    sides = zip((columns.keys, columns.values), columns.moves, (keys, values), strict=True)
    read = []
    for source, moves, (first, decoded) in sides:
        some = None if decoded is None else decoded[:, :, decoded.shape[2] - len(moves.queries) :]
        read.append(source.join(first[:, :, hidden:], some))
    return read[0], read[1]
