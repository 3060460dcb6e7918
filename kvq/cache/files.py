"""Caches on disk: one safetensors file that names method, model, versions and dtype, and holds the state of all layers.

Nothing in a file is code. What it says is compared with the method and the model that are to go on from it, and its
state is read by `kvq.cache.serialize.Reader`, which believes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvq.cache.contents import StateLayer
from kvq.cache.hooks import attentions, layer_number
from kvq.cache.layer import Layer
from kvq.cache.rotary import RopeTable
from kvq.cache.serialize import Reader, Writer
from kvq.errors import DataError, RecordError
from kvq.models.layers import head_dims_of, kv_layers_of
from kvq.models.placing import base_of, device_of
from kvq.models.weights import weights_name
from kvq.results.files import cause, write_file
from kvq.results.tensor_files import dump, read_header, read_tensors
from kvq.results.versions import declared, versions_of_method

FORMAT = "kvq-cache-1"
_WHAT = "cache"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}
_STATES = {**_DTYPES, "float64": torch.float64}
_MOST_HEADS, _MOST_TOKENS = 2**12, 2**20
"""Where a model does not say how many heads it has and how long a text it takes."""


def identity(model: Any, method: Any, layers: int) -> dict[str, Any]:
    """What a file and those who go on from it must have in common, as JSON data."""
    named: dict[str, Any] = method.identity(layers)
    return {
        "method": named,
        "model": {
            "weights": weights_name(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dims": head_dims_of(model.config.get_text_config()),
        },
        "versions": {"KVCache": declared()["KVCache"], **versions_of_method(named)},
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
        dtype: of the cache (None: the model's).
        states: of fixed size, by layer.
    """
    out = Writer()
    for index, layer in enumerate(layers):
        layer.write(out.part(f"layers.{index}"))
    for index, table in enumerate(tables):
        if table.tokens:
            table.write(out.part(f"rope.{index}"))
    for number, state in states.items():
        state.write(out.part(f"states.{number}"))
    kind = layers[0].dtype if layers[0].get_seq_length() else None
    header = {
        **about,
        "format": FORMAT,
        "tokens": layers[0].get_seq_length(),
        "batch": max(layers[0].batch_size, 0),
        "cache_dtype": _name(dtype),
        "states_dtype": _name(kind),
        "state": out.tree,
    }
    try:
        write_file(path, dump(out.tensors, header))
    except OSError as error:
        raise RecordError(f"{_WHAT} {path}: cannot be written: {cause(error)}") from error


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def dtype_of(path: Path, about: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the cache in a file, once the file is known to be of `about` (`identity`)."""
    header = read_header(path, _WHAT, FORMAT)
    for name, own in about.items():
        found = _difference(header.get(name), own, name)
        if found is not None:
            raise DataError(f"{_WHAT} {path}: {found}")
    return _dtype(path, header, "cache_dtype", _DTYPES)


def _dtype(path: Path, header: Mapping[str, Any], name: str, known: Mapping[str, torch.dtype]) -> torch.dtype | None:
    given = header.get(name)
    if given is not None and (not isinstance(given, str) or given not in known):
        raise DataError(f"{_WHAT} {path}: {name} is {given!r:.40}; null or one of {', '.join(known)}")
    return None if given is None else known[given]


def _difference(theirs: Any, own: Any, name: str) -> str | None:
    """The first setting in which the file differs; None: there is none."""
    if isinstance(theirs, Mapping) and isinstance(own, Mapping):
        names = sorted(own.keys() | theirs.keys())
        found = (_difference(theirs.get(key), own.get(key), f"{name}.{key}") for key in names)
        return next(filter(None, found), None)
    return None if theirs == own else f"of {name}={_short(theirs)}, here it is {_short(own)}"


def _short(value: Any) -> str:
    return "null" if value is None else str(value)[:60]


def read(
    path: Path,
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[RopeTable],
    groups: Any,
    fixed: Mapping[int, tuple[StateLayer, StateLayer]],
) -> None:
    """Fill empty layers, tables and states from a file that `dtype_of` has accepted.

    Args:
        groups: the table of each layer, by index; empty: there are no tables.
        fixed: by layer, the state to fill, and one of the same model behind a few tokens.
    """
    header, tensors = read_tensors(path, _WHAT, FORMAT)
    if not isinstance(header.get("state"), dict):
        raise DataError(f"{_WHAT} {path}: it has no state")
    states = _dtype(path, header, "states_dtype", _STATES)
    given = Reader(header["state"], tensors, f"{_WHAT} {path}", states or torch.float32, torch.device("cpu"))
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads, devices = getattr(config, "num_attention_heads", None), _devices(model)
    longest = getattr(config, "max_position_embeddings", None)
    given.sizes["most_heads"] = heads if isinstance(heads, int) else _MOST_HEADS
    given.sizes["most_tokens"] = longest if isinstance(longest, int) else _MOST_TOKENS
    held = kv_layers_of(config)
    devices |= {kv.index: next(iter(devices.values())) for kv in held if kv.index not in devices}  # shared attentions
    if states is not None:
        for index, table in enumerate(tables):
            table.read(given.part(f"rope.{index}", devices[held[list(groups).index(index)].index]))
    for index, (layer, kv) in enumerate(zip(layers, held, strict=True)):
        given.sizes["head_dim"] = kv.head_dim
        layer.read(given.part(f"layers.{index}", devices[kv.index]))
    given.sizes["batch"] = max(layers[0].batch_size, 0)
    for number, (state, like) in fixed.items():
        part = given.part(f"states.{number}", like.device)
        if states is not None:
            state.read(part, like)
        part.finish()
    given.finish()
    seen = [layer.get_seq_length() for layer in layers]
    if (
        len(set(seen)) > 1
        or len({layer.batch_size for layer in layers}) > 1
        or bool(seen[0]) is not (states is not None)
    ):
        raise given.error(f"its layers hold {sorted(set(seen))} tokens, of states {_short(_name(states))}")
    if any(table.tokens not in (0, seen[0]) for table in tables):
        raise given.error(f"its rotations are of {tables[0].tokens} tokens, its layers of {seen[0]}")
    if tensors:
        raise given.error(f"the tensor {_short(next(iter(tensors)))} means nothing here")


def _devices(model: nn.Module) -> dict[int, torch.device]:
    """Where each attention computes, by its layer."""
    found = attentions(base_of(model))
    return {layer_number(module, {}): device_of(module) for module in found}
