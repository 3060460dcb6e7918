"""nsn's released names: the same tensors as the method, and what its README shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvq import build_method
from kvq.errors import DataError
from kvq_zoo.nsn import Int3AsymNsepPchanCache
from tests.codecs import oracles


def states(*lead: int, tokens: int = 2048, dim: int = 128) -> torch.Tensor:
    return torch.randn(*lead, tokens, dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("lead", [(), (3,), (1, 2), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_is_the_method(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    x = states(*lead, tokens=70, dim=32).to(dtype)
    found = Int3AsymNsepPchanCache.from_fp16(x).to_fp16()
    assert (found.shape, found.dtype) == (x.shape, dtype)
    codec = build_method("nsn", bits=3, head_dim=32).key
    assert codec is not None
    own = x.reshape(1, -1, 70, 32)
    assert torch.equal(found.reshape(own.shape), codec.decode(codec.encode(own)))


def test_the_recipe_to_the_rounding_of_what_is_stored() -> None:
    x = states(2, tokens=300).double()
    found = Int3AsymNsepPchanCache.from_fp16(x).to_fp16().numpy()
    expected = oracles.nsn(x.numpy(), 3)
    assert np.abs(found - expected).max() < 2**-9 * np.abs(expected).max()


def test_its_size_is_as_printed() -> None:
    """2,048 tokens of 128 channels are 5.09 times smaller than in fp16."""
    x = states(8).half()
    assert x.nbytes / Int3AsymNsepPchanCache.from_fp16(x).size_bytes() == pytest.approx(5.09, abs=0.005)


def snippet() -> str:
    """The lines that nsn's README shows, where the sources lie beside the checkout (or beside `KVQ_SHARED_DATA`)."""
    data = os.environ.get("KVQ_SHARED_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
    readme = Path(data).parent / "papers" / "nsn_readme.txt"
    if not readme.is_file():
        pytest.skip("needs nsn_readme.txt among the sources, which are no part of the package")
    lines = readme.read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("from nsn import"))
    last = next(at for at, line in enumerate(lines) if line.startswith("k_recon = cached.to_fp16_compiled()"))
    return "\n".join(lines[first : last + 1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler")
def test_the_lines_of_its_readme_run_word_for_word() -> None:
    """In a process of its own: torch.compile does not trace the checks of shapes that tests put around every call."""
    code = f"""
import sys
import torch
import kvq_zoo.nsn
sys.modules["nsn"] = kvq_zoo.nsn
k = torch.randn(1, 2, 256, 128).half()
{snippet()}
assert k_recon.shape == k.shape and k_recon.dtype == torch.float16
torch.testing.assert_close(k_recon, cached.to_fp16(), rtol=2e-3, atol=2e-3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_tokens_are_one_line() -> None:
    with pytest.raises(DataError, match="holds no tokens"):
        Int3AsymNsepPchanCache.from_fp16(torch.randn(0, 64))
