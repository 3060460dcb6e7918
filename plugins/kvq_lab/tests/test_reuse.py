"""Stored prefixes: sizes by hand, an ideal coder against scipy, and a text that goes on with equal loss."""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import entropy

from kvq.config import compose, resolve
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.policies import Policy
from kvq.models.inputs import Inputs
from kvq.results import Record, Store
from kvq.runs import run
from kvq_lab.reuse import byte_planes, check, deflated_bytes, join_planes, order0_bytes

pytest.importorskip("zstandard")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (one, other)))


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


@given(arrays(np.uint16, st.integers(0, 200)))
@settings(max_examples=30, deadline=None)
def test_exponents_of_bfloat16_come_back_bit_for_bit(words: np.ndarray) -> None:
    """Also NaN, infinities, subnormals and zeros of both signs; the planes are the fields of the format."""
    tensor = torch.from_numpy(np.concatenate([words, np.array([0x8000, 0x7FC1, 0xFF80, 1], np.uint16)]).view(np.int16))
    bits, tensor = tensor.int() & 0xFFFF, tensor.view(torch.bfloat16)
    rest, exponent = byte_planes(tensor, exponents=True)
    assert exponent.tolist() == (bits >> 7 & 0xFF).tolist()
    assert rest.tolist() == ((bits & 0x7F) << 1 | bits >> 15).tolist()
    assert same_bits(join_planes([rest, exponent], tensor, exponents=True), tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64])
@pytest.mark.parametrize("exponents", [False, True])
def test_planes_join_to_what_was_split(dtype: torch.dtype, exponents: bool) -> None:
    for shape in ((2, 3, 5), (), (0, 4)):
        tensor = (torch.randn(shape) * 100).to(dtype)
        joined = join_planes(byte_planes(tensor, exponents), tensor, exponents)
        assert joined.shape == tensor.shape
        assert same_bits(joined, tensor)


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


def test_lossless_baseline(made: tuple[Store, dict[str, Record]], tmp_path: Path) -> None:
    """Exponents of bfloat16 apart take fewer bits than its bytes, and the file is the same."""
    words = [*GIVEN, "method=fp16", "cache.dtype=bfloat16", f"results_dir={tmp_path}"]
    whole, apart = (run(resolve(compose([*words, *more]))) for more in ([], ["task.coder=exponents"]))
    assert apart.metrics["nll"] == whole.metrics["nll"]
    assert apart.metrics["sent_bytes"] == whole.metrics["sent_bytes"]
    assert apart.metrics["order0_bits"] < whole.metrics["order0_bits"] < 16
    assert apart.metrics["zstd_bits"] < whole.metrics["zstd_bits"]


def test_break_even(made: tuple[Store, dict[str, Record]]) -> None:
    """At that speed of a link both ways take equally long, by each window's own sizes and rates."""
    store, records = made
    for record in records.values():
        wide = record.metrics["total_bytes"] * 16 / record.metrics["effective_bits"]
        for row in store.samples(record.key):
            coding = sum(wide / 1e6 / row[f"{name}_rate"] for name in ("split", "compress", "decompress", "join"))
            link = row["break_even_rate"] * 1e6
            assert link > 0
            assert coding + row["zstd_bytes"] / link == pytest.approx(wide / link)


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
