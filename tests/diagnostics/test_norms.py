from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvq import build_method
from kvq.codecs import Codec, RandomizedHadamard, UniformQuantizer
from kvq.config.diagnostics import SyntheticConfig
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
from kvq.errors import ConfigError
from kvq.tasks.distribution import (
    channel_kl,
    correlation_in_groups,
    hadamard,
    lemma_range,
    moments,
    nsn,
    oracle,
    synthetic_cosine,
    vector_cosine,
)
from kvq.tasks.error import imbalanced
from kvq.tasks.memory import kind_of


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


def test_the_example_of_oscars_review() -> None:
    """One channel of a sink and three tokens at 2 bits, as printed, and what of its conclusions does not follow."""
    channel = torch.tensor([0.05, 8.1, 7.9, 8.3], dtype=torch.float64)[:, None]
    errors = {}
    for name, x in (("with", channel), ("without", channel[1:])):
        grid = UniformQuantizer(2, "per_channel", None)
        decoded = grid.decode(grid.encode(x, torch.float64), x.shape, torch.float64)
        errors[name] = (decoded - x).abs()[-3:, 0]
    with_sink, without = (group_ranges(x[None, None], len(x)).item() for x in (channel, channel[1:]))
    assert (with_sink, without) == pytest.approx((8.25, 0.4))  # as printed, and steps of 2.75 and 0.133
    assert without / 6 == pytest.approx(0.067, abs=5e-4)
    # Printed: 8.1 becomes 8.25, an error of 0.15. Its own grid begins at 0.05, not at 0: 8.1 becomes 8.3.
    assert errors["with"].tolist() == pytest.approx([0.2, 0.4, 0], abs=4e-3)
    assert float(errors["without"].max()) == pytest.approx(0.067, abs=4e-3)
    # Printed: 4 times as precise. The bounds' ratio is 20.6, that of largest errors 6, that of the token shown 3.
    assert step_bound(torch.tensor(with_sink / without), 2).item() * 6 == pytest.approx(20.6, abs=0.05)
    assert float(errors["with"].max() / errors["without"].max()) == pytest.approx(6, rel=0.05)
    assert float(errors["with"][0] / errors["without"][0]) == pytest.approx(3, rel=0.07)
    # Printed: tokens of norm 1 collapse 8.3 beside 0.05. They do where directions agree; a sink of the opposite one
    # then doubles the range, from once to twice the size of an entry.
    for sink, span in ((0.05, 0), (-0.05, 2 * 0.5)):
        keys = torch.cat([torch.full((1, 4), sink, dtype=torch.float64), channel[1:].expand(3, 4)])
        unit = torch.nn.functional.normalize(keys, dim=-1)
        assert group_ranges(unit[None, None], 4).flatten().tolist() == pytest.approx([span] * 4)


@pytest.mark.parametrize(("dim", "span"), [(64, 0.517), (128, 0.366)])
def test_the_range_of_32_unit_vectors(dim: int, span: float) -> None:
    """The review: √(log₂ 32 / D), 0.20 at 128 channels, a step of 0.067, an error of 0.033; all are 1.85 times it."""
    keys = torch.randn(1, 8, 4096, dim, generator=torch.Generator().manual_seed(0))
    codec = build_method("oscar", 2, dim).key
    assert codec is not None
    unit = stage_outputs(codec, keys, None, None)[-1][1]
    found = float(group_ranges(unit, 32).mean())
    assert found == pytest.approx(span, rel=0.01)
    assert found / math.sqrt(math.log2(32) / dim) == pytest.approx(1.85, rel=0.01)
    assert float(step_bound(torch.tensor(found), 2)) == pytest.approx(span / 6, rel=0.01)


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


def made(**changes: object) -> torch.Tensor:
    known = {
        "tokens": 256,
        "head_dim": 64,
        "sinks": 2,
        "lowness": 10.0,
        "outlier_channels": 4,
        "outlier_size": 20.0,
        "outlier_spread": 0.0,
        "sink_outliers": False,
        "heads": 3,
    }
    return imbalanced(**(known | changes))  # type: ignore[arg-type]


def test_sinks_are_as_low_as_asked() -> None:
    norms = token_norms(made(outlier_size=0.0))
    assert float(norms[..., 2:].mean() / norms[..., :2].mean()) == pytest.approx(10, rel=0.1)
    high = made(outlier_size=0.0, lowness=1.0)
    assert torch.equal(high[:, :, 2:], made(outlier_size=0.0)[:, :, 2:])
    assert torch.allclose(high[:, :, :2] / 10, made(outlier_size=0.0)[:, :, :2])


def test_outlier_channels_stand_out_by_their_mean() -> None:
    means = made()[0, :, 2:].mean(1).abs()
    for head in means:
        assert int((head > 15).sum()) == 4
        assert head.topk(4).values.tolist() == pytest.approx([20] * 4, abs=0.5)
    spread = made(outlier_spread=0.5)[0, :, 2:].std(1)
    assert spread.topk(4, -1).values.flatten().tolist() == pytest.approx([10] * 12, rel=0.2)


