"""Presets `engine/...` against oracles that go one value at a time, and their bits against closed forms."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from kvq.cache import KVCache
from kvq.codecs import (
    Hadamard,
    RandomizedHadamard,
    UniformQuantizer,
    optimal_levels,
    unpack,
)
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq_zoo.tests import engine_oracles as by
from kvq_zoo.tests import engine_oracles_vllm as vllm
from tests.calibrated import build
from tests.presets import NAMES
from tests.random_models import in_double_precision, llama, token_ids

DIM = 128
PRESETS = [name for name in NAMES if name.startswith("engine/")]
LLAMACPP = {
    "q8_0": by.q8_0,
    "q5_1": by.minimum(5),
    "q5_0": by.signed_max(5),
    "q4_1": by.minimum(4),
    "q4_0": by.signed_max(4),
    "iq4_nl": by.iq4_nl,
}


def both(oracle):
    return {"key": oracle, "value": oracle}


def exllama2(key, value):
    return {
        side: by.rotated(by.by_group(32, by.full_range(bits)), 32, interleaved=True, normalized=False)
        for side, bits in (("key", key), ("value", value))
    }


def values_of(bits):
    return by.by_group(DIM, by.minimum(bits, least=1e-8))


def octave_value(bits):
    return by.signs_first(by.rotated(by.by_group(DIM, vllm.octave(bits)), DIM), 0x5E17, flips=True)


def openvino(bits):
    return by.by_group(DIM, by.ratio(bits, by.f32, by.half_even))


FLT_MIN = float(np.finfo(np.float32).tiny)
OCTAVE_KEYS = by.signs_first(by.rotated(vllm.octave_keys(64), 64), 0x5E17, flips=True)
VLLM_FP8 = both(by.by_group(DIM, by.cast("e4m3")))
INT4 = by.signs_first(by.rotated(by.by_group(DIM, by.zero_in_scale), DIM, normalized=False), 0x9E3779B9)
ORACLES = {
    **{
        f"engine/llamacpp_{name}": {
            side: by.rotated(by.by_group(32, one), n) for side, n in (("key", DIM), ("value", 64))
        }
        for name, one in LLAMACPP.items()
    },
    **{f"engine/llamacpp_{name}/unrotated": both(by.by_group(32, one)) for name, one in LLAMACPP.items()},
    **{
        f"engine/llamacpp_{key}_{value}": {
            "key": by.rotated(by.by_group(32, LLAMACPP[key]), DIM),
            "value": by.rotated(by.by_group(32, LLAMACPP[value]), 64),
        }
        for key, value in (("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q8_0", "q5_1"))
    },
    "engine/ikllama_q6_0": both(by.by_group(32, by.signed_max(6))),
    "engine/mlx": both(by.by_group(64, by.edge(3))),
    **{f"engine/mlx_g{group}": both(by.by_group(group, by.edge(3))) for group in (32, 128)},
    "engine/vllm_fp8": VLLM_FP8,
    "engine/vllm_fp8/fp8_queries": VLLM_FP8,  # and tests/test_query_cast.py
    "engine/vllm_fp8/e5m2": both(by.by_group(DIM, by.cast("e5m2"))),
    "engine/vllm_int8_per_token_head": both(by.by_group(DIM, by.truncated)),
    "engine/vllm_fp8_per_token_head": both(by.by_group(DIM, vllm.scaled_float(1e-6))),
    "engine/vllm_int4_per_token_head": both(INT4),
    "engine/vllm_turboquant_k8v4": {"key": by.by_group(DIM, by.cast("e4m3")), "value": values_of(4)},
    "engine/vllm_turboquant_4bit_nc": {"key": by.turboquant_keys(4), "value": values_of(4)},
    "engine/vllm_turboquant_k3v4_nc": {"key": by.turboquant_keys(3), "value": values_of(4)},
    "engine/vllm_turboquant_3bit_nc": {"key": by.turboquant_keys(3), "value": values_of(3)},
    "engine/vllm_fp8_ds_mla": {
        "key": by.by_group(128, vllm.scaled_float(FLT_MIN)),
        "value": by.by_group(DIM, vllm.as_it_is),
    },
    "engine/vllm_nvfp4_ds_mla": {"key": by.by_group(16, vllm.nvfp4_up), "value": by.by_group(DIM, by.cast("e4m3"))},
    "engine/vllm_ultraquant_4bit": {
        "key": by.rotated(by.by_group(32, vllm.ultraquant), DIM),
        "value": by.by_group(32, vllm.ultraquant),
    },
    "engine/vllm_octave_k3v4": {"key": OCTAVE_KEYS, "value": octave_value(4)},
    "engine/vllm_octave_k3v3": {"key": OCTAVE_KEYS, "value": octave_value(3)},
    "engine/vllm_octave_k3v3_compact": both(octave_value(3)),
    "engine/openvino_u8": both(openvino(8)),
    "engine/openvino_u4": {"key": openvino(8), "value": openvino(4)},
    "engine/lmdeploy_fp8": VLLM_FP8,
    "engine/lmdeploy_fp8/e5m2": both(by.by_group(DIM, by.cast("e5m2"))),
    "engine/vllm_nvfp4/uncalibrated": both(by.by_group(16, by.nvfp4())),
    "engine/sglang_fp8": VLLM_FP8,
    "engine/sglang_fp8/e5m2": both(by.by_group(DIM, by.cast("e5m2"))),
    "engine/sglang_fp4": both(by.by_group(16, by.mx_block16)),
    "engine/sglang_fp4/rotated_keys": {
        "key": by.rotated(by.by_group(16, by.mx_block16), 16),
        "value": by.by_group(16, by.mx_block16),
    },
    "engine/sglang_int4_dsv4": {"key": by.by_group(32, vllm.scaled_int4), "value": by.by_group(DIM, vllm.as_it_is)},
    "engine/lmdeploy_8": both(by.by_group(DIM, by.turbomind(8))),
    "engine/lmdeploy_4": both(by.by_group(DIM, by.turbomind(4))),
    "engine/lmdeploy_8/pytorch": both(by.by_group(DIM, by.ratio(8))),
    "engine/lmdeploy_4/pytorch": both(by.by_group(DIM, by.ratio(4))),
    "engine/lmdeploy_42": {side: by.lmdeploy_42(side) for side in ("key", "value")},
    "engine/mlx_8": both(by.by_group(64, by.edge(8))),
    "engine/mlx_4": both(by.by_group(64, by.edge(4))),
    "engine/mlx_4/start": both(by.by_group(64, by.edge(4))),
    "engine/exllama2_q4": exllama2(4, 4),
    "engine/exllama2_q6": exllama2(8, 4),
    "engine/exllama2_q8": exllama2(8, 8),
    **{f"engine/exllama3_{b}": both(by.rotated(by.by_group(32, by.midpoint(b)), 32)) for b in (4, 6, 8)},
}
# With a number for the layer: its divisor.
SCALED = {
    "engine/vllm_fp8/calibrated": (by.by_group(DIM, by.cast("e4m3")), 448),
    "engine/vllm_nvfp4": (by.by_group(16, by.nvfp4()), 2688),
    "engine/sglang_nvfp4": (by.by_group(16, by.nvfp4()), 2688),
    "engine/vllm_nvfp4_4over6": (by.by_group(16, by.nvfp4(four_over_six=True)), 2688),
    "engine/tensorrt_int8": (by.by_group(DIM, partial(by.static, 8)), 127),
    "engine/onnxruntime_int8/per_tensor": (by.by_group(DIM, partial(by.static, 8)), 127),
    "engine/onnxruntime_int4/per_tensor": (by.by_group(DIM, partial(by.static, 4)), 7),
    "engine/tensorrt_fp8": (by.by_group(DIM, by.cast("e4m3")), 448),
    "engine/tensorrt_nvfp4": (by.by_group(16, by.nvfp4()), 2688),
}
# A number for the layer of rotated keys, for each side its own, for each head or channel.
SCALED_APART = (
    "engine/sglang_nvfp4/rotated_keys", "engine/vllm_fp8_k_nvfp4_v", "engine/vllm_fp8/per_head",
    "engine/vllm_fp8/random_tokens",
    "engine/onnxruntime_int8", "engine/onnxruntime_int4",
)  # fmt: skip
BY_CHANNEL = {"engine/openvino_u8_by_channel": 8, "engine/openvino_u4_by_channel": 4}
# Bits of keys and of values at 128 channels.
BITS = {
    "vllm_fp8": (8, 8),
    "sglang_fp8": (8, 8),
    "tensorrt_fp8": (8, 8),
    "tensorrt_int8": (8, 8),
    "onnxruntime_int8": (8, 8),
    "onnxruntime_int4": (4, 4),
    "vllm_int8_per_token_head": (8 + 32 / 128,) * 2,
    "vllm_fp8_per_token_head": (8 + 32 / 128,) * 2,
    "vllm_int4_per_token_head": (4 + 32 / 128,) * 2,
    "vllm_turboquant_k8v4": (8, 4 + 32 / 128),
    "vllm_turboquant_4bit_nc": (4 + 16 / 128, 4 + 32 / 128),
    "vllm_turboquant_k3v4_nc": (3 + 16 / 128, 4 + 32 / 128),
    "vllm_turboquant_3bit_nc": (3 + 16 / 128, 3 + 32 / 128),
    "vllm_nvfp4": (4 + 8 / 16,) * 2,
    "vllm_nvfp4_4over6": (4 + 8 / 16,) * 2,
    "tensorrt_nvfp4": (4 + 8 / 16,) * 2,
    "sglang_fp4": (4 + 8 / 16,) * 2,
    "sglang_nvfp4": (4 + 8 / 16,) * 2,
    "lmdeploy_fp8": (8, 8),
    "vllm_fp8_ds_mla": (8 + 32 / 128, 16),
    "vllm_fp8_k_nvfp4_v": (8, 4 + 8 / 16),
    "sglang_int4_dsv4": (4 + 8 / 32, 16),
    "vllm_nvfp4_ds_mla": (4 + 8 / 16, 8),
    "vllm_ultraquant_4bit": (4 + 8 / 32,) * 2,
    "vllm_octave_k3v4": ((4 + 3) / 2 + 2 * 16 / 128, 4 + 16 / 128),
    "vllm_octave_k3v3": ((4 + 3) / 2 + 2 * 16 / 128, 3 + 16 / 128),
    "vllm_octave_k3v3_compact": (3 + 16 / 128,) * 2,
    "openvino_u8": (8 + 64 / 128,) * 2,
    "openvino_u4": (8 + 64 / 128, 4 + 64 / 128),
    "openvino_u8_by_channel": (8 + 64 / 32, 8 + 64 / 128),
    "openvino_u4_by_channel": (4 + 64 / 32, 4 + 64 / 128),
    "llamacpp_q8_0": (8 + 16 / 32,) * 2,
    "llamacpp_q8_0_q4_0": (8 + 16 / 32, 4 + 16 / 32),
    "llamacpp_q4_0_q8_0": (4 + 16 / 32, 8 + 16 / 32),
    "llamacpp_q8_0_q5_1": (8 + 16 / 32, 5 + 32 / 32),
    "ikllama_q6_0": (6 + 16 / 32,) * 2,
    "mlx": (3 + 32 / 64,) * 2,
    "mlx_g32": (3 + 32 / 32,) * 2,
    "mlx_g128": (3 + 32 / 128,) * 2,
    "llamacpp_q5_1": (5 + 32 / 32,) * 2,
    "llamacpp_q5_0": (5 + 16 / 32,) * 2,
    "llamacpp_q4_1": (4 + 32 / 32,) * 2,
    "llamacpp_q4_0": (4 + 16 / 32,) * 2,
    "llamacpp_iq4_nl": (4 + 16 / 32,) * 2,
    "lmdeploy_8": (8 + 32 / 128,) * 2,
    "lmdeploy_4": (4 + 32 / 128,) * 2,
    "lmdeploy_42": (3 + 1 + 32 / 128, 2 + 16 / 128),
    "mlx_8": (8 + 32 / 64,) * 2,
    "mlx_4": (4 + 32 / 64,) * 2,
    "exllama2_q4": (4 + 16 / 32,) * 2,
    "exllama2_q6": (8 + 16 / 32, 4 + 16 / 32),
    "exllama2_q8": (8 + 16 / 32,) * 2,
    "exllama3_4": (4 + 16 / 32,) * 2,
    "exllama3_6": (6 + 16 / 32,) * 2,
    "exllama3_8": (8 + 16 / 32,) * 2,
}


def states(tokens=5, heads=2):
    """Channels of other means and sizes, and tokens of other norms, in double precision."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, heads, tokens, DIM, generator=generator, dtype=torch.float64)
    x = x + torch.randn(1, heads, 1, DIM, generator=generator, dtype=torch.float64)
    x[..., 5::37] *= 8
    x[:, :, 3] *= 1e-2
    return x


