"""One packed tensor outside any model."""

import shutil
import subprocess
import sys

import pytest
import torch

import kvq
from kvq.errors import ConfigError, Unsupported


def states(dtype=torch.float16, tokens=2048):
    return torch.randn(1, 4, tokens, 128, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_the_headline_of_nsn():
    """3.1406 bits and 5.09x at 3 bits, 2048 tokens, head_dim 128 (nsn's README)."""
    x = states()
    packed = kvq.PackedTensor.from_full_precision(x)
    assert packed.bits_per_element == pytest.approx(3.140625)
    assert x.numel() * 2 / packed.nbytes == pytest.approx(5.09, abs=0.005)
    out = packed.to_full_precision()
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    norms = [torch.linalg.vector_norm(t.float(), dim=-1) for t in (x, out)]
    assert torch.allclose(*norms, rtol=2e-3)


def test_it_is_the_codec_of_the_side():
    x = states(torch.float32, 64)
    method = kvq.build_method("kivi", bits="k4v2", head_dim=128)
    for side in ("key", "value"):
        packed = kvq.PackedTensor.from_full_precision(x, method, side=side)
        codec = getattr(method, side)
        assert torch.equal(packed.to_full_precision(), codec.decode(codec.encode(x)))
    low, high = (kvq.PackedTensor.from_full_precision(x, "kivi", "k4v2", side).nbytes for side in ("value", "key"))
    assert low < high


def test_what_cannot_be_packed():
    with pytest.raises(ConfigError, match="side=keys: key or value"):
        kvq.PackedTensor.from_full_precision(states(tokens=4), side="keys")
    with pytest.raises(Unsupported, match="fp16: its keys stay in full precision"):
        kvq.PackedTensor.from_full_precision(states(tokens=4), "fp16")
    with pytest.raises(Unsupported, match="nsn does 2 to 8 bits"):
        kvq.PackedTensor.from_full_precision(states(tokens=4), bits=1)


_COMPILED = """
import torch, kvq
x = torch.randn(1, 2, 256, 128, generator=torch.Generator().manual_seed(3)).half()
for name in ("nsn", "kivi", "oscar"):
    packed = kvq.PackedTensor.from_full_precision(x, name)
    torch.testing.assert_close(packed.to_full_precision_compiled(), packed.to_full_precision(), rtol=2e-3, atol=2e-3)
    print(name)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_decoding_is_the_same_up_to_rounding():
    # In a process of its own: the compiler cannot trace the type checks that tests switch on.
    done = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["nsn", "kivi", "oscar"], done.stderr


def test_the_dead_ends_of_nsn_run_and_cost_what_they_say():
    x = states(tokens=1024)
    plain = kvq.PackedTensor.from_full_precision(x).bits_per_element
    assert kvq.PackedTensor.from_full_precision(x, "nsn/walsh_hadamard").bits_per_element == plain
    mixed = kvq.PackedTensor.from_full_precision(x, "nsn/top_k_mixed").bits_per_element
    # 8 of 128 channels have 5 more bits; the mask is one bit per channel and block.
    assert mixed == pytest.approx(plain + 5 * 8 / 128 + 1 / 1024)
