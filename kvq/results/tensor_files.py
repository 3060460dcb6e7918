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
    """The content of a file: the tensors, and a header of JSON data with a digest of them.

    Args:
        header: its `format` names what the file is, and the version of its layout.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry: the library writes several in no order.
    text = json.dumps({**header, _DIGEST: digest(on_cpu)}, sort_keys=True, allow_nan=False)
    return save(on_cpu, metadata={_ENTRY: text})


def read_header(path: str | Path, what: str, form: str) -> dict[str, Any]:
    """The header of a file; no tensor is read.

    Args:
        what: the kind of file, as errors name it.
        form: the `format` that it must have.
    """
    header, _ = _read(Path(path), what, form, tensors=False)
    return header


def read_tensors(path: str | Path, what: str, form: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors, on the CPU; they take no more memory than the file has bytes."""
    header, tensors = _read(Path(path), what, form, tensors=True)
    if header.get(_DIGEST, "") != digest(tensors):
        raise DataError(f"{what} {path}: damaged, its tensors are not those that were written")
    return header, tensors


def _read(path: Path, what: str, form: str, tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and, if they are asked for, tensors of a file, which is checked to be one of kvq's and of this form."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise ValueError("not a file")
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get(_ENTRY)
            if text is None:
                raise ValueError("tensors without a header of kvq's")
            header = json.loads(text, parse_constant=refuse_constant)
            given = header["format"]
            found = {name: file.get_tensor(name) for name in file.keys()} if tensors and given == form else {}  # noqa: SIM118 - not a mapping
    except _FAILURES as error:
        said = (str(error).splitlines() or [""])[0][:200]
        raise DataError(f"{what} {path}: cannot be read ({type(error).__name__}: {said})") from error
    if given != form:
        raise DataError(f"{what} {path}: of format {str(given)[:80]!r}, not {form}")
    return header, found
