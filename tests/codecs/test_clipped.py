"""RotateKV's quantizer: clipped at 2 bits; and as released, with a rounded zero point and the range over bits² - 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvq.codecs import ClippedQuantizer, unpack
from tests.codecs.oracles import Grid, block, quantize, stored


def released(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of `[heads, tokens, 128]`, a token at a time: step and zero point by bits² - 1, 2^b codes."""
    codes, values = np.zeros(x.shape, int), np.zeros(x.shape)
    for where in np.ndindex(x.shape[:2]):
        clip = 0.8 if bits == 2 else 1.0
        low, high = min(x[where]) * clip, max(x[where]) * clip
        step = (high - low) / (bits**2 - 1)
        zero = round(-low / step)
        for channel, value in enumerate(x[where]):
            code = min(max(round(value / step) + zero, 0), 2**bits - 1)
            codes[(*where, channel)], values[(*where, channel)] = code, stored(step) * (code - zero)
    return codes, values


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_it_is_the_released_codes(bits: int) -> None:
    x = block(2, 9, 128, seed=bits)
    quantizer = ClippedQuantizer(bits, zero_point="integer", step="squared_bits")
    parts = quantizer.encode(x, x.dtype)
    codes, values = released(x[0].numpy(), bits)
    planes = [part for name, part in parts.items() if name.startswith("codes.")]
    assert torch.equal(unpack(planes, bits, 9)[0].long(), torch.from_numpy(codes))
    np.testing.assert_allclose(quantizer.decode(parts, x.shape, x.dtype)[0], values, rtol=1e-12)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_by_levels_it_is_the_uniform_oracle(bits: int) -> None:
    x = block(2, 9, 128, seed=bits)
    for zero_point in ("float", "integer"):
        quantizer = ClippedQuantizer(bits, zero_point=zero_point)
        grid = Grid(bits, "per_token", 128, zero_point=zero_point, clip=0.8 if bits == 2 else 1.0)
        found = quantizer.decode(quantizer.encode(x, x.dtype), x.shape, x.dtype)[0]
        np.testing.assert_allclose(found, quantize(x[0].numpy(), grid).values, rtol=1e-12, atol=1e-12)


def test_the_top_of_the_range_is_cut_at_3_bits_alone() -> None:
    x = torch.linspace(0, 1, 128, dtype=torch.float64).expand(1, 1, 1, 128)
    for bits, top in ((3, 7 / 8), (4, 1.0)):
        quantizer = ClippedQuantizer(bits, zero_point="integer", step="squared_bits")
        assert float(quantizer.decode(quantizer.encode(x, x.dtype), x.shape, x.dtype).max()) == pytest.approx(top, 1e-3)


@pytest.mark.parametrize("value", [0.0, 1e-6, -3.0, 700.0])
def test_a_constant_token_stays_near_itself(value: float) -> None:
    x = torch.full((1, 1, 2, 128), value, dtype=torch.float32)
    for bits in (2, 3, 4):
        quantizer = ClippedQuantizer(bits, clip_at_2=1.0, zero_point="integer", step="squared_bits")
        out = quantizer.decode(quantizer.encode(x, x.dtype), x.shape, x.dtype)
        assert torch.allclose(out, x, rtol=2e-3, atol=2.0**-24)
