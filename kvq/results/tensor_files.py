"""Files of tensors: safetensors with a header of JSON, written atomically and read without trusting what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvq.errors import DataError
from kvq.results.record import refuse_constant

_ENTRY = "kvq"
_DIGEST = "sha256"
# Of the library, of JSON, and of what a header says that is not so.
_FAILURES = (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash (64 hex digits) of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def dump(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """The content of a file: the tensors, and a header of JSON data, with its `format`, and a digest of them."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry: the library writes several in no order.
    text = json.dumps({**header, _DIGEST: digest(on_cpu)}, sort_keys=True, allow_nan=False)
    return save(on_cpu, metadata={_ENTRY: text})


def read_tensors(path: str | Path, what: str, form: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors, on the CPU, of a file of a kind (`what`, in errors) that must have the format `form`."""
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get(_ENTRY)
            if text is None:
                raise ValueError("tensors without a header of kvq's")
            header = json.loads(text, parse_constant=refuse_constant)
            given = header["format"]
            tensors = {name: file.get_tensor(name) for name in file.keys()} if given == form else {}  # noqa: SIM118 - not a mapping
    except _FAILURES as error:
        said = (str(error).splitlines() or [""])[0][:200]
        raise DataError(f"{what} {path}: cannot be read ({type(error).__name__}: {said})") from error
    if given != form:
        raise DataError(f"{what} {path}: of format {str(given)[:80]!r}, not {form}")
    if header.get(_DIGEST, "") != digest(tensors):
        raise DataError(f"{what} {path}: damaged, its tensors are not those that were written")
    return header, tensors