def kept(packed):
    """Stored parts as rows of numbers `[heads, tokens, ...]`, codes unpacked."""
    tokens = packed.tokens
    planes = [name for name in sorted(packed.parts) if "codes." in name]
    out = {name: part.double()[0] for name, part in packed.parts.items() if name not in planes and name != "signs"}
    for kind in {name.rpartition(".")[0] for name in planes}:
        own = [packed.parts[name] for name in planes if name.startswith(f"{kind}.")]
        bits = sum(plane.shape[2] for plane in own)  # 8 tokens: as many rows as bits
        out[kind] = unpack(own, bits, tokens)[0].double()
    if "signs" in packed.parts:
        out["signs"] = unpack([packed.parts["signs"]], 1, tokens)[0].double()
    return out


def hold(codec, x, oracle):
    packed = codec.encode(x)
    found, decoded = kept(packed), codec.decode(packed)[0]
    for head in range(x.shape[1]):
        for token in range(x.shape[2]):
            wanted, vector = oracle(x[0, head, token].numpy())
            assert found.keys() == wanted.keys()
            for name, numbers in wanted.items():
                assert found[name][head, token].tolist() == list(numbers), f"{name} of head {head}, token {token}"
            np.testing.assert_allclose(decoded[head, token], vector, rtol=1e-6, atol=1e-9 * float(abs(vector).max()))