def test_sinks_with_the_others_outliers_point_their_way() -> None:
    common = made()[0, 0, 2:].mean(0)
    apart, alike = (
        torch.nn.functional.cosine_similarity(made(sink_outliers=flag)[0, 0, 0], common, dim=0)
        for flag in (False, True)
    )
    assert abs(float(apart)) < 0.5 < 0.9 < float(alike)


@pytest.mark.parametrize("more", [{"sinks": 128}, {"sinks": 300}, {"outlier_channels": 129}], ids=str)
def test_more_sinks_than_tokens(more: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{'='.join(map(str, *more.items()))}\b.*task\.tokens=128"):
        SyntheticConfig(**more)


def test_parts_by_kind() -> None:
    names = {
        "codes.0": "codes",
        "high.codes.1": "codes",
        "signs": "codes",
        "scale": "scales",
        "zero_point": "scales",
        "norm.scale": "norms",
        "norm1.scale.codes.0": "norms",
        "shift.offset.step": "shift",
        "channel_scale.scale": "scales",
        "mask": "other",
        "residual": "residual",
    }
    assert {name: kind_of(name) for name in names} == names


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_papers_oracle() -> None:
    """Table 1: 4096 standard normal samples give .0096; the mean over 1000 draws is known to .0002."""
    assert oracle(1000) == pytest.approx(0.0096, abs=2e-4)


def test_kl_of_a_histogram_in_closed_form() -> None:
    x = torch.tensor([[0.05], [0.05], [0.15], [-9.0]])
    q = [stats.norm.cdf(0.1) - 0.5, stats.norm.cdf(0.2) - stats.norm.cdf(0.1), stats.norm.cdf(-4.9)]
    expected = sum(p * math.log(p / mass) for p, mass in zip((0.5, 0.25, 0.25), q, strict=True))
    assert float(channel_kl(x)) == pytest.approx(expected)


def test_steps_of_nsn() -> None:
    x = normal(1, 2, 128, 16) * 3 + 7
    n, ns, both = (nsn(x, step) for step in ("N", "NS", "NSN"))
    for y in (n, both):
        assert torch.allclose(y.square().sum(-1), torch.full((1, 2, 128), 16.0, dtype=torch.float64))
    assert float(ns.unflatten(2, (2, 64)).mean(3).abs().max()) < 1e-12
    assert torch.equal(nsn(x, "NS", None), n - n.mean(2, keepdim=True))
    assert not nsn(torch.zeros(1, 1, 4, 8), "NSN").any()


def test_nsn_and_hadamard_make_channels_normal() -> None:
    """The paper's point on made-up states: outlier channels and a common mean, both undone by NSN and a rotation."""
    x = normal(1, 1, 4096, 64) * torch.linspace(0.2, 2, 64) + 3
    kl = {step: float(channel_kl(hadamard(nsn(x, step))[0, 0]).mean()) for step in ("N", "NS", "NSN")}
    assert kl["NSN"] < 0.03 < kl["N"]
    assert float(channel_kl(nsn(x, "NSN")[0, 0]).mean()) > 3 * kl["NSN"]


def test_moments_in_closed_form() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 10.0]])[None, None]
    found = moments(x)
    assert found.mean.tolist() == [[3, 6]]
    assert found.deviation[0].tolist() == pytest.approx([(8 / 3) ** 0.5, (32 / 3) ** 0.5])
    assert float(found.off_diagonal) == pytest.approx(2**0.5 * 16 / 3)
    assert found.highest[0].tolist() == pytest.approx([16 / 3, 16 / 3])
    assert found.lowest[0].tolist() == [0, 0]  # no covariance is negative


def test_lemma_holds_on_correlated_channels() -> None:
    mix = torch.eye(32, dtype=torch.float64) + 0.2 * normal(32, 32, seed=1)
    x = nsn(normal(1, 1, 4096, 32) @ mix, "NSN", None)
    found = moments(x)
    limits = lemma_range(found.mean[0], float(found.off_diagonal), 0.05, 0.125)
    assert limits.high - 1 == pytest.approx(float(found.off_diagonal) * math.sqrt(math.log(40) / 0.125) / 32)
    variances = torch.stack([moments(RandomizedHadamard(seed).forward(x)[0]).deviation.square() for seed in range(20)])
    inside = ((variances >= limits.low) & (variances <= limits.high)).double().mean()
    assert float(inside) >= 0.95
    assert float(variances.mean()) == pytest.approx(1 - limits.epsilon, abs=1e-9)  # a rotation keeps their mean


def test_correlation_counts_pairs_within_groups_alone() -> None:
    base = normal(1, 1, 2000, 1)
    x = torch.cat([base.expand(-1, -1, -1, 8), normal(1, 1, 2000, 8, seed=1)], -1)
    assert float(correlation_in_groups(x)) == pytest.approx(0.5, abs=0.02)  # 1 in the first group, about 0 in the other
    assert float(correlation_in_groups(torch.ones(1, 1, 10, 8))) == 0


def test_normal_states_lie_on_the_synthetic_line() -> None:
    line = synthetic_cosine(512, 64, 2, "finetuned")
    assert 0.9 < line < 1
    assert float(vector_cosine(normal(1, 1, 512, 64, seed=9), 2, "finetuned")) == pytest.approx(line, abs=3e-3)
    assert synthetic_cosine(512, 64, 1, "finetuned") < line
