"""q8_0, q4_0 and fp8 against oracles that go one value at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.codecs import Float8Quantizer, HalfAwayQuantizer, PackedStore, SignedMaxQuantizer, unpack
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from tests.codecs.oracles import FP16, Grid, block, quantize, stored
from tests.properties import examples

NAMES = ["q8_0", "q4_0", "fp8"]
# 8 bits: half a step of 1/127; 4 bits: one step of 1/8, because the side opposite to the largest value ends at 7; e4m3:
# half a unit of the last of 3 mantissa bits. All of the group's largest magnitude, and twice the rounding of the scale.
WORST = {"q8_0": 0.5 / 127, "q4_0": 1 / 8, "fp8": 1 / 16}


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


def test_q8_0_is_the_symmetric_oracle():
    x = block(2, 5, 128)
    expected = quantize(x[0].numpy(), Grid(8, "per_token", 32, symmetric=True)).values
    np.testing.assert_allclose(decoded("q8_0", x)[0], expected, rtol=1e-12)


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


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bits_are_the_closed_forms(dim, dtype):
    heads, tokens = 4, 16
    x = block(heads, tokens, dim, dtype=dtype)
    bits = {name: codec(name, dim).encode(x).bits_per_element for name in NAMES}
    assert bits == {"q8_0": 8.5, "q4_0": 4.5, "fp8": 8 + 16 / (heads * tokens * dim)}
    assert codec("fp8", dim).encode(x, 4).bits_per_element == 8 + 16 / (heads * 4 * dim)


def test_a_short_last_group_pays_for_its_own_scale():
    x = block(1, 8, 80)
    assert codec("q4_0", 80).encode(x).bits_per_element == 4 + 3 * 16 / 80
    assert codec("q8_0", 80).encode(x).bits_per_element == 8 + 3 * 16 / 80


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_fixed(name):
    assert [build_method(name, bits=bits).bits for bits in (2, "k3v2", 16)] == [None] * 3
    x = block(1, 4, 128)
    assert len({build_method(name, bits=bits).key.encode(x).nbytes for bits in (2, 3, 16)}) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_zeros_stay_zeros_and_huge_values_finite(name, dtype):
    x = block(2, 6, 64, dtype=dtype)
    assert not decoded(name, torch.zeros_like(x)).any()
    mixed = x.clone()
    mixed[:, :, 2] = 0
    assert not decoded(name, mixed)[:, :, 2].any()
    top = 65504.0 if dtype is torch.float16 else 3e38
    for size in (1e-30, 1e-7, 1e4, top):
        out = decoded(name, (x.double().clamp(-1, 1) * size).to(dtype))
        assert torch.isfinite(out).all()
    huge = torch.full((1, 1, 2, 64), 65504.0, dtype=torch.float32)
    np.testing.assert_allclose(decoded(name, huge), huge, rtol=2 * FP16)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(25))
@given(dim=st.sampled_from([8, 32, 64, 80, 128]), tokens=st.integers(1, 20), seed=st.integers(0, 999))
def test_the_error_stays_within_a_step(name, dim, tokens, seed):
    x = block(2, tokens, dim, seed=seed)
    error = (decoded(name, x) - x).abs()
    top = x.abs()
    if name == "fp8":
        bound = WORST[name] * top + 2.0**-10 * x.abs().max() / 448
    else:
        bound = torch.cat([g.amax(-1, keepdim=True).expand_as(g) for g in top.split(32, -1)], -1) * WORST[name]
    # The scale is 2^-25 off where fp16 keeps it as a subnormal number.
    assert bool((error <= bound * (1 + 1e-9) + 2 * FP16 * top.amax() + 2.0**-25 * 448).all())


def test_error_order_on_gaussian_data():
    x = torch.randn(1, 8, 256, 128, generator=torch.Generator().manual_seed(0))
    error = {name: float((decoded(name, x) - x).norm() / x.norm()) for name in NAMES}
    assert 3 * error["q8_0"] < error["fp8"] < error["q4_0"] / 2
    # Uniform errors of one step, and steps of 1/127 of the largest of 32 magnitudes.
    largest = float(x.unflatten(-1, (-1, 32)).abs().amax(-1).square().mean().sqrt())
    assert error["q8_0"] == pytest.approx(largest / 127 / math.sqrt(12), rel=0.02)


def test_fp8_has_a_scale_per_sequence_and_block():
    x = block(2, 12, 32).repeat(2, 1, 1, 1)
    x[1] *= 100
    packed = codec("fp8", 32).encode(x, 4)
    assert packed.parts["scale"].shape == (2, 1, 3, 1)
    assert torch.equal(codec("fp8", 32).decode(packed)[:1], decoded_in_blocks(x[:1]))


def decoded_in_blocks(x):
    one = codec("fp8", x.shape[-1])
    return torch.cat([one.decode(one.encode(piece)) for piece in x.split(4, 2)], 2)


@pytest.mark.parametrize("name", NAMES)
def test_it_grows_forks_and_is_reordered_as_a_cache_does(name):
    x = block(2, 12, 64, dtype=torch.float32).repeat(3, 1, 1, 1) * torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    one = codec(name, 64)
    store = PackedStore(one.encode(x[:, :, :4], 4))
    fork = store.fork()
    store.append(one.encode(x[:, :, 4:], 4))
    assert torch.equal(one.decode(store.packed), one.decode(one.encode(x, 4)))
    assert fork.packed.tokens == 4
    swapped = store.select(torch.tensor([2, 0]))
    assert torch.equal(one.decode(swapped.packed), one.decode(one.encode(x[[2, 0]], 4)))


@pytest.mark.parametrize(
    ("settings_", "error", "says"),
    [
        ({"bits": 1}, Unsupported, "bits=1: a grid with a signed scale has 2 to 16 bits"),
        ({"bits": 17}, Unsupported, "bits=17: "),
        ({"bits": 4, "group_size": 0}, ConfigError, "group_size=0: at least 1"),
    ],
)
def test_bad_settings_are_named_in_one_line(settings_, error, says):
    with pytest.raises(error, match=says) as caught:
        SignedMaxQuantizer(**settings_)
    assert "\n" not in str(caught.value)