def test_every_preset_has_an_oracle_and_its_bits():
    assert {*ORACLES, *SCALED, *SCALED_APART, *BY_CHANNEL} == set(PRESETS)
    assert {f"engine/{name}" for name in BITS} == {name for name in PRESETS if name.count("/") == 1}


@pytest.mark.thin(2)
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", ORACLES)
def test_stored_and_decoded_are_the_oracles(name, side):
    hold(getattr(build_method(name), side), states(8), ORACLES[name][side])


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", SCALED)
def test_a_layers_number_is_that_of_its_largest_magnitude(name, side):
    x = states(8)
    oracle, divisor = SCALED[name]
    number = float(np.float32(x.abs().max()) / np.float32(divisor))
    # Encoded states are larger than those of the calibration here and there: codes saturate.
    hold(getattr(build(name, x), side), 1.25 * x, by.layer_scaled(oracle, number))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("name", "axes", "oracle", "divisor"), [
    ("engine/vllm_fp8/per_head", (2, 3), by.by_group(DIM, by.cast("e4m3")), 448),
    ("engine/onnxruntime_int8", (2,), partial(by.static, 8), 127),
    ("engine/onnxruntime_int4", (2,), partial(by.static, 4), 7),
])  # fmt: skip
def test_a_number_for_each_head_or_channel_is_that_of_its_largest_magnitude(name, side, axes, oracle, divisor):
    x = states(8)
    codec = getattr(build(name, x), side)
    numbers = x.abs().amax(axes)[0].numpy().astype(np.float32) / np.float32(divisor)
    for head, number in enumerate(numbers):
        decoded = codec.decode(codec.encode(1.25 * x))[0, head]
        wanted = [np.array(oracle(1.25 * row.numpy() / number)[1]) * number for row in x[0, head]]
        np.testing.assert_allclose(decoded, wanted, rtol=1e-6)


