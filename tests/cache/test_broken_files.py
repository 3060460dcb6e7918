"""Files that are no caches, or are damaged: each is refused in one line, and costs no memory."""

from __future__ import annotations

import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from kvq import KVCache
from kvq.cache.files import FORMAT, _digest
from kvq.errors import DataError
from kvq.results.tensor_files import dump, read_tensors
from tests.cache.test_saved import filled, method_of

Tensors = dict[str, Tensor]
MIB = 2**20


class Runs:
    """A pickle that leaves a trace where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


def _header(text: str) -> Callable[[Path], None]:
    return _bytes(lambda _: save({"x": torch.zeros(1)}, metadata={"kvq": text}))


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _changed(change: Callable[[dict[str, Any], Tensors], object]) -> Callable[[Path], None]:
    """A file that is whole, with a digest of its own, and says something else."""

    def write(path: Path) -> None:
        header, tensors = read_tensors(path, "cache", FORMAT)
        change(header, tensors)
        path.write_bytes(dump(tensors, header))

    return write


def _state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A file whose state says something else, with the digest of what it says."""

    def told(header: dict[str, Any], _: Tensors) -> None:
        change(header["state"])
        header["state_sha256"] = _digest(header["state"])

    return _changed(told)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (Path.unlink, "cannot be read"),
    "a folder": (_folder, "not a file"),
    "a pipe": (_pipe, "not a file"),
    "nothing": (_bytes(lambda _: b""), "cannot be read"),
    "a text": (_bytes(lambda _: b"keys and values\n" * 9), "cannot be read"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Runs(path.parent / "ran"))), "cannot be read"),
    "a checkpoint": (lambda path: torch.save({"x": torch.zeros(3)}, path), "cannot be read"),
    "a cut header": (_bytes(lambda content: content[:200]), "cannot be read"),
    "cut tensors": (_bytes(lambda content: content[:-1]), "cannot be read"),
    "something behind": (_bytes(lambda content: content + b"\0"), "cannot be read"),
    "a header longer than all": (_bytes(lambda content: struct.pack("<Q", 2**62) + content[8:]), "cannot be read"),
    "a flipped bit": (_bytes(_flipped), "damaged"),
    "other tensors": (lambda path: save_file({"x": torch.zeros(3)}, path), "tensors without a header of kvq's"),
    "tables of a calibration": (_header('{"format": "kvq-calibration-2"}'), "of format 'kvq-calibration-2'"),
    "a later format": (_changed(lambda header, _: header.update(format="kvq-cache-9")), "of format 'kvq-cache-9'"),
    "no state": (_changed(lambda header, _: header.pop("state")), "damaged"),
    "another state": (_changed(lambda header, _: header["state"].pop("layers.2")), "damaged"),
    "a list for a dtype": (_changed(lambda header, _: header.update(cache_dtype=[])), r"cache_dtype is \[\]"),
    "no such dtype": (_changed(lambda header, _: header.update(cache_dtype="int4")), "cache_dtype is int4"),
    "no layer": (_state(lambda state: state.pop("layers.2")), r"none that this cache writes \(KeyError\)"),
    "a number for a layer": (_state(lambda state: state.update({"layers.2": 3})), "none that this cache writes"),
    "no codes": (_changed(lambda _, tensors: tensors.pop(next(iter(sorted(tensors))))), "none that this cache writes"),
    "no JSON": (_header("{"), "cannot be read"),
    "deep JSON": (_header("[" * 100_000), "RecursionError"),
    "a list": (_header("[]"), "cannot be read"),
    "NaN": (_header('{"format": NaN}'), "NaN is not a JSON number"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "cache"
    filled(*method_of("kivi")).save(path)
    return path.read_bytes()


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_refused_in_one_line(name: str, whole: bytes, tmp_path: Path) -> None:
    path, (break_it, said) = tmp_path / "cache", BROKEN[name]
    path.write_bytes(whole)
    break_it(path)
    model, method = method_of("kivi")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=said) as raised:
        KVCache.load(path, model, method)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    message = str(raised.value)
    assert message.startswith(f"cache {path}: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 500
    assert grown < 64 * MIB
    assert not (tmp_path / "ran").exists()
