"""Codes of 786,432 bf16 values against engines' arithmetic in fp32, operation by operation; what differs is counted.

`test_engines.py` holds the definitions in double precision, where a division and a product with a reciprocal agree.
"""

import re

import numpy as np
import pytest
import torch

from kvq.codecs.packed import unpack_parts
from kvq.config import compose, resolve
from kvq.methods.build import build_method, method_of
from kvq_zoo.serving import TurboMindQuantizer
from kvq_zoo.tests.engine_oracles import IQ4_NL, rounded_to, turbomind
from kvq_zoo.tests.test_engines import PRESETS
from tests.calibrated import build
from tests.test_docs import ENGINES

F = np.float32
STATES = torch.randn(1, 8, 768, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
LOW = 2.0**-11 * STATES[:, :, :2]  # ranges below .0039, as of sinks of a small norm
PAGE = ENGINES.read_text(encoding="utf-8")


def groups(size):
    return STATES.float().numpy().reshape(-1, size)


def trunc(x, top):
    return np.clip(np.trunc(x), 0, top)


def signed_max(bits):
    def codes(x):
        d = x[np.arange(len(x)), np.abs(x).argmax(1)][:, None] / F(-(2 ** (bits - 1)))
        return trunc(x * (F(1) / d) + F(2 ** (bits - 1) + 0.5), 2**bits - 1)

    return codes


def minimum(bits, reciprocal):
    def codes(x):
        low = x.min(1, keepdims=True)
        d = (x.max(1, keepdims=True) - low) / F(2**bits - 1)
        steps = (x - low) * (F(1) / d) if reciprocal else (x - low) / d
        return trunc(steps + F(0.5), 2**bits - 1)

    return codes


def q8_0(x):
    steps = x * (F(1) / (np.abs(x).max(1, keepdims=True) / F(127)))
    return np.sign(steps) * np.floor(np.abs(steps) + F(0.5)) + 127


def iq4_nl(x):
    """`best_index_int8`: of a value between two levels, the distance to each."""
    steps = (F(1) / (x[np.arange(len(x)), np.abs(x).argmax(1)][:, None] / F(-127))) * x
    levels = np.array(IQ4_NL, dtype=F)
    above = np.clip(np.searchsorted(levels, steps, side="right"), 1, 15)
    nearest = np.where(steps - levels[above - 1] < levels[above] - steps, above - 1, above)
    return np.where(steps <= levels[0], 0, np.where(steps >= levels[15], 15, nearest))


def openvino(x):
    """`quant_u8`: a product and a sum that are rounded once."""
    low = x.min(1, keepdims=True)
    scale = (x.max(1, keepdims=True) - low) / F(255)
    steps = x.astype(float) * (F(1) / scale).astype(float) + (-low / scale).astype(float)
    return np.clip(np.rint(steps.astype(F)), 0, 255)


def int8(x):
    scale = np.maximum(np.abs(x).max(1, keepdims=True) / F(127), F(1e-6))
    return np.trunc(np.clip(x * (F(1) / scale), -128, 127)) + 127


def int4(x):
    low = x.min(1, keepdims=True)
    scale = np.maximum((x.max(1, keepdims=True) - low) / F(15), F(1e-6))
    zero = trunc(-low / scale + F(0.5), 15)
    return trunc(x * (F(1) / scale) + zero + F(0.5), 15)


def fp8(x):
    scale = np.maximum(np.abs(x).max(1, keepdims=True) / F(448), F(1e-6))
    return e4m3(np.clip(x * (F(1) / scale), -448, 448))


def e4m3(x):
    return torch.from_numpy(x).clamp(max=448).to(torch.float8_e4m3fn).float().numpy()


def e2m1(x):
    """Halves to even."""
    size = np.abs(x)[..., None]
    ends = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    return sum((size >= F(end) if up else size > F(end))[..., 0].astype(int) for end, up in ends)


def nvfp4(number, four_over_six=False):
    """vLLM's `nvfp4_candidate_scale`, with exact reciprocals where the GPU has approximate ones."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=F)

    def codes(x):
        whole, found = F(1) / F(number), []
        for reach in (6, 4) if four_over_six else (6,):
            scale = e4m3(whole * (np.abs(x).max(1, keepdims=True) * (F(1) / F(reach))))
            factor = F(1) / (scale * (F(1) / whole))
            error = levels[e2m1(x * factor)] * (F(1) / factor) - np.abs(x)
            found.append((e2m1(x * factor) + 8 * (x < 0), (error * error).sum(1, keepdims=True, dtype=F)))
        return np.where(found[-1][1] < found[0][1], found[-1][0], found[0][0])

    return codes


def midpoint(bits):
    def codes(x):
        inverse, middle = F(1) / (np.abs(x) + F(1e-10)).max(1, keepdims=True), 2 ** (bits - 1)
        return np.clip(np.floor(x * inverse * F(middle) + F(middle)), 0, 2**bits - 1)

    return codes


def edge(bits):
    def codes(x):
        low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
        s = np.maximum((high - low) / F(2**bits - 1), F(1e-7))
        below = np.abs(low) > np.abs(high)
        s, end = np.where(below, s, -s), np.where(below, low, high)
        steps = np.rint(end / s)
        s, offset = np.where(steps != 0, end / np.where(steps == 0, 1, steps), s), np.where(steps != 0, end, 0)
        return np.clip(np.rint((x - offset) / s), 0, 2**bits - 1)

    return codes


NUMBER = float(STATES.abs().max()) / 2688
# Preset, channels that share a scale, the engine's codes, and how many of 786,432 differ here.
ENGINES = {
    "engine/llamacpp_q4_0/unrotated": (32, signed_max(4), 0),
    "engine/llamacpp_q5_0/unrotated": (32, signed_max(5), 0),
    "engine/llamacpp_q4_1/unrotated": (32, minimum(4, True), 0),
    "engine/llamacpp_q5_1/unrotated": (32, minimum(5, True), 0),
    "engine/llamacpp_q8_0/unrotated": (32, q8_0, 0),
    "engine/llamacpp_iq4_nl/unrotated": (32, iq4_nl, 0),
    "engine/vllm_int8_per_token_head": (128, int8, 0),
    "engine/vllm_fp8_per_token_head": (128, fp8, 0),
    "engine/vllm_turboquant_4bit_nc": (128, minimum(4, False), 0),
    "engine/vllm_turboquant_3bit_nc": (128, minimum(3, False), 0),
    "engine/vllm_nvfp4/uncalibrated": (16, nvfp4(1), 0),
    "engine/vllm_int4_per_token_head": (128, int4, 0),
    # The number per layer divides a value first; the engine multiplies all three, and many values lie on a half.
    "engine/vllm_nvfp4": (16, nvfp4(NUMBER), 608),
    "engine/vllm_nvfp4_4over6": (16, nvfp4(NUMBER, four_over_six=True), 2172),
    # The engine rounds a product and a sum once.
    "engine/openvino_u8": (128, openvino, 187),
    "engine/mlx_4": (64, edge(4), 0),
    "engine/mlx_8": (64, edge(8), 0),
    "engine/exllama3_4": (32, midpoint(4), 0),
    "engine/exllama3_8": (32, midpoint(8), 0),
}


def codes_of(quantizer, x):
    parts = quantizer.encode(x.float(), x.dtype)
    if "values" in parts:
        return parts["values"].float().numpy()
    return unpack_parts(parts, quantizer.bits, x.shape[-2]).numpy()


@pytest.mark.parametrize("name", ENGINES)
def test_codes_are_those_of_the_engines_arithmetic(name):
    """Of values, whose presets rotate least; a rotation is left out, as its order of sums is an implementation's."""
    size, oracle, differing = ENGINES[name]
    codec = build(name, STATES.float()).value
    x = STATES.float()
    for stage_name, stage in codec.stages:
        x = stage.forward(x)[0] if stage_name == "scale" else x
    found = codes_of(codec.quantizer, x).reshape(-1, size)
    assert int((found != oracle(groups(size))).sum()) == differing


def test_the_page_has_the_counts():
    counts = {name: differing for name, (_, _, differing) in ENGINES.items() if differing}
    assert {name: int(count) for name, count in re.findall(r"`(engine/\w+)`: (\d+) of 786,432", PAGE)} == counts


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_turbomind_computes_in_the_states_dtype(dtype, bits):
    """Also tokens whose scale has no reciprocal in fp16."""
    codec, kept = build_method(f"engine/lmdeploy_{bits}").key, rounded_to(dtype)
    assert type(codec.quantizer) is TurboMindQuantizer
    for x in (STATES[:, :, :2].to(dtype), LOW.to(dtype)):
        packed = codec.encode(x)
        found, decoded = codes_of(codec.quantizer, x), codec.decode(packed)
        for head in range(x.shape[1]):
            for token in range(x.shape[2]):
                wanted, vector = turbomind(bits, dtype)(x[0, head, token].tolist())
                assert found[0, head, token].tolist() == wanted["codes"]
                for name in ("scale", "zero_point"):
                    assert packed.parts[name].dtype is dtype
                    assert packed.parts[name][0, head, token].tolist() == wanted[name]
                assert decoded[0, head, token].tolist() == [kept(v) for v in vector]


def test_a_token_of_small_range_is_turbominds():
    """In bf16 its error is that of any token; in fp16 the reciprocal is infinite, and codes are least or top."""
    codec = build_method("engine/lmdeploy_8").key
    error = {}
    for dtype in (torch.bfloat16, torch.float16):
        x = LOW.to(dtype)
        error[dtype] = float((codec.decode(codec.encode(x)) - x).float().norm() / x.float().norm())
    assert error[torch.bfloat16] < 0.02
    assert error[torch.float16] > 1
    top = codes_of(codec.quantizer, LOW.half())
    assert set(np.unique(top)) == {0, 255}
    constant = torch.full((1, 1, 2, 128), 0.3).half()
    assert torch.equal(codec.decode(codec.encode(constant)), constant)


def test_scales_that_saturate_are_on_the_page():
    """States of 3e5: the formats whose fp16 side is infinite in the engine, and the largest number here."""
    x = torch.randn(1, 2, 16, 128, generator=torch.Generator().manual_seed(1))
    x = 3e5 * x / x.abs().max()

    def saturates(name):
        method = build(name, x)
        parts = [part for codec in (method.key, method.value) for part in codec.encode(x.bfloat16()).parts.values()]
        return any(bool((part.abs() == 65504).any()) for part in parts if part.dtype is torch.float16)

    found = {name.split("/")[1] for name in PRESETS if saturates(name)}
    (sentence,) = re.findall(r"saturate at\s+65,504[^:]*:(.*?)\.\s", PAGE, re.S)
    assert set(re.findall(r"`([^`]+)`", sentence)) == found


@pytest.mark.parametrize("engine", ["mlx_4", "mlx_8", "lmdeploy_8/pytorch", "lmdeploy_4/pytorch"])
def test_the_pages_override_stores_scales_in_bf16(engine):
    (override,) = set(re.findall(r"`(\+{0,2}method\.\w+\.quantizer\.scale_dtype=\w+)`", PAGE))
    method = method_of(resolve(compose([f"method=engine/{engine}", override])), 128)
    parts = method.key.encode(STATES[:, :, :2]).parts
    assert {parts["scale"].dtype, parts["zero_point"].dtype} == {torch.bfloat16}
