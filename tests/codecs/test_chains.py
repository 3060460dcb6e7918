"""The methods' codecs against straight re-implementations of their definitions, in fp64."""

import numpy as np
import pytest
import torch

import kvq
from kvq.codecs import rope_table
from tests.calibrated import build
from tests.codecs import oracles
from tests.codecs.oracles import FP16, Grid, block

TOKENS, DIM = 40, 32
"""40 tokens: a short last group of 8."""


def reconstructed(name, side, x, bits, overrides=()):
    method = kvq.build_method(name, bits=bits, head_dim=x.shape[-1], overrides=list(overrides))
    codec = getattr(method, side)
    return codec.decode(codec.encode(x))[0].numpy()


def states(heads=2, tokens=TOKENS, dim=DIM, seed=0):
    x = block(heads, tokens, dim, seed)
    return x, x[0].numpy()


def test_kivi_in_nsnquants_setting():
    x, x64 = states(tokens=80, dim=256)
    keys = oracles.quantize(x64, Grid(2, "per_channel", 64)).values
    values = oracles.quantize(x64, Grid(2, "per_token", 128)).values
    np.testing.assert_allclose(reconstructed("kivi/nsnquant_setting", "key", x, 2), keys, atol=1e-12)
    np.testing.assert_allclose(reconstructed("kivi/nsnquant_setting", "value", x, 2), values, atol=1e-12)


def test_kivi_had():
    x, x64 = states()
    keys = oracles.rotated(x64, Grid(3, "per_channel", 32))
    values = oracles.rotated(x64, Grid(3, "per_token", 32))
    np.testing.assert_allclose(reconstructed("kivi_had", "key", x, 3), keys, atol=1e-9)
    np.testing.assert_allclose(reconstructed("kivi_had", "value", x, 3), values, atol=1e-9)


@pytest.mark.parametrize("side", ["key", "value"])
def test_arms_of_nsn(side):
    x, x64 = states()
    exact = {
        "a": oracles.quantize(x64, Grid(3, "per_token", symmetric=True)).values,
        "b": oracles.quantize(x64, Grid(3, "per_channel")).values,
        "c": oracles.nsn(x64, 3, symmetric=True),
        "d": oracles.nsn(x64, 3),
    }
    for arm, expected in exact.items():
        out = reconstructed(f"nsn/arm_{arm}", side, x, 3)
        np.testing.assert_allclose(out, expected, rtol=1.01 * FP16 if arm in "cd" else 0, atol=1e-9, err_msg=arm)


@pytest.mark.parametrize(
    ("name", "scope", "zero_point"),
    [("oscar", "head", "float"), ("oscar/token_scope", "token", "float"), ("oscar/released", "token", "integer")],
)
def test_oscar(name, scope, zero_point):
    x, x64 = states(heads=3)
    keys = oracles.oscar_keys(x64, 2, 32, scope, zero_point)
    values = oracles.rotated(x64, Grid(2, "per_token", 32, zero_point=zero_point))
    np.testing.assert_allclose(reconstructed(name, "key", x, 2), keys, atol=1e-9)
    np.testing.assert_allclose(reconstructed(name, "value", x, 2), values, atol=1e-9)


def test_scales_in_bf16_have_the_codes_of_those_in_fp16():
    """Codes are chosen by unrounded statistics; what is stored differs by the rounding of 8 bits and of 11."""
    x, _ = states()
    plain, rounded_to = (kvq.build_method(name, bits=3, head_dim=DIM) for name in ("oscar", "oscar/bf16_scales"))
    fine, coarse = plain.key.encode(x).parts, rounded_to.key.encode(x).parts
    assert fine.keys() == coarse.keys()
    for name, part in fine.items():
        rounded = name in ("scale", "zero_point")
        assert coarse[name].dtype == (torch.bfloat16 if rounded else part.dtype)
        torch.testing.assert_close(coarse[name].to(part.dtype), part, rtol=2**-8 if rounded else 0, atol=0)


def test_oscars_ablations():
    x, x64 = states()

    def keys(ablation):
        return reconstructed(f"oscar/{ablation}", "key", x, 3)

    np.testing.assert_allclose(keys("cr_only"), oracles.rotated(x64, Grid(3, "per_channel", 32)), atol=1e-9)
    norm = np.sqrt((x64**2).sum(-1, keepdims=True))
    scaled = oracles.quantize(x64 / norm, Grid(3, "per_channel", 32)).values * np.vectorize(oracles.stored)(norm)
    np.testing.assert_allclose(keys("ots_only"), scaled, atol=1e-9)
    np.testing.assert_allclose(keys("swapped_order"), reconstructed("oscar", "key", x, 3), atol=1e-9)
    plain = oracles.quantize(x64, Grid(3, "per_token", 32)).values
    for name in ("ots_only", "values_without_hadamard"):
        np.testing.assert_allclose(reconstructed(f"oscar/{name}", "value", x, 3), plain, atol=1e-12)


