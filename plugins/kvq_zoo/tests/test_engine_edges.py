"""What formats of engines do with zeros, equal numbers, ties and values beyond their scales."""

import numpy as np
import pytest
import torch

from kvq.codecs import unpack
from kvq.methods.build import build_method
from kvq_zoo.block_float import BlockFloatQuantizer
from kvq_zoo.octave import RmsLevelsQuantizer
from kvq_zoo.tests import engine_oracles as by
from kvq_zoo.tests.test_engines import BY_CHANNEL, DIM, hold, openvino, states


def one_way(name, x, side="key"):
    codec = getattr(build_method(name, head_dim=x.shape[-1]), side)
    return codec.decode(codec.encode(x))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(
    "name",
    [
        *("vllm_fp8_ds_mla", "vllm_nvfp4_ds_mla", "vllm_octave_k3v4", "vllm_octave_k3v3", "vllm_octave_k3v3_compact"),
        "vllm_ultraquant_4bit",
        *("openvino_u8", "openvino_u4", "lmdeploy_fp8", "lmdeploy_fp8/e5m2"),
    ],
)
def test_a_token_of_zeros_is_zeros(name, side):
    x = states(8).float()
    x[:, :, 2] = 0
    found = one_way(f"engine/{name}", x, side)
    assert not found[:, :, 2].any()
    assert found.isfinite().all()


def test_a_vector_of_equal_numbers_keeps_its_value_in_openvino():
    x = torch.full((1, 1, 2, DIM), 0.3)
    x[:, :, 1] = -7
    for side in ("key", "value"):
        assert torch.allclose(one_way("engine/openvino_u4", x, side), x, rtol=1e-6)


def test_scales_that_are_rounded_up_clip_nothing():
    """Where NVFP4's nearest scale is the lower one, the largest value is beyond 6 scales. The least scale is 2^-9."""
    x = torch.zeros(1, 1, 3, 16)
    x[..., 0] = torch.tensor([6 * 1.05, 6 * 1.06, 2.0**-10])
    scale = BlockFloatQuantizer(scale="e4m3_up").encode(x, x.dtype)["scale"].float().flatten()
    assert scale.tolist() == [1.125, 1.125, 2.0**-9]
    nearest = BlockFloatQuantizer().encode(x, x.dtype)["scale"].float().flatten()
    assert nearest.tolist() == [1.0, 1.0, 0.0]
    largest = BlockFloatQuantizer(scale="e4m3_up").encode(x + 1e5, x.dtype)["scale"].float()
    assert set(largest.flatten().tolist()) == {448.0}


def test_octave_keeps_the_inner_product_and_sends_a_tie_to_the_lower_level():
    x = torch.randn(1, 2, 9, DIM, generator=torch.Generator().manual_seed(3))
    for side in ("key", "value"):
        found = one_way("engine/vllm_octave_k3v4", x, side)
        assert torch.allclose((x * found).sum(-1), x.square().sum(-1), rtol=1e-3)
    quantizer = RmsLevelsQuantizer([-127, -79, -45, -14, 14, 45, 79, 127], 59)
    pair = torch.tensor([[[[1.0, -1.0, 0.0, 0.0]]]])  # 0 is halfway between -14 and 14
    codes = unpack([quantizer.encode(pair, pair.dtype)[f"codes.{i}"] for i in range(2)], 3, 1).flatten().tolist()
    assert codes == [6, 1, 3, 3]


def test_ultraquant_sends_ties_to_the_lower_number_and_may_clip_the_largest():
    x = torch.tensor([7.0, 0.25, -0.25, 2.5, -2.5, 5.0, -5.0, 0.0]).view(1, 1, 1, 8)
    quantizer = BlockFloatQuantizer(32, "e8m0_near", "down")
    parts = quantizer.encode(x, x.dtype)  # .156 * 7 is next to 1
    assert parts["scale"].flatten().tolist() == [127]
    assert quantizer.decode(parts, x.shape, x.dtype).flatten().tolist() == [6, 0, -0.5, 2, -3, 4, -6, 0]


@pytest.mark.parametrize("name", BY_CHANNEL)
def test_keys_by_channel_have_a_grid_for_32_tokens_of_a_channel(name):
    x, method = states(64), build_method(name)
    hold(method.value, x[:, :, :8], openvino(BY_CHANNEL[name]))
    decoded, grid = method.key.decode(method.key.encode(x)), by.ratio(BY_CHANNEL[name], by.f32, by.half_even)
    for head, start in ((0, 0), (0, 32), (1, 32)):
        block, found = (part[0, head, start : start + 32].numpy() for part in (x, decoded))
        for channel in range(DIM):
            np.testing.assert_allclose(found[:, channel], grid(block[:, channel].tolist())[1], rtol=1e-6, atol=1e-9)


def test_a_group_below_the_least_scale_of_scaled_integers_becomes_zero():
    codec = build_method("engine/sglang_int4_dsv4").key
    x = torch.full((1, 1, 1, DIM), 7 * 0.99 * 2.0**-10)
    assert not codec.decode(codec.encode(x)).any()
    assert bool((codec.decode(codec.encode(-2 * x)) == -7 * 2.0**-9).all())


def test_a_group_below_the_least_scale_of_nvfp4_becomes_zero():
    x = torch.full((1, 1, 1, 16), 5.9 * 2.0**-10)
    codec = build_method("engine/vllm_nvfp4/uncalibrated", head_dim=16).key
    assert not codec.decode(codec.encode(x)).any()
    assert codec.decode(codec.encode(2 * x)).all()


def test_a_short_last_group_of_octave_has_its_own_scale():
    levels, x = [-127, -79, -45, -14, 14, 45, 79, 127], torch.randn(1, 2, 40, 96, dtype=torch.float64)
    apart = (RmsLevelsQuantizer(levels, 59, group_size=size) for size in (64, 32))
    parts = zip(apart, x.split(64, -1), strict=True)
    expected = [one.decode(one.encode(part, x.dtype), part.shape, x.dtype) for one, part in parts]
    whole = RmsLevelsQuantizer(levels, 59, group_size=64)
    assert torch.equal(whole.decode(whole.encode(x, x.dtype), x.shape, x.dtype), torch.cat(expected, -1))


def test_groups_far_from_zero_keep_their_values_with_a_stored_ratio():
    """-lo / scale beyond 65504 has no place in fp16."""
    x = 5 + 0.01 * torch.rand(1, 1, 4, 64)
    codec = build_method("engine/lmdeploy_8/pytorch", head_dim=64).key
    torch.testing.assert_close(codec.decode(codec.encode(x)), x, atol=0.02, rtol=0)
