"""Memory that a cache keeps alive: the storages of all tensors reachable from it, each counted once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch import Tensor, nn

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
