"""What a `KVCache` holds, counted: bytes, stored bits per element, and the memory that it keeps alive."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn

from kvq.cache.recurrent import StatefulCache
from kvq.cache.store import Recompression
from kvq.codecs import Codec

SHARED = (Codec, nn.Module, Enum, type)
"""What caches share: constants of a method and weights, which no token makes larger."""


def allocated_bytes(root: Any, *beside: Any) -> int:
    """Bytes of the storage of all tensors that `root` holds, including room that is not filled yet.

    Args:
        beside: what it holds and what does not count, such as its method.
    """
    storages = (tensor.untyped_storage() for tensor in _tensors(root, {id(one) for one in beside}))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(held: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(held) in seen or isinstance(held, SHARED):
        return
    seen.add(id(held))
    if isinstance(held, Tensor):
        parts = getattr(held, "__tensor_flatten__", None)
        if parts is None:
            yield held
            return
        inner = [getattr(held, name) for name in parts()[0]]
    elif isinstance(held, Mapping):
        inner = list(held.values())
    elif isinstance(held, list | tuple | set | frozenset):
        inner = list(held)
    else:
        inner = list(getattr(held, "__dict__", {}).values())
    for part in inner:
        yield from _tensors(part, seen)


def bytes_together(caches: Sequence[CountedCache]) -> int:
    """Bytes of everything that the next tokens of several caches need, where rows that forks share count once.

    Forks share a tensor until one of them grows past its end, or where another has written; then it is copied. Of a
    tensor with rows of several forks, those of the longest count. What is not in rows (sinks, kept keys, states of
    fixed size, transformers' own caches) counts for each cache.
    """
    own, shared = 0, dict[int, int]()
    for cache in caches:
        views = {view.data_ptr(): view.numel() * view.element_size() for view in _rows(cache)}
        own += cache.nbytes - sum(views.values())
        shared |= {place: max(size, shared.get(place, 0)) for place, size in views.items()}
    return own + sum(shared.values())


def _rows(cache: CountedCache) -> Iterator[Tensor]:
    """The packed parts and the full-precision tokens of all sides, as views of the rows written."""
    for side in cache._sides():
        for packed in getattr(side, "packed", ()):
            yield from packed.parts.values()
        if (full := getattr(side, "_full", None)) is not None:
            yield full.view


class CountedCache(StatefulCache, abc.ABC):
    """A cache that counts its bytes: those of its sides and of states of fixed size."""

    method: Any
    expands: bool
    """Keys and values that multi-head latent attention expands are held in the place of its latent."""
    _latent_numbers: int | None

    @property
    @abc.abstractmethod
    def kv_layers(self) -> list[Any]:
        """The layers with keys and values of their own (`Layer`)."""

    def _sides(self, which: str | None = None) -> list[Any]:
        names = ("key", "value") if which is None else (which,)
        return [getattr(layer, name) for layer in self.kv_layers for name in names]

    @property
    def packed_bytes(self) -> int:
        return sum(side.packed_bytes for side in self._sides())

    @property
    def nbytes(self) -> int:
        """Bytes of everything the next token needs: packed prefixes, full-precision residuals, and states."""
        return self.packed_bytes + sum(side.residual_bytes for side in self._sides()) + self.state_bytes

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of all memory that the cache keeps alive.

        Besides `nbytes`: reserved rows, which save a copy at every token; the decoded copy (`keep_decoded`); the angles
        of rotary embeddings that codecs undo; attention scores of tokens; and the last update, where `crop` can undo
        it. Constants of a method are shared by its caches and not counted.
        """
        return allocated_bytes(self, self.method)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of packed keys and values; a side that packs none counts in full precision."""
        return self.side_bits()

    @property
    def effective_bits(self) -> float:
        """Stored bits per element of all tokens seen so far, residual included; evicted tokens count with 0 bits."""
        sides = [(layer, side) for layer in self.kv_layers for side in (layer.key, layer.value)]
        elements = sum(side.elements_per_token * (side.tokens + layer.evicted) for layer, side in sides)
        return 8 * self.nbytes / elements if elements else 0.0

    @property
    def latent_bits(self) -> float | None:
        """Of expanded keys and values: stored bits per number of the latents that they come from; else None."""
        if not self.expands:
            return None
        tokens = sum(max(layer.batch_size, 0) * (layer.key.tokens + layer.evicted) for layer in self.kv_layers)
        return 8 * self.nbytes / (tokens * (self._latent_numbers or 0)) if tokens else 0.0

    def side_bits(self, which: str | None = None) -> float:
        """Stored bits per element of `key`, `value` or both: of packed tokens, or of full precision if none are."""
        sides = [side for side in self._sides(which) if side.tokens]
        elements = sum(side.elements_per_token for side in sides)
        return sum(side.bits_per_element * side.elements_per_token for side in sides) / elements if sides else 0.0

    @property
    def recompression(self) -> Recompression | None:
        """What encoding packed tokens again has changed, over all layers; None: the method never does."""
        found = [done for side in self._sides() if (done := getattr(side, "recompression", None)) is not None]
        return Recompression(*map(sum, zip(*found, strict=True))) if found else None
