"""Bytes of a block of nsn's codec, as its README prints them."""

import pytest
import torch

import kvq


def states(tokens=2048):
    return torch.randn(1, 4, tokens, 128, generator=torch.Generator().manual_seed(3)).half()


def test_the_headline_of_nsn():
    """3.1406 bits and 5.09x at 3 bits, 2048 tokens, head_dim 128 (nsn's README)."""
    x, codec = states(), kvq.build_method("nsn", 3).key
    packed = codec.encode(x)
    assert packed.bits_per_element == pytest.approx(3.140625)
    assert x.numel() * 2 / packed.nbytes == pytest.approx(5.09, abs=0.005)
    out = codec.decode(packed)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    norms = [torch.linalg.vector_norm(t.float(), dim=-1) for t in (x, out)]
    assert torch.allclose(*norms, rtol=2e-3)


def test_the_dead_ends_of_nsn_run_and_cost_what_they_say():
    x = states(tokens=1024)
    plain, hadamard, mixed = (
        kvq.build_method(name, 3).key.encode(x).bits_per_element
        for name in ("nsn", "nsn/walsh_hadamard", "nsn/top_k_mixed")
    )
    assert hadamard == plain
    # 8 of 128 channels have 5 more bits; the mask is one bit per channel and block.
    assert mixed == pytest.approx(plain + 5 * 8 / 128 + 1 / 1024)
