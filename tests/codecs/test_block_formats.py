"""q8_0, q4_0 and fp8 against oracles that go one value at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.codecs import Float8Quantizer, HalfAwayQuantizer, SignedMaxQuantizer, unpack
from kvq.methods.build import build_method
from tests.codecs.oracles import block, stored
from tests.properties import examples


def codec(name, dim=128):
    return build_method(name, head_dim=dim).key


def decoded(name, x):
    one = codec(name, x.shape[-1])
    return one.decode(one.encode(x))


def signed_max(x, bits, group):
    """Codes and reconstruction of `[heads, tokens, dim]`, from the definition."""
    codes, values = np.zeros(x.shape, int), np.zeros(x.shape)
    for head, token in np.ndindex(x.shape[:2]):
        for start in range(0, x.shape[2], group):
            span = [float(v) for v in x[head, token, start : start + group]]
            largest = max(span, key=abs)  # the first of them, as max gives it
            step = -largest / 2 ** (bits - 1)
            for offset, v in enumerate(span):
                code = math.floor(v / step + 2 ** (bits - 1) + 0.5) if step else 2 ** (bits - 1)
                code = min(max(code, 0), 2**bits - 1)
                codes[head, token, start + offset] = code
                values[head, token, start + offset] = stored(step) * (code - 2 ** (bits - 1))
    return codes, values


def e4m3_numbers():
    """All finite numbers of e4m3: bias 7, subnormals of 2^-9, and no infinities, so that 448 is the largest."""
    positive = [m * 2.0**-9 for m in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return np.array(sorted({*positive, *(-v for v in positive)}))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (5, 32), (2, 8), (3, None), (8, 16), (10, 32)])
@pytest.mark.parametrize("shape", [(2, 5, 64), (1, 3, 40), (1, 1, 8)])
def test_signed_scale_is_the_oracles(bits, group, shape):
    x = block(*shape, seed=bits)
    quantizer = SignedMaxQuantizer(bits, group)
    parts = quantizer.encode(x, x.dtype)
    codes, values = signed_max(x[0].numpy(), bits, group or shape[2])
    planes = [part for name, part in parts.items() if name.startswith("codes.")]
    assert torch.equal(unpack(planes, bits, shape[1])[0].long(), torch.from_numpy(codes))
    np.testing.assert_allclose(quantizer.decode(parts, x.shape, x.dtype)[0], values, rtol=1e-12)


@settings(max_examples=examples(20))
@given(
    heads=st.integers(1, 3), tokens=st.integers(1, 9), dim=st.sampled_from([8, 32, 80, 128]), seed=st.integers(0, 99)
)
def test_fp8_takes_the_nearest_number_of_its_format(heads, tokens, dim, seed):
    x = block(heads, tokens, dim, seed=seed, dtype=torch.float32)
    parts = Float8Quantizer().encode(x, x.dtype)
    assert parts["values"].dtype is torch.float8_e4m3fn
    scale = np.float32(x.abs().max()) / np.float32(448)
    wanted = x[0].numpy() / scale
    numbers = e4m3_numbers()
    nearest = np.abs(wanted[..., None] - numbers).min(-1)
    got = parts["values"][0].float().numpy()
    assert np.isin(got, numbers).all()
    np.testing.assert_allclose(np.abs(wanted - got), nearest, atol=1e-4)
    out = Float8Quantizer().decode(parts, x.shape, x.dtype)
    np.testing.assert_allclose(out[0], got * stored(scale), rtol=1e-6)


def roundf(x):
    """C's: halves away from zero. A float plus 1/2 is exact in double precision."""
    return math.copysign(math.floor(abs(float(x)) + 0.5), float(x))


def q8_0_codes(x):
    """Codes of `[heads, tokens, dim]` in single precision, one value at a time: x times the reciprocal of the scale."""
    codes = np.zeros(x.shape, int)
    for head, token in np.ndindex(x.shape[:2]):
        for start in range(0, x.shape[2], 32):
            span = x[head, token, start : start + 32]
            step = np.float32(max(abs(v) for v in span)) / np.float32(127)
            inverse = np.float32(1) / step if step else np.float32(0)
            codes[head, token, start : start + 32] = [roundf(v * inverse) for v in span]
    return codes


@pytest.mark.parametrize("step", [1.0, 2.0**-7, 2.0**9])
def test_q8_0_rounds_halves_away_from_zero_as_ggml(step):
    """Ties on both sides of zero, the largest number below a tie, and values that hit none."""
    ties = np.arange(-126.5, 127, 1, dtype=np.float32)
    below = np.nextafter(ties, np.float32(0))
    x = np.zeros((1, 32, 32), np.float32)
    x[0, :, 0] = 127
    x[0, :8, 1:] = np.append(ties, below)[:248].reshape(8, 31)
    x[0, 8:17, 1:] = np.append(ties, below)[-279:].reshape(9, 31)
    x[0, 17:, 1:] = np.random.default_rng(0).uniform(-127, 127, (15, 31))
    x[0, -1] = 0
    x *= np.float32(step)
    parts = HalfAwayQuantizer(8, 32).encode(torch.from_numpy(x)[None], torch.float32)
    found = unpack([parts["codes.0"]], 8, 32)[0].long().numpy() - 127
    assert np.array_equal(found, q8_0_codes(x))
    assert (found[0, :8, 1:].ravel()[:3] == [-127, -126, -125]).all()
    assert parts["scale"].flatten().tolist() == [step] * 31 + [0]


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4])
def test_q8_0_codes_are_ggmls(scale):
    x = (block(2, 20, 128, dtype=torch.float32) * scale).numpy()
    found = unpack([HalfAwayQuantizer(8, 32).encode(torch.from_numpy(x), torch.float32)["codes.0"]], 8, 20)
    assert np.array_equal(found[0].long().numpy() - 127, q8_0_codes(x[0]))


def test_ties_go_up_as_in_ggml():
    x = torch.zeros(1, 1, 1, 32)
    x[..., :6] = torch.tensor([8.0, 0.5, 1.5, -0.5, -7.5, -8.0])  # d = -1
    codes = unpack(list(SignedMaxQuantizer(4, 32).encode(x, x.dtype).values())[:1], 4, 1)
    assert codes.flatten()[:7].tolist() == [0, 8, 7, 9, 15, 15, 8]
    assert decoded("q4_0", x).flatten()[:6].tolist() == [8, 0, 1, -1, -7, -7]
