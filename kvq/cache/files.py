"""Caches on disk: one safetensors file that names method, model, versions and dtype, and holds the state of all layers.

Nothing in a file is code. What it says is compared with the method and the model that are to go on from it, and a
digest each shows that its tensors and the plain numbers of its state are those that were written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvq.cache.contents import StateLayer
from kvq.cache.hooks import layer_of
from kvq.cache.layer import Layer
from kvq.cache.rotary import RopeTable
from kvq.cache.store import Reader, Writer
from kvq.errors import DataError, RecordError, reason_of
from kvq.models.layers import head_dims_of, kv_layers_of
from kvq.models.placing import base_of, device_of
from kvq.models.weights import weights_name
from kvq.results.files import write_file
from kvq.results.tensor_files import dump, read_header, read_tensors
from kvq.results.versions import declared_versions, versions_of_method

FORMAT = "kvq-cache-2"
_WHAT = "cache"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


def identity(model: Any, method: Any, layers: int) -> dict[str, Any]:
    """Method, model and versions, as JSON data: a file is read only where they equal those it was written with."""
    named: dict[str, Any] = method.identity(layers)
    return {
        "method": named,
        "model": {
            "weights": weights_name(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dims": head_dims_of(model.config.get_text_config()),
        },
        "versions": {"KVCache": declared_versions()["KVCache"], **versions_of_method(named)},
    }


def write(
    path: Path,
    about: Mapping[str, Any],
    layers: Sequence[Layer],
    tables: Sequence[RopeTable],
    dtype: Any,
    states: Mapping[int, StateLayer],
) -> None:
    """Write a cache atomically; while it is written, memory holds its bytes a second time.

    Args:
        about: `identity`, and a label for whoever reads the header.
    """
    out = Writer()
    for index, layer in enumerate(layers):
        layer.write(out.part(f"layers.{index}"))
    for index, table in enumerate(tables):
        out.part(f"rope.{index}").fields(table, table.saved)
    for number, state in states.items():
        state.write(out.part(f"states.{number}"))
    header = {
        **about,
        "format": FORMAT,
        "tokens": layers[0].get_seq_length(),
        "batch": max(layers[0].batch_size, 0),
        "state": out.tree,
        "state_sha256": _digest(out.tree),
        "cache_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }
    try:
        write_file(path, dump(out.tensors, header))
    except OSError as error:
        raise RecordError(f"{_WHAT} {path}: cannot be written: {reason_of(error)}") from error


def _digest(tree: Any) -> str:
    """The sha256 (hex) of JSON data."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def check_header(path: Path, about: Mapping[str, Any]) -> torch.dtype | None:
    """Raise `DataError` unless the file is of `about` (`identity`); return its cache's dtype (None: the model's)."""
    header = read_header(path, _WHAT, FORMAT)
    for name, own in about.items():
        found = _difference(header.get(name), own, name)
        if found is not None:
            raise DataError(f"{_WHAT} {path}: {found}")
    given = header.get("cache_dtype")
    if given is not None and given not in list(_DTYPES):
        raise DataError(f"{_WHAT} {path}: cache_dtype is {_shorten(given)}; one of {', '.join(_DTYPES)}")
    return None if given is None else _DTYPES[given]


def _difference(theirs: Any, own: Any, name: str) -> str | None:
    """Describe the first setting, below `name`, in which a file differs from what is here; None: none does."""
    if isinstance(theirs, Mapping) and isinstance(own, Mapping):
        names = sorted(own.keys() | theirs.keys())
        found = (_difference(theirs.get(key), own.get(key), f"{name}.{key}") for key in names)
        return next(filter(None, found), None)
    return None if theirs == own else f"of {name}={_shorten(theirs)}, here it is {_shorten(own)}"


def _shorten(value: Any) -> str:
    """A value as text of at most 60 characters."""
    return "null" if value is None else str(value)[:60]


@contextmanager
def _one_line_failures(path: Path) -> Iterator[None]:
    """Raise one `DataError` for whatever fails within: each part fails in its own way on what is not its own."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{_WHAT} {path}: its state is none that this cache writes ({type(error).__name__})") from error


def read(
    path: Path,
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[RopeTable],
    groups: Sequence[int],
    states: Mapping[int, StateLayer],
) -> None:
    """Fill empty layers, tables and states from a file that `check_header` has accepted.

    Args:
        groups: the table of each layer, by index; empty: there are no tables.
        states: of fixed size, by layer.
    """
    header, tensors = read_tensors(path, _WHAT, FORMAT)
    if header.get("state_sha256") != _digest(header.get("state")):
        raise DataError(f"{_WHAT} {path}: damaged, its state is not the one that was written")
    with _one_line_failures(path):
        given = Reader(header["state"], tensors, device_of(base_of(model)))
        # Where each part with a layer's number computes; of those that share a module, where the first does.
        numbered = [(layer_of(module), module) for module in base_of(model).modules()]
        devices = {int(index): device_of(module) for index, module in numbered if index is not None}
        first = next(iter(devices.values()))
        held = kv_layers_of(model.config.get_text_config())  # type: ignore[union-attr, operator]
        for index, table in enumerate(tables):
            device = devices.get(held[groups.index(index)].index, first)
            given.part(f"rope.{index}", device).fields(table, table.saved)
        for index, (layer, kv) in enumerate(zip(layers, held, strict=True)):
            layer.read(given.part(f"layers.{index}", devices.get(kv.index, first)))
        for number, state in states.items():
            state.read(given.part(f"states.{number}", devices.get(number, first)))
