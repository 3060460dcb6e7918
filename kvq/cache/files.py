"""Files of tensors, and caches on disk: tensors and plain numbers (`torch.save`) that name method, model and versions.

Safetensors with a header of JSON are written for tables. Nothing in a file is code. The method, model and versions that
a cache file names must equal those of the cache that is to be filled from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from kvq.cache.contents import StateLayer
from kvq.cache.hooks import layer_of
from kvq.cache.layer import Layer
from kvq.cache.rotary import RopeTable
from kvq.codecs import BlockRun, Growable, Packed, PackedStore
from kvq.errors import DataError, RecordError, one_line, reason_of
from kvq.models.layers import head_dims_of, kv_layers_of
from kvq.models.load import base_of, device_of
from kvq.models.weights import weights_name
from kvq.results.files import write_file
from kvq.results.record import declared_versions, refuse_constant, versions_of_method

FORMAT = "kvq-cache-3"
_ENTRY = "kvq"
_DIGEST = "sha256"
# Of the library, of JSON, and of what a header says that is not so.
_FAILURES = (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)


def identity(model: Any, method: Any, layers: int) -> dict[str, Any]:
    """Method, model and versions, as JSON data; a file is read only if they equal those that it was written with."""
    named: dict[str, Any] = method.identity(layers)
    return {
        "method": named,
        "model": {
            "weights": weights_name(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dims": head_dims_of(model.config.get_text_config(decoder=True)),
        },
        "versions": {"KVCache": declared_versions()["KVCache"], **versions_of_method(named)},
    }


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a cache's state in which each tensor is replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Growable):
        return Growable(change(value.view))
    if isinstance(value, PackedStore):
        return PackedStore(map_tensors(value.packed, change))
    if isinstance(value, Packed):
        return dataclasses.replace(value, parts=map_tensors(value.parts, change))
    if isinstance(value, dict):
        return {name: map_tensors(part, change) for name, part in value.items()}
    return type(value)(map_tensors(part, change) for part in value) if isinstance(value, list | tuple) else value


def write(
    path: Path,
    about: Mapping[str, Any],
    layers: Sequence[Layer],
    tables: Sequence[RopeTable],
    dtype: torch.dtype | None,
    states: Mapping[int, StateLayer],
) -> None:
    """Write a cache atomically; `about`: its `identity`. While it is written, memory holds its bytes again."""
    content = {
        "format": FORMAT,
        "about": json.dumps(about, sort_keys=True),
        "dtype": dtype,
        "layers": [layer.write() for layer in layers],
        "tables": [{name: getattr(table, name) for name in table.saved} for table in tables],
        "states": {number: state.write() for number, state in states.items()},
    }
    out = io.BytesIO()
    torch.save(map_tensors(content, lambda tensor: tensor.detach().cpu().clone()), out)
    try:
        write_file(path, out.getvalue())
    except OSError as error:
        raise RecordError(f"cache {path}: cannot be written: {reason_of(error)}") from error


def read_file(path: Path) -> dict[str, Any]:
    """Read the content that `write` saved, on the CPU; `DataError`: the file is damaged or of another format."""
    try:
        with zipfile.ZipFile(path) as whole:
            if (part := whole.testzip()) is not None:  # by the checksums, which `torch.load` leaves alone
                raise ValueError(f"{part} is damaged")
        safe = torch.serialization.safe_globals([BlockRun, Growable, Packed, PackedStore])
        with safe, path.open("rb") as file:  # a path that ends in .safetensors would be read as such a file
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        stored = content["format"]
    except Exception as error:  # each part fails in its own way
        raise DataError(f"cache {path}: cannot be read ({type(error).__name__}: {one_line(error, 200)})") from error
    if stored != FORMAT:
        raise DataError(f"cache {path}: of format {stored!r:.80}, not {FORMAT}")
    return content


def read(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Read a cache file, on the CPU; `DataError`: it is damaged, or differs from `about` (`identity`) in a setting."""
    content = read_file(path)
    if (difference := _difference(json.loads(content["about"]), json.loads(json.dumps(about)), "")) is not None:
        raise DataError(f"cache {path}: of {difference}")
    return content


def _difference(theirs: Any, ours: Any, name: str) -> str | None:
    """Describe the first setting, below `name`, in which a file (`theirs`) differs from `ours`; None: none does."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = sorted(ours.keys() | theirs.keys())
        differences = (_difference(theirs.get(key), ours.get(key), f"{name}.{key}") for key in names)
        return next(filter(None, differences), None)
    texts = ("null" if value is None else str(value)[:60] for value in (theirs, ours))
    return None if theirs == ours else "{}={}, here it is {}".format(name[1:], *texts)


def fill(
    content: Mapping[str, Any],
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[RopeTable],
    groups: Sequence[int],
    states: Mapping[int, StateLayer],
) -> None:
    """Fill empty layers, RoPE tables and recurrent states with the `content` that `read` returned.

    Args:
        groups: index into `tables` of each layer; empty: there are no tables.
        states: recurrent states by layer index.
    """
    # Where each part with a layer's number computes; of those that share a module, where the first does.
    numbered = [(layer_of(module), module) for module in base_of(model).modules()]
    devices = {int(index): device_of(module) for index, module in numbered if index is not None}

    def on(index: int, state: Any) -> tuple[Any, torch.device]:
        """The state of layer `index` on its device, and this device."""
        device = devices.get(index, next(iter(devices.values())))
        return map_tensors(state, lambda tensor: tensor.to(device)), device

    held = kv_layers_of(model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    for place, (table, state) in enumerate(zip(tables, content["tables"], strict=True)):
        vars(table).update(on(held[groups.index(place)].index, state)[0])
    for layer, kv, state in zip(layers, held, content["layers"], strict=True):
        layer.read(*on(kv.index, state))
    for number, empty in states.items():
        empty.read(*on(number, content["states"][number]))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash (64 hex digits) of names, dtypes, shapes and bytes."""
    digest_so_far = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest_so_far.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest_so_far.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest_so_far.hexdigest()


def dump(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """The bytes of a file with the tensors, a digest of them, and a `header` of JSON data, which names its `format`."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry: the library writes several in no order.
    text = json.dumps({**header, _DIGEST: digest(on_cpu)}, sort_keys=True, allow_nan=False)
    return save(on_cpu, metadata={_ENTRY: text})


def read_tensors(path: str | Path, what: str, form: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read header and tensors, on the CPU, of a file of format `form`; `what` names the kind of file in errors."""
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get(_ENTRY)
            if text is None:
                raise ValueError("tensors without a header of kvq's")
            header = json.loads(text, parse_constant=refuse_constant)
            stored = header["format"]
            tensors = {name: file.get_tensor(name) for name in file.keys()} if stored == form else {}  # noqa: SIM118 - not a mapping
    except _FAILURES as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(f"{what} {path}: cannot be read ({type(error).__name__}: {reason})") from error
    if stored != form:
        raise DataError(f"{what} {path}: of format {str(stored)[:80]!r}, not {form}")
    if header.get(_DIGEST, "") != digest(tensors):
        raise DataError(f"{what} {path}: damaged, its tensors are not those that were written")
    return header, tensors