HEADS = 8


def bits_of(name, bits, tokens=256, block=None, dtype=torch.float32):
    """Measured bits per element of keys and of values."""
    x = torch.randn(1, HEADS, tokens, 128, generator=torch.Generator().manual_seed(0), dtype=dtype)
    rope, method = rope_table(tokens, 128), build(name, x, bits)
    return tuple(codec.encode(x, block, rope).bits_per_element for codec in (method.key, method.value))


NORM, MASK = 16 / 128, 1 / 128
"""A number in 16 bits for each head and token; a bit for each channel of a block of 128 tokens."""
NSNQUANT = 4 / 128 + 4 / 64 + 5 * 16 / (128 * 64) + NORM
"""Of a block of 64: 4 bits for each token's first norm and each channel's mean, 1 + 4 steps; the second norm."""
FIXED = [
    ("kivi/nsnquant_setting", 2, 2 + 32 / 64, 2 + 32 / 128),
    ("kivi", 2, 3.0, 3.0),
    ("kivi", 4, 5.0, 5.0),
    ("kivi_had", 3, 4.0, 4.0),
    ("quarot", 2, 2.25, 2.25),
    ("quarot", 4, 4.25, 4.25),
    ("quarot", "k3v2", 3.25, 2.25),
    ("oscar", 2, 3.125, 3.0),
    ("oscar", 3, 4.125, 4.0),
    ("oscar/token_scope", 2, 3 + NORM / HEADS, 3.0),
    ("oscar/released", 2, 3 + NORM / HEADS, 3.0),
    ("oscar/cr_only", 2, 3.0, 3.0),
    ("oscar/ots_only", 2, 3.125, 3.0),
    ("oscar/swapped_order", 2, 3.125, 3.0),
    ("oscar/bf16_scales", 2, 3.125, 3.0),
    ("oscar/values_without_hadamard", 2, 3.125, 3.0),
    ("rtn", 2, 2.25, 2.25),
    ("rtn", 16, 16.25, 16.25),
    ("identity", 2, 32.0, 32.0),
    ("zero", 2, 0.0, 0.0),
    ("q8_0", 2, 8.5, 8.5),
    ("q4_0", 16, 4.5, 4.5),
    ("polarquant", 2, 3.875, 3.875),
    ("cq", 2, 2.25, 2.25),
    ("cq/8c10b", 2, 1.25, 1.25),
    ("spinquant", 2, 2.25, 2.25),
    ("rotatekv", 3, 3.25, 3.25),
    *((f"turboquant{name}", 3, 3 + NORM, 3 + NORM) for name in ("", "/norm", "/parallel", "/hadamard", "_plus")),
    *((f"turboquant/{name}", 2, 2 + 2 * NORM, 2 + 2 * NORM) for name in ("prod", "prod_orthogonal")),
    ("turboquant/prod_keys", 3, 3 + 2 * NORM, 3 + NORM),
]
"""Whatever the block."""


@pytest.mark.parametrize(("name", "bits", "keys", "values"), FIXED)
def test_fixed_groups(name, bits, keys, values):
    assert bits_of(name, bits, block=128) == (keys, values)


