"""Side information in a few bits: codes, steps and bytes by their definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.codecs import DoubleQuant
from tests.codecs.oracles import stored


def naive(x, bits, axis, size, signed):
    """Group by group, number by number."""
    out = np.zeros_like(x)
    top = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    rows, columns = x.shape
    along = rows if axis == "per_channel" else columns
    size = size or along
    for line in range(columns if axis == "per_channel" else rows):
        for start in range(0, along, size):
            span = slice(start, min(start + size, along))
            where = (span, line) if axis == "per_channel" else (line, span)
            step = max(abs(v) for v in x[where]) / top
            codes = [round(v / step) if step else 0 for v in x[where]]
            if not signed:
                codes = [0 if v == 0 else max(code, 1) for v, code in zip(x[where], codes, strict=True)]
            out[where] = [code * stored(step) for code in codes]
    return out


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    bits=st.integers(2, 9),
    axis=st.sampled_from(["per_channel", "per_token"]),
    size=st.one_of(st.none(), st.integers(1, 9)),
    signed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_its_definition(rows, columns, bits, axis, size, signed, seed):
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x if signed else x.abs()
    x[..., ::3] = 0
    quant = DoubleQuant(bits, axis, size, signed)
    parts = quant.encode(x)
    out = quant.decode(parts, rows, columns, torch.float64)
    for got, given_ in zip(out, x, strict=True):
        np.testing.assert_allclose(got.numpy(), naive(given_.numpy(), bits, axis, size, signed), atol=1e-12)
    assert parts["step"].dtype is torch.float16


def test_bytes_of_nsnquants_two():
    """s1: 64 scales in 32 bytes and one step; o: 128 means in 64 bytes and four steps."""
    scales = DoubleQuant(4, "per_channel").encode(torch.rand(64, 1))
    means = DoubleQuant(4, "per_token", 32, signed=True).encode(torch.randn(1, 128))
    for parts, codes, steps in ((scales, (32, 1), (1, 1)), (means, (1, 64), (1, 4))):
        assert {name: tuple(part.shape) for name, part in parts.items()} == {"codes.0": codes, "step": steps}
        assert parts["codes.0"].dtype is torch.uint8


def test_a_small_scale_never_becomes_zero():
    x = torch.tensor([[100.0], [1e-3], [0.0]])
    quant = DoubleQuant(4, "per_channel")
    out = quant.decode(quant.encode(x), 3, 1, torch.float64).flatten()
    assert out[0] == pytest.approx(100, rel=1e-3)
    assert out[1] == pytest.approx(100 / 15, rel=1e-3)
    assert out[2] == 0