@pytest.mark.parametrize(("name", "oracles"), [
    ("engine/vllm_fp8_k_nvfp4_v", ((by.by_group(DIM, by.cast("e4m3")), 448), (by.by_group(16, by.nvfp4()), 2688))),
    ("engine/vllm_fp8/random_tokens", [(by.by_group(DIM, by.cast("e4m3")), divisor) for divisor in (200, 100)]),
])  # fmt: skip
def test_keys_and_values_have_numbers_of_their_own(name, oracles):
    x = states(8)
    method = build(name, x)
    for side, (oracle, divisor) in zip(("key", "value"), oracles, strict=True):
        number = float(np.float32(x.abs().max()) / np.float32(divisor))
        hold(getattr(method, side), 1.25 * x, by.layer_scaled(oracle, number))


def test_the_number_of_rotated_keys_is_taken_after_the_rotation():
    x, nvfp4 = states(8), by.by_group(16, by.nvfp4())
    method, turned = build("engine/sglang_nvfp4/rotated_keys", x), Hadamard(block=16).forward(x)[0]
    for side, seen in (("key", turned), ("value", x)):
        oracle = by.layer_scaled(nvfp4, float(np.float32(seen.abs().max()) / np.float32(2688)))
        hold(getattr(method, side), 1.25 * x, by.rotated(oracle, 16) if side == "key" else oracle)


@pytest.mark.parametrize("name", PRESETS)
def test_bits_are_the_closed_forms(name):
    x = states(32).half()
    method, plain = build(name, x, 3), "/".join(name.split("/")[:2]).removeprefix("engine/")
    assert tuple(getattr(method, side).encode(x).bits_per_element for side in ("key", "value")) == BITS[plain]


