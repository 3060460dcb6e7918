"""One attention layer of the cache: keys and values, each with its own codec and residual policy."""

from __future__ import annotations

import abc
import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvq.cache.observe import Attended
from kvq.cache.side import CacheSide
from kvq.cache.sources import SourceColumns, columns_of
from kvq.errors import ConfigError, Unsupported


class Layer(CacheLayerMixin):
    """What every layer of a `KVCache` says of itself, whatever holds its keys and values (`key`, `value`)."""

    keeps_order = True
    """Tokens stand in the order in which they came, without gaps."""
    is_sliding = False
    is_croppable = False
    supports_early_init = False
    evicted = 0
    """Tokens that have left for good."""
    one_by_one = False
    key: Any
    value: Any

    @property
    def shuffled(self) -> bool:
        """Tokens no longer stand where they would without gaps."""
        return self.evicted > 0

    @property
    def observes(self) -> bool:
        """The next attention is to be shown to `observe`."""
        return False

    def observe(self, attended: Attended) -> None:
        """See what attention reads, behind `update`."""

    def get_seq_length(self) -> int:
        """Tokens seen: those held, and those evicted."""
        return self.key.tokens + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask for `query_length` new tokens: all that are held come before them."""
        return self.key.tokens + query_length, self.evicted

    def get_max_length(self) -> int:
        """-1: the cache grows without limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name in transformers 5.17

    @property
    def batch_size(self) -> int:
        """Sequences held, -1 before the first update (transformers asks before reusing a cache)."""
        return self.key.batch_size

    @override
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch entries in a new order (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times."""
        if self.get_seq_length():
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    @abc.abstractmethod
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep (and repeat) batch entries by index."""

    @abc.abstractmethod
    def announce(self, queries: int, device: torch.device, known: SourceColumns | None) -> SourceColumns | None:
        """What the next update, of `queries` tokens one by one, will return; None: the tokens as they are.

        `known`: those of the layer before, which serve all layers of one residual.
        """

    @abc.abstractmethod
    def fork(self) -> Layer:
        """A copy that shares the tokens held so far."""


class KVCacheLayer(Layer):
    """Keys and values of one attention layer, each with its own codec and residual policy."""

    def __init__(self, key: CacheSide, value: CacheSide, quantized_prefill: bool = False) -> None:
        super().__init__()
        self.key, self.value, self.quantized_prefill = key, value, quantized_prefill
        self._columns: SourceColumns | None = None

    @override
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype and device; storage is made by the first append."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, tokens, head_dim]` states; what attention reads, oldest token first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.one_by_one:
            return (
                self.key.append(key_states, self.quantized_prefill),
                self.value.append(value_states, self.quantized_prefill),
            )
        columns, self._columns = self._columns, None
        if columns is None and self._moving(key_states.shape[2]):
            raise Unsupported(f"model: {self.key.label.removesuffix(' keys')} attends in a way that kvq cannot follow")
        keys = self.key.append_one_by_one(key_states)
        values = self.value.append_one_by_one(value_states)
        return (keys[0], values[0]) if columns is None else (columns.keys.join(*keys), columns.values.join(*values))

    def _moving(self, queries: int) -> bool:
        return any(side.moves(queries).queries for side in (self.key, self.value))

    @override
    def announce(self, queries: int, device: torch.device, known: SourceColumns | None) -> SourceColumns | None:
        self._columns = None
        if self.one_by_one and self._moving(queries):
            moves, tokens = (self.key.moves(queries), self.value.moves(queries)), self.key.tokens + queries
            if known is None or not known.serve(moves, tokens, queries, device):
                known = columns_of(moves, tokens, queries, device)
            self._columns = known
        return self._columns

    def reset(self) -> None:
        """Forget everything."""
        self.key.reset()
        self.value.reset()
        self.is_initialized = False
        self.evicted = 0

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        self.key.select(indices)
        self.value.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in transformers).

        Raises:
            ConfigError: a positive number, whose meaning differs between transformers versions.
            Unsupported: the cut reaches into an encoded block.
        """
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): give a negative number of tokens to remove")
        sides = (self.key, self.value)
        for side in sides:
            side.check_crop(-tokens_to_remove)  # both, before either changes
        for side in sides:
            side.crop(-tokens_to_remove)

    @override
    def fork(self) -> KVCacheLayer:
        other = copy.copy(self)
        other.key, other.value = self.key.fork(), self.value.fork()
        return other
