"""Stored prefixes: sizes by hand, an ideal coder against scipy, and a text that goes on with equal loss."""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from kvq.config import compose, resolve
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.policies import Policy
from kvq.models.inputs import Inputs
from kvq.results import Record, Store
from kvq.runs import run
from kvq_lab.reuse import byte_planes, check, deflated_bytes, order0_bytes

pytest.importorskip("zstandard")
GIVEN = "model=tiny task=reuse task.windows=2 task.prefix=96 task.scored=32 residual.size=16 threads=1".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Record]]:
    folder = tmp_path_factory.mktemp("reuse")
    words = (["method=fp16"], ["method=identity"], ["method=rtn", "bits=2"], ["method=kivi", "bits=2"])
    runs = [run(resolve(compose([*GIVEN, *more, f"results_dir={folder}"]))) for more in words]
    return Store(folder), {record.method: record for record in runs}


def test_planes_are_bytes_by_their_place() -> None:
    numbers = torch.tensor([[1, 258], [-1, 0]], dtype=torch.int16)
    low, high = byte_planes(numbers)
    assert low.tolist() == [1, 2, 255, 0]
    assert high.tolist() == [0, 1, 255, 0]
    assert sum(map(len, byte_planes(torch.zeros(3, 5)))) == 3 * 5 * 4


def test_order0_is_shannons_entropy() -> None:
    draw = np.random.default_rng(0).integers(0, 7, 1000).astype(np.uint8)
    assert order0_bytes(draw) == pytest.approx(1000 * entropy(np.bincount(draw), base=2) / 8)
    assert order0_bytes(np.zeros(10, np.uint8)) == 0
    assert order0_bytes(np.zeros(0, np.uint8)) == 0


def test_deflate_is_what_zlib_reads_again() -> None:
    """A raw stream, which takes 6 bytes less than zlib's form of it: header and checksum."""
    plane = np.random.default_rng(0).integers(0, 7, 1000).astype(np.uint8)
    assert deflated_bytes(plane) == len(zlib.compress(plane.tobytes())) - 6
    assert deflated_bytes(np.zeros(10**4, np.uint8)) < 100


def test_a_file_changes_no_loss(made: tuple[Store, dict[str, Record]]) -> None:
    _, records = made
    for name in ("fp16", "identity", "rtn", "kivi"):  # kivi's values leave a sliding residual one by one
        assert records[name].metrics["reload_difference"] == 0
    # Forwards end where a block does, so some processors sum products in another order than in full precision.
    assert records["identity"].metrics["delta_nll"] == pytest.approx(0, abs=1e-4)
    assert records["rtn"].metrics["delta_nll"] > 0.01


def test_sizes(made: tuple[Store, dict[str, Record]]) -> None:
    """Full precision sends 16 bits; what is packed in 2 bits is sent in as many as are stored; coders save some."""
    store, records = made
    wide, narrow = records["fp16"].metrics, records["rtn"].metrics
    assert wide["sent_bits"] == pytest.approx(16, rel=0.01)
    assert narrow["sent_bits"] == pytest.approx(narrow["effective_bits"], rel=0.02)
    for found in (wide, narrow):
        assert found["order0_bits"] < found["sent_bits"]
        assert found["zstd_bits"] < 1.05 * found["sent_bits"]
        assert found["deflate_bits"] < 1.05 * found["sent_bits"]
        assert all(found[f"{name}_rate"] > 0 for name in ("save", "load", "compress", "decompress"))
    rows = store.samples(records["rtn"].key)
    assert [row["tokens"] for row in rows] == [32, 32]
    assert sum(row["nll"] for row in rows) / 64 == pytest.approx(narrow["nll"])


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs = Inputs(resolve(compose([*GIVEN, "method=fp16"])))
    library = Policy()
    library.setting = "backend"
    with pytest.raises(Unsupported, match="transformers' cache, which has no form in a file"):
        check(inputs, replace(build_method("fp16"), policies=(library,)))
    with pytest.raises(ConfigError, match=r"task\.context=100096"):
        run(resolve(compose([*GIVEN, "method=fp16", "task.prefix=100064", f"results_dir={tmp_path}"])))
    with pytest.raises(ConfigError, match=r"^task\.level=23: "):
        resolve(compose([*GIVEN, "task.level=23"]))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="zstandard is not installed"):
        run(resolve(compose([*GIVEN, "method=fp16", f"results_dir={tmp_path}"])))