@pytest.mark.parametrize(
    ("name", "bits", "block", "keys", "values"),
    [
        ("fp8", 2, 128, *[8 + 16 / (HEADS * 128 * 128)] * 2),
        ("nsn", 3, 64, 3.625, 3.625),
        ("nsn", 3, 128, 3.375, 3.375),
        *(
            (f"nsnquant{name}", 2, 64, *[2 + NSNQUANT] * 2)
            for name in ("", "/kmeans", "/e8p", "/post_rope", "/no_gain")
        ),
        *((f"nsnquant/{name}", 2, 64, *[2 + NSNQUANT] * 2) for name in ("no_hadamard", "rht", "weiszfeld", "no_norm2")),
        *((f"nsnquant/{name}", 2, 64, *[2 + 2 * NORM + 16 / 64] * 2) for name in ("no_dq", "dq_codebook")),
        ("nsnquant/dq_mean", 2, 64, *[2 + 2 * NORM + 4 / 64 + 4 * 16 / (128 * 64)] * 2),
        ("nsnquant/channel_scale", 2, 64, *[2 + NSNQUANT + 16 / 64] * 2),
        # 32 channels at a bit more, two norms.
        ("turboquant/outliers", 2, 128, *[2.25 + 2 * NORM + MASK] * 2),
        ("turboquant/outliers", 3, 128, *[3.25 + 2 * NORM + MASK] * 2),
        # A quarter of the channels at a bit more, the others at one less.
        *(
            ("kvquant_plus_plus/outliers", bits, 128, *[codes + 2 * NORM] * 2)
            for bits, codes in ((1, 1.25), (2, 1.5), (3, 2.5), (4, 3.25))
        ),
        *((f"kvquant_plus_plus/low_rank{name}", 2, 128, *[2 + NORM + 1] * 2) for name in ("", "_exact")),
        ("kvquant_plus_plus/low_rank_8", 2, 128, *[2 + NORM + 2] * 2),
        # Rank 4, the two extremes of a channel, and 2% of all heads' channels of a token.
        ("gear", 2, 256, *(2.5 + 16 * 4 * 384 / (256 * 128) + 32 * out for out in (6 / 256, 20 / 1024))),
        ("kvarn", 2, 128, 4.375, 2.375),
        ("kvarn/k4v4_g128", 2, 128, 4.375, 4.375),
        ("kvarn/k4v2_g64", 2, 64, 4.625, 2.5),
        ("kvarn/k4v4_g64", 2, 64, 4.625, 4.5),
        ("kvarn/mla_k5_g64", 2, 64, 5 + NORM + 32 / 64, 32.0),
        ("kvarn/paper", 2, 128, 2.375, 2.375),
        ("kitty", 2, 128, 2 + 2 * NORM + 32 / 128 + 8 / 128, 2.25),
        ("kitty/boost_32", 2, 128, 2.8125, 2.25),
        ("kitty/kernel", 2, 128, 2.5625, 2.25),
    ],
)
def test_blocks(name, bits, block, keys, values):
    assert bits_of(name, bits, block=block) == pytest.approx((keys, values), abs=1e-12)


@pytest.mark.parametrize(("chunk", "printed"), [(32, 0.30), (64, 0.23), (128, 0.19)])
def test_nsnquants_bits_by_residual(chunk, printed):
    """Table 7 prints 2.30, 2.23, 2.19 and 1.30, 1.23, 1.19; Table 11's third row 2.33, where the arithmetic is 2.32."""
    extra = 4 / 128 + 4 / chunk + 5 * 16 / (128 * chunk) + NORM
    assert [bits_of("nsnquant", bits, 2 * chunk, chunk) for bits in (1, 2)] == [(1 + extra,) * 2, (2 + extra,) * 2]
    assert round(extra, 2) == printed


def test_nsn_at_2048_tokens_in_one_block():
    """3.1406 bits and 5.09x; its dead ends by its README: 8 of 128 channels have 5 more bits, and a mask."""
    assert bits_of("nsn", 3, 2048) == (402 / 128, 402 / 128)
    assert bits_of("nsn/walsh_hadamard", 3, 2048) == (402 / 128, 402 / 128)
    assert bits_of("nsn/top_k_mixed", 3, 1024)[0] == bits_of("nsn", 3, 1024)[0] + 5 * 8 / 128 + 1 / 1024
    method = kvq.build_method("nsn", bits=3)
    x = torch.zeros(1, HEADS, 2048, 128, dtype=torch.float16)
    full = x.numel() * x.element_size()
    assert full / method.key.encode(x).nbytes == pytest.approx(5.09, abs=0.005)


@pytest.mark.parametrize("tokens", [64, 2048])
@pytest.mark.parametrize(
    ("norm", "axis", "grid"),
    [(n, a, g) for n in ("norm", "nonorm") for a in ("per_channel", "per_token") for g in ("asym", "sym")],
)
def test_every_ingredient_of_nsn_has_its_price(norm, axis, grid, tokens):
    """A norm per head and token, and one statistic or two per channel of the block or per token of the head."""
    statistics = 16 if grid == "sym" else 32
    expected = 3 + (NORM if norm == "norm" else 0) + statistics / (tokens if axis == "per_channel" else 128)
    assert bits_of(f"nsn/{norm}_{axis}_{grid}", 3, tokens) == pytest.approx((expected, expected), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bits_do_not_depend_on_the_models_dtype(dtype):
    assert bits_of("oscar", 2, 128, dtype=dtype) == (3.125, 3.0)
    assert bits_of("identity", 2, 128, dtype=dtype) == (8.0 * dtype.itemsize,) * 2


def test_bits_of_blocks_add_up():
    """100 tokens in blocks of 32: three full ones, and a short one of 4 with statistics of its own."""
    (keys, _) = bits_of("nsn", 3, 100, block=32)
    planes = 3 * (8 + 4) + (1 + 1)  # rows of the 2-bit and the 1-bit plane
    assert keys * 100 * 128 / 8 == planes * 128 + 4 * 128 * 4 + 100 * 2
