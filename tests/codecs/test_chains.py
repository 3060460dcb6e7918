"""The methods' codecs against straight re-implementations of their definitions, in fp64."""

import numpy as np
import pytest
import torch

import kvq
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
