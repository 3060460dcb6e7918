"""Files that are no caches, or are damaged: each is refused in one line."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvq import KVCache
from kvq.cache.files import FORMAT
from kvq.errors import DataError
from tests.cache.test_saved import filled, method_of


class Runs:
    """A pickle that leaves a trace where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2  # more bytes than lie between two tensors
    return content[:middle] + bytes(byte ^ 1 for byte in content[middle : middle + 512]) + content[middle + 512 :]


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (Path.unlink, "cannot be read"),
    "nothing": (_bytes(lambda _: b""), "cannot be read"),
    "a text": (_bytes(lambda _: b"keys and values\n" * 9), "cannot be read"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Runs(path.parent / "ran"))), "cannot be read"),
    "a pickle in a file of torch": (lambda path: torch.save(Runs(path.parent / "ran"), path), "cannot be read"),
    "a checkpoint": (lambda path: torch.save({"x": torch.zeros(3)}, path), "cannot be read"),
    "cut": (_bytes(lambda content: content[:-99]), "cannot be read"),
    "flipped bits": (_bytes(_flipped), "is damaged"),
    "tables": (lambda path: save_file({"x": torch.zeros(3)}, path), "cannot be read"),
    "a later format": (lambda path: torch.save({"format": "kvq-cache-9"}, path), f"kvq-cache-9', not {FORMAT}"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path, (break_it, said) = tmp_path / "cache", BROKEN[name]
    model, method = method_of("kivi")
    filled(model, method).save(path)
    break_it(path)
    with pytest.raises(DataError, match=said) as raised:
        KVCache.load(path, model, method)
    message = str(raised.value)
    assert message.startswith(f"cache {path}: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 500
    assert not (tmp_path / "ran").exists()
