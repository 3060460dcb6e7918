"""Files that are no caches, or hold what no cache has written: each is refused in one line, and costs no memory."""

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
from kvq.cache.files import FORMAT
from kvq.errors import DataError
from kvq.results.tensor_files import dump, read_tensors
from tests.cache.test_saved import filled, method_of

Tensors = dict[str, Tensor]
TIERS, INDEX = "kvquant_plus_plus/tiers", "layers.0.{}.tiers.index"
CODES, WAITING = "layers.0.key.sealed.codes.0", "layers.1.{}._full"
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


def _key(header: dict[str, Any], layer: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = header["state"][f"layers.{layer}"]["key"]
    return found


def _run(place: int, value: Any) -> Callable[[Path], None]:
    return _changed(lambda header, tensors: _key(header)["sealed"][0].__setitem__(place, value))


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
    "no JSON": (_header("{"), "cannot be read"),
    "deep JSON": (_header("[" * 100_000), "RecursionError"),
    "a list": (_header("[]"), "cannot be read"),
    "NaN": (_header('{"format": NaN}'), "NaN is not a JSON number"),
    "no state": (_changed(lambda header, _: header.pop("state")), "it has no state"),
    "no dtype": (_changed(lambda header, _: header.update(states_dtype="int4")), "states_dtype is 'int4'"),
    "a list for a dtype": (_changed(lambda header, _: header.update(cache_dtype=[])), r"cache_dtype is \[\]"),
    "no layer": (_changed(lambda header, _: header["state"].pop("layers.2")), "layers.2: None where a mapping belongs"),
    "one layer more": (
        _changed(lambda header, _: header["state"].update({"layers.3": {}})),
        "'layers.3' means nothing",
    ),
    "a class": (_changed(lambda header, _: _key(header).update(__class__="os.system")), "'__class__' means nothing"),
    "no waiting tokens": (_changed(lambda _, tensors: tensors.pop(WAITING.format("key"))), "keys and 152 values"),
    "layers of two lengths": (
        _changed(lambda header, _: header["state"]["layers.1"].update(evicted=5)),
        r"its layers hold \[152, 157\] tokens",
    ),
    "a tensor more": (_changed(lambda _, tensors: tensors.update(more=torch.zeros(1))), "tensor more means nothing"),
    "no codes": (_changed(lambda _, tensors: tensors.pop(CODES)), "the codec stores"),
    "codes as numbers": (
        _changed(lambda _, tensors: tensors.update({CODES: tensors[CODES].float()})),
        "codes.0 is torch.float32",
    ),
    "codes of fewer heads": (
        _changed(lambda _, tensors: tensors.update({CODES: tensors[CODES][:, :1]})),
        r"codes.0 is torch.uint8 \[1, 1,",
    ),
    "10^12 tokens": (_run(0, 10**12), r"claims \d{13,} tokens"),
    "10^12 blocks": (_run(1, 10**12), r"not torch\.\w+ \[1, \d, \d{13,}"),
    "no block": (_run(1, 0), "is not a run of blocks"),
    "no blocks": (_changed(lambda header, _: _key(header)["sealed"].clear()), "sealed has no blocks"),
    "a number for blocks": (_changed(lambda header, _: _key(header).update(sealed=3)), "is not a run of blocks"),
    "a negative block": (_run(1, -1), "is not a run of blocks"),
    "true blocks": (_run(1, True), "is not a run of blocks"),
    "no rows": (_run(2, {}), r"cannot be decoded|not torch\."),
    "text for rows": (_run(2, "128"), "is not a run of blocks"),
    "10^9 heads": (_changed(lambda header, _: _key(header).update(shape=[1, 10**9, 128])), "at most 4 heads"),
    "another head_dim": (
        _changed(lambda header, _: _key(header).update(shape=[1, 2, 64])),
        r"not torch.float32 \[1, 2, tokens, 64\]",
    ),
    "10^9 channels": (_changed(lambda header, _: _key(header).update(shape=[1, 2, 10**9])), "has head_dim 128"),
    "two batches": (_changed(lambda header, _: _key(header).update(shape=[2, 2, 128])), "not"),
    "no shape": (_changed(lambda header, _: _key(header).update(shape="[1, 2, 128]")), "batch, heads and head_dim"),
    "evicted -1": (_changed(lambda header, _: header["state"]["layers.0"].update(evicted=-1)), "evicted is -1"),
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


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("kivi", lambda tree, tensors: tensors.pop("layers.0.key._first"), "0 sinks before"),
        ("zero", lambda tree, tensors: tree["layers.0"]["key"]["sealed"][0].__setitem__(1, 10**6), r"claims \d{7,}"),
        ("kvquant", lambda tree, tensors: tensors.pop("rope.0.cos"), "rope.0: cos and sin are not"),
        ("kvquant", lambda tree, tensors: _shorten(tensors), "rotations"),
        ("ott", lambda tree, tensors: tree["layers.2"]["key"].update(pooled=100), "pooled is 100"),
        ("h2o", lambda tree, tensors: _longer(tensors), "the method has sums of"),
        (TIERS, lambda tree, tensors: _longer(tensors), "the method has sums of"),
        (TIERS, lambda tree, tensors: tensors.pop("layers.0._received"), "_received is missing"),
        (TIERS, lambda tree, tensors: _tiers(tree).update(lost=-1.0), "lost is -1.0; a finite number"),
        (TIERS, lambda tree, tensors: _tiers(tree).update(energy="much"), "energy is 'much'; a finite number"),
        (TIERS, lambda tree, tensors: _tiers(tree).update(moves=None), "moves is None; a whole number"),
        (
            TIERS,
            lambda tree, tensors: _tiers(tree).update(_tokens=2**40),
            r"index is .*, not .* \[1, 2, 2748",
        ),
        (TIERS, lambda tree, tensors: _tiers(tree).update(tier7=[]), "'tier7' means nothing here"),
        (TIERS, lambda tree, tensors: tensors.pop(INDEX.format("key")), "it has no tiers"),
        (
            TIERS,
            lambda tree, tensors: tensors["layers.0.key.tiers.index"].bitwise_not_(),
            "its lists have .*, its tiers",
        ),
        (
            TIERS,
            lambda tree, tensors: _swapped(tensors["layers.0.value.tiers.index"]),
            "keys and values have other tiers",
        ),
        ("cq/kept_comma", lambda tree, tensors: tensors["layers.0.key._at"].add_(1), "_at does not name"),
    ],
)
def test_state_of_policies_is_checked(
    name: str, change: Callable[[dict[str, Any], Tensors], object], said: str, tmp_path: Path
) -> None:
    overrides = ["sink_tokens=5"] if name == "kivi" else []
    model, method = method_of(name, *overrides)
    filled(model, method).save(tmp_path / "cache")
    _changed(lambda header, tensors: change(header["state"], tensors))(tmp_path / "cache")
    with pytest.raises(DataError, match=said):
        KVCache.load(tmp_path / "cache", model, method)


def _tiers(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree["layers.0"]["key"]["tiers"]
    return found


def _swapped(index: Tensor) -> None:
    """The tiers of one head in place of another's, so that no list has more or fewer tokens."""
    assert not index[:, 0].equal(index[:, 1])
    index.copy_(index.flip(1).clone())


def _shorten(tensors: Tensors) -> None:
    for name in ("rope.0.cos", "rope.0.sin"):
        tensors[name] = tensors[name][:, :-1]


def _longer(tensors: Tensors) -> None:
    received = tensors["layers.0._received"]
    tensors["layers.0._received"] = torch.cat([received, received], -1)
