"""Layers for left-padded batches, and layers whose keys and values one codec stores together.

Each sequence of a padded batch is cached without its padding, as in a batch of its own. Sequences with equally many
padding columns share one inner layer. Padding is neither stored nor part of statistics; attention reads zeros in its
columns, which the model's mask hides. `KVCache.together` makes a padded batch of several caches.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvq.cache.chunk_masks import SourceColumns
from kvq.cache.contents import CountedCache, StateLayer, place_layers
from kvq.cache.layer import KVCacheLayer, Layer, Read, drop, outside
from kvq.cache.rotary import RopeTable
from kvq.cache.side import CacheSide
from kvq.errors import Unsupported
from kvq.kernels import PackedStates
from kvq.models.layers import KvLayer


@dataclass
class Part:
    """Sequences with equal `padding`, in columns: their `rows` in the batch, and the `layer` that holds them."""

    rows: list[int]
    padding: int
    layer: Any

    def unpad(self, tensor: Tensor, seen: int) -> Tensor:
        """The part's rows of `[batch or 1, columns, ...]` without padding; `seen` columns came before these columns."""
        rows = tensor if tensor.shape[0] == 1 else tensor[self.rows]
        return rows[:, max(self.padding - seen, 0) :]


class PaddedLayer(Layer):
    """A layer of a padded batch: for each distinct number of padding columns, a fork of `empty` with its sequences."""

    irreversible = "a padded batch"

    def __init__(self, empty: Layer, padding: Sequence[int]) -> None:
        super().__init__()
        self.window, self.keeps_order = empty.window, empty.keeps_order
        self.parts = [
            Part([row for row, one in enumerate(padding) if one == count], count, empty.fork())
            for count in sorted(set(padding))
        ]
        self._seen = 0

    @classmethod
    def join(cls, layers: Sequence[Layer]) -> PaddedLayer:
        """One layer with the sequences of all `layers`, in their order, the shorter ones padded."""
        joined, rows = cls(layers[0], []), itertools.count()
        joined._seen = max(layer.get_seq_length() for layer in layers)
        for layer in layers:
            layer_rows = list(itertools.islice(rows, layer.batch_size))
            joined.parts.append(Part(layer_rows, joined._seen - layer.get_seq_length(), layer))
        return joined

    @property
    def padding(self) -> list[int]:  # type: ignore[override]
        """Padding columns before the first token of each sequence, in the order of the batch."""
        by_row = {row: part.padding for part in self.parts for row in part.rows}
        return [by_row[row] for row in sorted(by_row)]

    @property
    def sequence_layers(self) -> list[Layer]:
        """One layer for each number of padding columns, with all sequences that have it."""
        return [part.layer for part in self.parts]

    @property
    def shuffled(self) -> bool:
        return any(part.layer.shuffled for part in self.parts)

    @property
    def batch_size(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask, padding columns included."""
        hidden = outside(self._seen, self.window)
        return self._seen - hidden + query_length, hidden

    def receive_tokens(self, tokens: Tensor | None) -> None:
        for part in self.parts:
            part.layer.receive_tokens(None if tokens is None else part.unpad(tokens, self._seen))

    def receive_hidden(self, hidden: Tensor) -> None:
        for part in self.parts:
            part.layer.receive_hidden(part.unpad(hidden, self._seen))

    def receive_rotations(self, tokens: int, tables: tuple[Tensor, Tensor] | None, like: Tensor) -> None:
        for part in self.parts:
            unpadded = None if tables is None else tuple(part.unpad(table, self._seen) for table in tables)
            part.layer.receive_rotations(tokens - max(part.padding - self._seen, 0), unpadded, like)

    def columns_for(self, queries: int, device: torch.device, known: SourceColumns | None) -> SourceColumns | None:
        """Return None, one column per token; `Unsupported`: only some of the queries are to read a token decoded."""
        for part in self.parts:
            if part.layer.columns_for(queries - max(part.padding - self._seen, 0), device, None) is not None:
                raise Unsupported(
                    f"attention_mask: padding, and {queries} tokens at once that are to be read as one by one; feed "
                    "them one by one, or batch prompts of equal length"
                )
        return None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states `[batch, heads, columns, head_dim]`, and return what attention reads, padding as zeros."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        columns = self.get_mask_sizes(key_states.shape[2])[0]
        out = [states.new_zeros(*states.shape[:2], columns, states.shape[3]) for states in (key_states, value_states)]
        for part in self.parts:
            start = max(part.padding - self._seen, 0)
            unpadded = (states[part.rows][:, :, start:] for states in (key_states, value_states))
            for whole, read in zip(out, part.layer.update(*unpadded, *args, **kwargs), strict=True):
                whole[part.rows, :, columns - read.shape[2] :] = read
        self._seen += key_states.shape[2]
        return out[0], out[1]

    def reset(self) -> None:
        """Forget everything but the padding."""
        self._seen, self.is_initialized = 0, False
        for part in self.parts:
            part.layer.reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen, parts = indices.tolist(), []
        for part in self.parts:
            place = {row: number for number, row in enumerate(part.rows)}
            rows = [row for row, old in enumerate(chosen) if old in place]
            if rows:
                part.layer.batch_select_indices(torch.tensor([place[chosen[row]] for row in rows]))
                parts.append(replace(part, rows=rows))
        self.parts = parts

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `Unsupported` unless `tokens_to_remove` is 0."""
        if tokens_to_remove:
            raise Unsupported(f"crop({tokens_to_remove}): a padded batch; crop a batch of prompts of equal length")

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `Unsupported`, but for 0 tokens: a padded batch cannot be cropped."""
        self.check_crop(tokens_to_remove)

    def fork(self) -> PaddedLayer:
        other = copy.copy(self)
        other.parts = [replace(part, rows=list(part.rows), layer=part.layer.fork()) for part in self.parts]
        return other


class PaddableCache(CountedCache):
    """A cache that stores the sequences of a left-padded batch separately, without their padding."""

    method: Any
    recording: bool
    _held: Mapping[int, tuple[int, KvLayer]]
    _tables: list[RopeTable]
    _groups: list[int]

    @property
    def _batch_layers(self) -> list[Any]:
        """The layers with keys and values, each of the whole batch."""
        return [self.layers[index] for index in self._held]

    @property
    def kv_layers(self) -> list[Any]:  # type: ignore[override]
        """The layers with keys and values of their own (`Layer`)."""
        return [one for layer in self._batch_layers for one in layer.sequence_layers]

    @property
    def padding(self) -> Sequence[int] | None:
        """Columns of padding before the first token of each sequence; None: none."""
        padding: Sequence[int] | None = self._batch_layers[0].padding
        return padding if padding is not None and any(padding) else None

    @property
    def is_parted(self) -> bool:
        """Whether sequences are cached apart; then later tokens come one per forward, and `crop` is refused."""
        return isinstance(self._batch_layers[0], PaddedLayer)

    @property
    def no_split_reason(self) -> str | None:
        """The reason why the cache cannot hold its sequences apart; None: it can."""
        reason = next(filter(None, (layer.no_padding_reason for layer in self._batch_layers)), None)
        if reason is not None:
            return f"method={self.method.name} {reason}"
        return "candidates of assisted generation" if self.recording else None

    @property
    def no_padding_reason(self) -> str | None:
        """The reason why the cache takes no padded batch; None: it does."""
        states = "layers keep states of fixed size, which it would enter" if self._states else None
        return self.no_split_reason or states

    def pad(self, padding: Sequence[int] | None) -> None:
        """Set the columns of padding before the first token of each sequence; only while the cache is empty."""
        setting = "attention_mask: padding"
        if padding is None or self.get_seq_length():
            raise Unsupported(f"{setting} of the cached tokens differs; give that of the prompts in every forward")
        if (reason := self.no_padding_reason) is not None:
            raise Unsupported(f"{setting}: {reason}; batch prompts of equal length, or run them one by one")
        layers = [PaddedLayer(layer, padding) for layer in self.kv_layers]
        tables: dict[tuple[int, int], RopeTable] = {}
        for layer, group in zip(layers, self._groups, strict=False):  # no groups where nothing undoes rotations
            for part in layer.parts:
                table = tables.setdefault((part.padding, group), RopeTable(self._tables[group].style))
                part.layer.key.rope = part.layer.value.rope = table
        self._set_layers(layers)

    def _set_layers(self, layers: Sequence[Layer]) -> None:
        self.layers = place_layers([held for _, held in self._held.values()], layers, self._states)

    def _remove_padding(self) -> None:
        """Keep only the sequences of each layer's first part, in plain layers without padding."""
        self._set_layers([layer.sequence_layers[0] for layer in self._batch_layers])
        for layer, group in zip(self._batch_layers, self._groups, strict=False):
            self._tables[group] = layer.key.rope

    def reset(self) -> None:
        """Forget everything, padding included."""
        if self.is_parted:
            self._remove_padding()
        super().reset()

    def sequence(self, row: int) -> Any:
        """A copy of one sequence of the batch, without its padding."""
        other: Any = self.fork()  # type: ignore[attr-defined]
        other.batch_select_indices(torch.tensor([row]))
        if other.is_parted:
            other._remove_padding()
        return other

    @classmethod
    def together(cls, caches: Sequence[Any]) -> Any:
        """One cache with the sequences of `caches`, of one model and method; these are not changed.

        Shorter sequences count as padded on the left (`padding`). Stored bits are those of the caches. Each later
        forward has one token for each sequence.
        """
        forks = [cache.fork() for cache in caches]
        for fork in forks:
            other = "" if fork.method.label == forks[0].method.label else "another method"
            empty = "" if fork.get_seq_length() else "an empty cache"
            if reason := ("a padded batch" if fork.is_parted else fork.no_split_reason) or other or empty:
                raise Unsupported(f"KVCache.together: {reason}; go on with each by itself")
        joined = forks[0]
        joined._states = {index: StateLayer.join([fork._states[index] for fork in forks]) for index in joined._states}
        each = zip(*(fork._batch_layers for fork in forks), strict=True)
        joined._set_layers([PaddedLayer.join(layers) for layers in each])
        return joined


class ValuesOfKeys:
    """The value side of a `JoinedLayer`, whose key side stores both: 0 bytes, and all else as the key side."""

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
        """Call `call` once, on keys and values joined along the heads, and split its result into keys and values."""
        both, heads = call(self.key, torch.cat([key_states, value_states], 1)), key_states.shape[1]
        return _select_heads(both, slice(0, heads)), _select_heads(both, slice(heads, 2 * heads))

    def _keep_state(self, key_states: Tensor, value_states: Tensor) -> int:
        """Record the update for `crop`, keys and values joined along the heads; return its number of candidates."""
        both = torch.cat([key_states, value_states], 1)
        return super()._keep_state(both, both)

    def _drop_hidden(self) -> None:
        if self._hidden_tokens:
            drop((self.key,), self._hidden_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.value = ValuesOfKeys(self.key)

    def fork(self) -> JoinedLayer:
        other: Any = super().fork()
        other.value = ValuesOfKeys(other.key)
        return other


def _select_heads(read: Any, which: slice) -> Any:
    """The heads `which` of what a side returned: states, `PackedStates`, or two states of which one may be None."""
    if isinstance(read, PackedStates):
        return read.select_heads(which)
    if isinstance(read, Tensor):
        return read[:, which]
    return tuple(part if part is None else part[:, which] for part in read)
