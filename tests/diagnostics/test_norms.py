from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq import build_method
from kvq.codecs import Codec, UniformQuantizer
from kvq.diagnostics import (
    find_sinks,
    group_ranges,
    group_spread,
    imbalance,
    quantizer_group,
    relative_norms,
    shares_tokens,
    stage_outputs,
    step_bound,
    token_norms,
    without_tokens,
)


def test_norms_and_their_spread_in_closed_form() -> None:
    x = torch.zeros(1, 2, 4, 2)
    x[0, 0, :, 0] = torch.tensor([1.0, -2.0, 3.0, 2.0])
    x[0, 1] = torch.tensor([3.0, 4.0])
    norms = token_norms(x)
    assert norms.tolist() == [[[1, 2, 3, 2], [5, 5, 5, 5]]]
    found = imbalance(norms)
    assert found.variation.tolist() == pytest.approx([0.5**0.5 / 2, 0])
    assert found.max_over_min.tolist() == pytest.approx([3, 1])
    assert found.median_over_min.tolist() == pytest.approx([2, 1])


def test_sinks_are_found_by_position_and_stability() -> None:
    norms = torch.full((3, 2, 10), 8.0)
    norms[:, :, 0] = 0.8
    norms[1:, :, 4] = 2.0
    norms[0, :, 7] = 1.0
    relative = relative_norms(norms)
    first, second = find_sinks(relative, 0.5)
    assert (first.position, first.stability, second.position) == (0, 1.0, 4)
    assert (first.relative_norm, second.relative_norm) == pytest.approx((0.1, 0.25))
    assert second.stability == pytest.approx(2 / 3)


def test_ranges_and_spread_of_groups() -> None:
    x = torch.tensor([[[[0.0, 1.0], [4.0, 1.0], [1.0, -1.0], [1.0, 2.0], [9.0, 9.0]]]])
    assert group_ranges(x, 2).tolist() == [[[[4, 0], [0, 3]]]]  # the fifth token is no group
    spread, deviation = group_spread(torch.tensor([[[1.0, 3.0, 2.0, 2.0, 7.0]]]), 2)
    assert spread.tolist() == [[[2, 0]]]
    assert deviation.tolist() == [[[1, 0]]]
    assert float(step_bound(torch.tensor(6.0), 2)) == 1.0


@given(st.integers(0, 1000), st.integers(2, 6))
def test_no_error_exceeds_half_a_step(seed: int, bits: int) -> None:
    x = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codec = Codec({}, [], UniformQuantizer(bits, "per_channel", 32))
    error = (codec.decode(codec.encode(x)) - x).abs().unflatten(2, (2, 32)).amax(3)
    bound = step_bound(group_ranges(x, 32), bits)
    assert bool((error <= bound + 4e-3 * x.abs().max()).all())  # scale and minimum are stored in fp16


def test_ranges_behind_each_stage_of_oscar() -> None:
    codec = build_method("oscar", 2, 32).key
    assert codec is not None
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] /= 20
    x[..., 3] += 30
    outputs = dict(stage_outputs(codec, x, 32, None))
    assert list(outputs) == ["input", "hadamard", "norm"]
    assert torch.equal(outputs["input"], x)
    assert torch.allclose(token_norms(outputs["hadamard"]), token_norms(x), rtol=1e-4)
    assert torch.allclose(token_norms(outputs["norm"]), torch.ones(1, 2, 64))
    assert (quantizer_group(codec), shares_tokens(codec)) == (32, True)
    value = build_method("oscar", 2, 32).value
    assert value is not None
    assert not shares_tokens(value)


def test_a_sink_that_sets_the_range_takes_its_error_along() -> None:
    x = torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(0)) + 20
    x[:, :, 0] = 0.0
    codec = Codec({}, [], UniformQuantizer(2, "per_channel", 32))
    together, alone = without_tokens(codec, x, torch.tensor([0]), 32, None)
    assert together > 20 * alone
    per_token = Codec({}, [], UniformQuantizer(2, "per_token"))
    together, alone = without_tokens(per_token, x, torch.tensor([0]), 32, None)
    assert together == pytest.approx(alone)