@pytest.mark.parametrize(
    "name",
    ["engine/llamacpp_q4_0", "engine/vllm_turboquant_3bit_nc", "engine/vllm_fp8", "engine/vllm_int4_per_token_head"],
)
def test_a_cache_keeps_nothing_in_full_precision(name, monkeypatch):
    """A prompt, then single tokens: the bits are those of the format, and queries read what is stored."""
    model = in_double_precision(LoadedModel(llama(head_dim=DIM), torch.device("cpu")), monkeypatch).model
    tokens = token_ids(40)
    cache = KVCache(model, build_method(name))
    at_once = model(tokens, past_key_values=cache).logits
    bits = BITS[name.removeprefix("engine/")]
    assert (cache.side_bits("key"), cache.side_bits("value")) == bits
    assert cache.effective_bits == sum(bits) / 2
    cache, cut = KVCache(model, build_method(name)), (tokens[:, :17], *tokens[:, 17:].split(1, 1))
    pieces = [model(piece, past_key_values=cache).logits for piece in cut]
    assert (cache.side_bits("key"), cache.side_bits("value")) == bits
    # Each query reads its own token as it is stored, so a prompt in one forward equals decoding.
    assert float((torch.cat(pieces, 1) - at_once).norm() / at_once.norm()) < 1e-9


def test_int8_is_truncated_toward_zero():
    """Four times the mean square of rounding."""
    x = torch.randn(1, 4, 64, DIM, generator=torch.Generator().manual_seed(1))
    codec = build_method("engine/vllm_int8_per_token_head").key
    cut = (codec.decode(codec.encode(x)) - x).square().mean()
    assert bool((codec.decode(codec.encode(x)).abs() <= x.abs() * (1 + 1e-6)).all())
    rounding = UniformQuantizer(8, "per_token", symmetric=True, scale_dtype="float32")
    near = (rounding.decode(rounding.encode(x, x.dtype), x.shape, x.dtype) - x).square().mean()
    assert float(cut / near) == pytest.approx(4, rel=0.05)


def test_overflow_is_the_engines():
    x = torch.full((1, 1, 1, DIM), 1e6)
    saturated = {"engine/vllm_fp8": 448, "engine/sglang_fp8": 448, "engine/vllm_fp8/e5m2": 57344}
    saturated |= {"engine/lmdeploy_fp8": 448, "engine/lmdeploy_fp8/e5m2": 57344}
    for name, most in saturated.items():
        codec = build_method(name).key
        assert set(codec.decode(codec.encode(x)).unique().tolist()) == {most}
    codec = build_method("engine/sglang_fp8/e5m2").key
    assert bool(codec.encode(x).parts["values"].float().isinf().all())


def test_ties_are_the_engines():
    """Steps of 1: halves between codes of each rounding."""
    x = torch.tensor([15.0, 0.5, 1.5, 2.5, 3.49, 0.0]).view(1, 1, 1, 6)
    for rounding, wanted in {
        "even": [15, 0, 2, 2, 3, 0],
        "up": [15, 1, 2, 3, 3, 0],
        "down": [15, 0, 1, 2, 3, 0],
        "away": [15, 1, 2, 3, 3, 0],
        "truncate": [15, 0, 1, 2, 3, 0],
    }.items():
        codes = UniformQuantizer(4, "per_token", rounding=rounding).encode(x, x.dtype)["codes.0"]
        assert unpack([codes], 4, 1).flatten().tolist() == wanted, rounding


def test_levels_for_the_normal_distribution_are_maxs():
    """Also the constants of LMDeploy, in single precision."""
    for bits, levels in {
        1: [0.7978846],
        2: [0.4527808, 1.5104176],
        3: [0.2450942, 0.7560052, 1.3439093, 2.1519456],
    }.items():
        assert optimal_levels(bits, math.inf) == pytest.approx(levels, abs=2e-6)
    assert optimal_levels(4, math.inf) == pytest.approx(by.lloyd_max(4)[8:], abs=1e-9)


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("settings", [{"block": 32}, {"block": 32, "interleaved": True}, {"block": "power_of_two"}])
def test_hadamard_blocks_are_orthogonal_and_undone(dim, settings):
    x = torch.randn(1, 2, 3, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for normalized in (True, False):
        for stage in (
            Hadamard(**settings, normalized=normalized),
            RandomizedHadamard(3, **settings, normalized=normalized),
        ):
            y = stage.forward(x)[0]
            assert torch.allclose(stage.inverse(y, {}), x, atol=1e-12)
            size = 1 if normalized else stage.block_size(dim)
            assert float(y.norm()) == pytest.approx(float(x.norm()) * math.sqrt(size))
            assert stage.orthogonal == normalized


def test_a_block_that_does_not_fit_is_refused():
    with pytest.raises(Unsupported, match="head_dim=80: no multiple of 64, the channels of a Hadamard block"):
        build_method("engine/llamacpp_q8_0", head_dim=80)
    assert [name for name, _ in build_method("engine/llamacpp_q8_0/unrotated", head_dim=80).key.stages] == ["pairs"]
