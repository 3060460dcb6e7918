"""UniformQuantizer against a loop-based oracle written from its definition."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.codecs import ClippedQuantizer, Codec, UniformQuantizer, plane_widths, unpack
from tests.codecs.oracles import FP16, Grid, block, quantize, stored
from tests.properties import examples

KINDS = {torch.float32: np.float32, torch.float64: np.float64}


@st.composite
def grids(draw, low_bits=1, high_bits=16):
    symmetric = draw(st.booleans())
    return Grid(
        bits=draw(st.integers(max(low_bits, 2 if symmetric else 1), high_bits)),
        axis=draw(st.sampled_from(["per_channel", "per_token"])),
        group_size=draw(st.one_of(st.none(), st.integers(1, 9), st.just(100))),
        symmetric=symmetric,
        zero_point=draw(st.sampled_from(["float", "integer"])),
        clip=draw(st.sampled_from([1.0, 0.95, 0.5])),
    )


SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 20), st.integers(1, 12))


def quantizer(grid):
    return UniformQuantizer(**dataclasses.asdict(grid))


def codec(grid):
    return Codec({}, [], quantizer(grid))


@settings(max_examples=examples(150))
@given(grid=grids(), shape=SHAPES, dtype=st.sampled_from(list(KINDS)), seed=st.integers(0, 99))
def test_codes_and_values_are_the_oracles(grid, shape, dtype, seed):
    """fp32 input is quantized in fp32, fp64 in fp64; codes from unrounded statistics, values from stored fp16 ones."""
    x = block(*shape, seed=seed, dtype=dtype)
    expected = quantize(x[0].numpy(), grid, KINDS[dtype])
    packed = codec(grid).encode(x)
    planes = [packed.parts[f"codes.{i}"] for i in range(len(plane_widths(grid.bits)))]
    codes = unpack(planes, grid.bits, shape[1])[0]
    out = codec(grid).decode(packed)[0].double()
    # Groups too narrow for an integer zero point (constant ones are) have tests of their own.
    defined = ~np.isnan(expected.values)
    if grid.zero_point == "integer" and not grid.symmetric:
        defined &= expected.step != 0
    coded = torch.from_numpy(defined & (expected.step != 0))
    assert torch.equal(codes.long()[coded], torch.from_numpy(expected.codes)[coded])
    rounding = 1e-12 if dtype is torch.float64 else 1e-6 * float(x.abs().max())
    assert out[defined].numpy() == pytest.approx(expected.values[defined], rel=0, abs=rounding)


@given(grid=grids(), shape=SHAPES)
def test_stored_bytes(grid, shape):
    """Codes take `ceil(tokens * width / 8)` bytes per plane and channel, a statistic two bytes per group."""
    heads, tokens, dim = shape
    packed = codec(grid).encode(block(*shape))
    along, lines = (tokens, dim) if grid.axis == "per_channel" else (dim, tokens)
    groups = heads * lines * math.ceil(along / (grid.group_size or along))
    codes = heads * dim * sum(math.ceil(tokens * width / 8) for width in plane_widths(grid.bits))
    assert packed.nbytes == codes + groups * 2 * (1 if grid.symmetric else 2)
    kinds = {name: part.dtype for name, part in packed.parts.items() if not name.startswith("codes")}
    zero = torch.int16 if grid.zero_point == "integer" else torch.float16
    assert kinds == {"scale": torch.float16} | ({} if grid.symmetric else {"zero_point": zero})


@pytest.mark.parametrize("grid", [Grid(b, a, 4, s, z) for b in (2, 4, 9) for a in ("per_channel", "per_token")
                                  for s, z in ((False, "float"), (False, "integer"), (True, "float"))])  # fmt: skip
@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 0.001, -0.0005, 1e-6, 77.7, 60000.0, -1e-9])
def test_a_constant_group_decodes_to_its_stored_value(grid, value):
    x = torch.full((1, 2, 6, 6), value)
    out = codec(grid).decode(codec(grid).encode(x))
    if grid.symmetric:
        half = 2 ** (grid.bits - 1) - 1
        expected = math.copysign(stored(abs(value) / half) * half, value)
    else:
        expected = stored(value)
    # An integer zero point holds 15 bits of the value, more than the 11 of fp16.
    loose = {"rel": FP16, "abs": 2.0**-25} if grid.zero_point == "integer" else {"rel": 1e-6, "abs": 1e-12}
    assert out.flatten().tolist() == pytest.approx([expected] * x.numel(), **loose)


@pytest.mark.parametrize("zero_point", ["float", "integer"])
@pytest.mark.parametrize("bits", [2, 8, 16])
@pytest.mark.parametrize("low", [0.0005, 0.25, -30.0, 5e4])
def test_a_narrow_group_far_from_zero_stays_near_it(zero_point, bits, low):
    """Only the last bit of fp32 differs within a group: an integer zero point of 16 bits has to coarsen the scale."""
    x = torch.full((1, 1, 8, 4), low)
    x[..., ::2, :] = torch.nextafter(x[..., ::2, :], torch.tensor(1e6))
    coder = codec(Grid(bits, "per_channel", 4, zero_point=zero_point))
    out = coder.decode(coder.encode(x))
    torch.testing.assert_close(out, x, rtol=2e-3 if abs(low) > 0.01 else 5e-3, atol=0)


@settings(max_examples=examples(60))
@given(grid=grids(), size=st.sampled_from([1e4, 1e5, 3e38]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_huge_values_stay_finite(grid, size, dtype):
    x = block(2, 9, 8, dtype=torch.float64)
    x = (x / x.abs().max() * size).to(dtype)
    packed = codec(grid).encode(x)
    assert all(bool(torch.isfinite(part).all()) for part in packed.parts.values() if part.is_floating_point())
    assert bool(torch.isfinite(codec(grid).decode(packed)).all())


@given(grid=grids())
def test_the_whole_range_of_fp16_stays_finite(grid):
    """Stored statistics round up: the top code of a group that ends at 65504 must not become infinite."""
    x = torch.tensor([-65504.0, 65504.0, 1.0, 65503.0]).expand(1, 1, 4, 4).half()
    x = torch.cat([x, x.mT], -2)
    assert bool(torch.isfinite(codec(grid).decode(codec(grid).encode(x))).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_clipped_grid_is_the_uniform_oracle(bits: int) -> None:
    x = block(2, 9, 128, seed=bits)
    for zero_point in ("float", "integer"):
        quantizer = ClippedQuantizer(bits, zero_point=zero_point)
        grid = Grid(bits, "per_token", 128, zero_point=zero_point, clip=0.8 if bits == 2 else 1.0)
        found = quantizer.decode(quantizer.encode(x, x.dtype), x.shape, x.dtype)[0]
        np.testing.assert_allclose(found, quantize(x[0].numpy(), grid).values, rtol=1e-12, atol=1e-12)
