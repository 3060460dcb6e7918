"""GGUF files: where one lies, what its header says, and loading it once; torch is not imported."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from unittest.mock import patch

from tqdm import tqdm

from kvq.errors import DataError, Unsupported

if TYPE_CHECKING:
    from kvq.config import ModelConfig

_SCALARS = "BbHhIif?sAQqd"  # struct formats of the value types 0 to 12; 8 is a string, 9 an array
_STRING, _ARRAY = 8, 9


def weights_of(metadata: dict[str, Any]) -> str:
    """The type of most weights of a file with this metadata by llama.cpp's name, such as `Q4_1`."""
    from gguf import LlamaFileType

    kind = metadata.get("general.file_type", -1)
    names = {int(known): known.name.partition("_")[2] for known in LlamaFileType}  # MOSTLY_Q4_1, ALL_F32
    return names.get(kind, f"type {kind}")


def local_gguf(config: ModelConfig, folder: Path) -> Path | None:
    """The file that `model.gguf` names in a local folder; None: of the hub, or the model is no GGUF file."""
    if config.gguf is None or not folder.is_dir():
        return None
    file = folder / config.gguf
    if not file.is_file():
        raise DataError(f"model.path={config.path}: no file {config.gguf}")
    return file


def check_gguf(config: ModelConfig, file: Path, sha256: str) -> None:
    """Refuse a local file that is not what the configuration says."""
    place = f"model.path={config.path}: {file.name}"
    if config.sha256 is not None and sha256 != config.sha256:
        raise DataError(
            f"{place} is not the file that model={config.name} means (its sha256 is {sha256[:12]}...; it lies in "
            f"{file.parent}: delete it, and install or copy it again)"
        )
    found = weights_of(read_header(file))
    if config.weights is not None and found != config.weights:
        raise DataError(f"{place} has weights in {found}, not {config.weights} (model.weights)")


def read_header(file: Path) -> dict[str, Any]:
    """The scalars and strings of a GGUF file's metadata by name, of an array its length.

    Raises:
        DataError: no such file, or one without the bytes that its tensors need.
    """
    state = file.stat()
    return _read_header(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read_header(file: Path, modified: int, size: int) -> dict[str, Any]:  # a changed file is read again
    try:
        with file.open("rb") as stream:
            magic, version, tensors, entries = struct.unpack("<4sIQQ", stream.read(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise DataError(f"{file.name}: no GGUF file of version 2 or 3")
            metadata = {_string(stream): _value(stream, _number(stream, "I")) for _ in range(entries)}
            last = max((_tensor_offset(stream) for _ in range(tensors)), default=0)
            if stream.tell() + last >= size:
                raise DataError(f"{file.name}: truncated; {size} bytes hold no tensor at {stream.tell() + last}")
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, IndexError) as error:
        raise DataError(f"{file.name}: no GGUF file, or a truncated one") from error
    return metadata


def _number(stream: BinaryIO, form: str) -> Any:
    """The next little-endian number, `form` as in `struct`."""
    return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))[0]


def _string(stream: BinaryIO) -> str:
    """The next string: its length in 8 bytes, then UTF-8. Raises: OverflowError: above 16 MiB, so broken."""
    length = _number(stream, "Q")
    if length > 1 << 24:  # a broken length would be read as gigabytes
        raise OverflowError
    return stream.read(length).decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    """The next metadata value of type `kind`; an array is skipped, and its length returned."""
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _number(stream, _SCALARS[kind])
    inner, length = _number(stream, "I"), _number(stream, "Q")
    if inner in (_STRING, _ARRAY):
        for _ in range(length):
            _value(stream, inner)
    else:
        stream.seek(length * struct.calcsize(f"<{_SCALARS[inner]}"), 1)
    return length


def _tensor_offset(stream: BinaryIO) -> int:
    """Read one tensor's entry of the header; return where its data begins, in bytes after the header."""
    _string(stream)
    for _ in range(_number(stream, "I")):
        _number(stream, "Q")
    _number(stream, "I")
    return int(_number(stream, "Q"))


@contextmanager
def gguf_support(config: ModelConfig) -> Iterator[None]:
    """What transformers needs to read a GGUF file. The file's metadata is parsed once in a process, not for each part,
    and the names of tensors once, not for each module: 10 s less for a model of 30 layers.
    """
    if config.gguf is None:
        yield
        return
    try:
        import gguf
    except ImportError as error:
        raise Unsupported(
            f"model.gguf={config.gguf}: needs the package gguf, which is not installed; pip install -e '.[gguf]'"
        ) from error
    from transformers import modeling_gguf_pytorch_utils as reading

    silent = partial(tqdm, disable=None)  # no bar where there is no terminal
    with (
        patch.object(gguf, "GGUFReader", _cached_reader),
        patch.object(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        patch.object(reading, "tqdm", silent),
    ):
        yield


def _cached_reader(file: str) -> Any:
    """A `GGUFReader` of the file, kept for the next call: transformers parses it three times, seconds each."""
    state = Path(file).stat()
    return _reader(str(file), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _reader(file: str, modified: int, size: int) -> Any:  # a changed file is read again
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(file)
