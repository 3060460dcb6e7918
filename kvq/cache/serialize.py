"""What a cache file holds: plain numbers as JSON data, and tensors by name, written by `Writer` and read by `Reader`.

A class with state names in `saved` the attributes that it keeps from one forward to the next. What is read is taken as
it is: the digest of a file shows that a cache wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvq.codecs import BlockRun, Growable, Packed, PackedStore


class Writer:
    """Collects the state of a part of a cache.

    `tree`: JSON data, in which other values are pairs of kind and content; `tensors`: by name, shared by all parts.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None, prefix: str = "") -> None:
        self.tree: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {} if tensors is None else tensors
        self._prefix = prefix

    def part(self, name: str) -> Writer:
        """A writer whose tree is `name` in this one, and whose names of tensors begin with it."""
        inner = Writer(self.tensors, f"{self._prefix}{name}.")
        self.tree[name] = inner.tree
        return inner

    def fields(self, owner: Any, names: Iterable[str]) -> None:
        """Write the attributes `names` of `owner`."""
        for name in names:
            self.tree[name] = self._data(f"{self._prefix}{name}", getattr(owner, name))

    def _data(self, name: str, value: Any) -> Any:
        """A value as JSON data; the tensors in it are written under names that begin with `name`."""
        if isinstance(value, Tensor):
            self.tensors[name] = value
            return ["tensor", name]
        if isinstance(value, Growable):
            return ["rows", self._data(name, value.view)]
        if isinstance(value, PackedStore):
            return ["store", self._data(name, value.packed)]
        if isinstance(value, Packed):
            parts = [[part, self._data(f"{name}.{part}", tensor)] for part, tensor in value.parts.items()]
            runs = [[run.tokens, run.count, run.rows] for run in value.runs]
            return ["packed", [parts, runs, value.batch, value.heads, value.head_dim, self._data(name, value.dtype)]]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, tuple):
            return ["tuple", [self._data(f"{name}.{place}", item) for place, item in enumerate(value)]]
        if isinstance(value, dict):
            return ["dict", [[key, self._data(f"{name}.{key}", item)] for key, item in value.items()]]
        return value


class Reader:
    """Reads what a `Writer` wrote as `tree` and `tensors`; tensors go to `device`."""

    def __init__(self, tree: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
        self.tree, self.tensors, self.device = tree, tensors, device

    def part(self, name: str, device: torch.device | None = None) -> Reader:
        """A reader for the part `name`, on this reader's device or another."""
        return Reader(self.tree[name], self.tensors, self.device if device is None else device)

    def fields(self, owner: Any, names: Iterable[str]) -> None:
        """Set the attributes `names` of `owner` to what was written."""
        for name in names:
            setattr(owner, name, self._value(self.tree[name]))

    def _value(self, data: Any) -> Any:
        """The value that `Writer._data` wrote as `data`."""
        if not isinstance(data, list):
            return data
        kind, held = data
        if kind == "tensor":
            return self.tensors[held].to(self.device)
        if kind == "rows":
            return Growable(self._value(held))
        if kind == "store":
            return PackedStore(self._value(held))
        if kind == "packed":
            parts, runs, batch, heads, head_dim, dtype = held
            tensors = {name: self._value(part) for name, part in parts}
            blocks = tuple(BlockRun(*run) for run in runs)
            return Packed(tensors, blocks, batch, heads, head_dim, self._value(dtype))
        if kind == "dtype":
            return getattr(torch, held)
        return tuple(map(self._value, held)) if kind == "tuple" else {key: self._value(item) for key, item in held}
