"""The limit of Gaussian coding: closed forms, and what no quantizer of components goes below."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kvq.calibration.budget import demand_of, fit_sharing, joint_parts, predicted, shared_out
from kvq.cli import main
from kvq.codecs import Codec, ComponentQuantizer, FisherTransform, ScalarQuantizer, TrellisQuantizer, bind_codec
from kvq.results import Store
from kvq_lab.limit import level_at_rate, loss_at, rate_at, second_order_losses, spectrum_of
from tests.calibrated import joint_moments, random_states
from tests.sweeps import records, small_run


def spectrum(count: int = 500) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(2).exp()


def level_of_loss(own: torch.Tensor, nats: float) -> float:
    """The level at which the loss is `nats`; the largest λ where nothing loses as much."""
    high = float(own.max())
    low = high * 2.0**-64
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if loss_at(own, middle) < nats else (low, middle)
    return high


def rate_of_loss(own: torch.Tensor, nats: float) -> float:
    """Bits of a component, on average, that the limit needs for a loss of `nats`."""
    return rate_at(own, level_of_loss(own, nats))


@pytest.mark.parametrize("bits", [0.25, 1, 2.5, 8])
def test_equal_components_lose_a_quarter_with_each_bit(bits: float) -> None:
    own = torch.full((40,), 3.0, dtype=torch.float64)
    assert loss_at(own, level_at_rate(own, bits)) == pytest.approx(40 * 3 / 2 * 4**-bits)


def test_two_components_by_hand() -> None:
    """λ = 16 and 1 at half a bit each: the first has all of it, (1/2) log2(16 / θ) = 1, so θ = 4."""
    own = torch.tensor([16.0, 1.0], dtype=torch.float64)
    level = level_at_rate(own, 0.5)
    assert level == pytest.approx(4)
    assert loss_at(own, level) == pytest.approx((4 + 1) / 2)
    assert rate_of_loss(own, 2.5) == pytest.approx(0.5)
    assert rate_of_loss(own, 9) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("bits", [0.5, 1.25, 3])
def test_rate_and_loss_are_inverse(bits: float) -> None:
    own = spectrum()
    level = level_at_rate(own, bits)
    assert rate_at(own, level) == pytest.approx(bits)
    assert level_of_loss(own, loss_at(own, level)) == pytest.approx(level)


@pytest.mark.parametrize("bits", [0.75, 2.25, 4])
def test_quantizers_stay_above_it_and_better_ones_come_nearer(bits: float) -> None:
    own = spectrum()
    quantizers: list[ComponentQuantizer] = [ScalarQuantizer(bits, "pooled")]
    quantizers += [TrellisQuantizer(bits, memory, "pooled") for memory in (8, 10, 12)]
    losses = [predicted(one, own, shared_out([demand_of(one, own)])[0]) for one in quantizers]
    assert losses == sorted(losses, reverse=True)
    away = [bits - rate_of_loss(own, lost) for lost in losses]  # a scalar's 4.35 dB are .72 bits
    assert 0 < away[-1] < away[0] < 0.72


def test_heads_that_repeat_each_other_are_cheaper_together() -> None:
    """Two heads with the same states: apart each needs all bits, together half of the components have no variance."""
    half = torch.randn(3, 200, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)[:1]
    moments = joint_moments(Codec({}, [], ScalarQuantizer(2)), half.expand(2, -1, -1).float())
    joint, apart = (spectrum_of(moments, FisherTransform(heads_together=together)) for together in (None, 1))
    for bits in (1, 2):
        assert rate_of_loss(joint, loss_at(apart, level_at_rate(apart, bits))) < 0.8 * bits


def test_what_is_lost_on_another_text() -> None:
    """On its own text the prediction, part by part; on another, what errors drawn as they are said to be cost there."""
    x, other = (random_states(2, 8, 4000, seed)[0] for seed in (1, 2))
    codec = Codec({"transform": FisherTransform(ridge=1e-9, left_out=0)}, ["transform"], ScalarQuantizer(1, "own"))
    own, there = (joint_moments(codec, states) for states in (x, other))
    bound = bind_codec(codec, fit_sharing({("key", 0): codec}, {("key", 0): own})["key", 0], 2, 8)
    parts = joint_parts(bound)
    assert parts is not None
    _, transform, quantizer = parts
    weights, widths = quantizer.tables["weights"], quantizer.tables["widths"]
    errors = torch.tensor(quantizer.errors, dtype=torch.float64)[widths.long()]
    rounded, unseen = second_order_losses(own, transform, errors)
    assert unseen == pytest.approx(float(weights[widths == 0].sum() / 2), rel=1e-4)
    assert rounded + unseen == pytest.approx(predicted(quantizer, weights, widths), rel=1e-4)
    wide = other.double()
    stored, _ = transform.forward(wide)
    noise = torch.randn(4000, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * errors.sqrt()
    noise[:, widths == 0] = 0
    found = {}
    for name, added in (("unseen", 0 * noise), ("all", noise)):
        error = transform.inverse(stored + added.unflatten(1, (2, 8)).transpose(0, 1), {}) - wide
        rows = error.transpose(0, 1).flatten(1)
        found[name] = float(((rows @ there.fisher) * rows).sum(1).mean() / 2)
    rounded, unseen = second_order_losses(there, transform, errors)
    assert unseen == pytest.approx(found["unseen"], rel=1e-4)
    assert rounded + unseen == pytest.approx(found["all"], rel=0.05)


def given(folder: Path) -> list[str]:
    """The limit on a random model."""
    own = [override for override in small_run(folder) if not override.startswith("task.")]
    return ["task=limit", "task.context=64", *own]


def test_a_run(tmp_path: Path) -> None:
    """The curve falls; bits by layer have the mean that was asked for."""
    run = [*given(tmp_path), "task.windows=2", "method=fp16"]
    assert main([*run, f"results_dir={tmp_path}"]) == 0
    joint = next(iter(records(tmp_path).values()))
    samples = Store(tmp_path).samples_of(joint)
    for rate in ("0.75", "1.25", "2.25", "3"):
        assert joint.units[f"limit_loss_{rate}"] == "nats/token"
        bits = [row["bits"][rate] for row in samples if row["kind"] == "layer"]
        assert sum(bits) / len(bits) == pytest.approx(float(rate))
    curve = [row["loss"] for row in samples if row["kind"] == "curve"]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > 2 * curve[-1]
    assert all(math.isfinite(value) for row in samples if row["kind"] == "layer" for _, value in row["spectrum"])


def test_keys_with_values(tmp_path: Path) -> None:
    """Together they lose no more than apart, and a layer has one row."""
    run = [*given(tmp_path), "task.windows=2", "method=fp16"]
    for heads in ("joint", "both"):
        assert main([*run, f"task.heads={heads}", f"results_dir={tmp_path}"]) == 0
    found = {str(record.config["task"]["heads"]): record for record in Store(tmp_path).scan()[0]}
    for rate in ("0.75", "1.25", "2.25", "3"):
        assert found["both"].metrics[f"limit_loss_{rate}"] < 1.01 * found["joint"].metrics[f"limit_loss_{rate}"]
    rows = [row for row in Store(tmp_path).samples_of(found["both"]) if row["kind"] == "layer"]
    assert {row["side"] for row in rows} == {"both"}


@pytest.mark.parametrize(
    "form", [["method=waterfill/scalar", "bits=1.25"], ["method=waterfill_kv", "task.heads=both", "bits=0.5"]]
)
def test_a_run_of_a_method(form: list[str], tmp_path: Path) -> None:
    """What it would lose by its widths, on its calibration and on this text, and the part that has no bits."""
    run = [*given(tmp_path), "task.windows=2", *form, "method.calibration.samples=2"]
    assert main([*run, "method.calibration.length=256", f"results_dir={tmp_path}"]) == 0
    (record,) = (one for one in records(tmp_path).values() if one.method != "fp16")
    for name in ("", "_here"):
        assert 0 < record.metrics[f"unseen_loss{name}"] < record.metrics[f"predicted_loss{name}"]
        assert record.units[f"unseen_loss{name}"] == "nats/token"


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = given(tmp_path)
    for extra, told in (
        (["method=kivi", "bits=2"], "task=limit: method=kivi has no spectrum"),
        (["method=waterfill", "bits=2", "task.heads=both"], "task.heads=both: the limit alone"),
        (["method=waterfill_kv", "bits=2"], "task.heads=both: the limit alone"),
        (["method=fp16", "task.rates=[0]"], "task.rates="),
        (["method=fp16", "task.ridge=0"], "task.ridge=0"),
        (["method=fp16", "task.left_out=64"], "task.left_out=64: at most 63"),
    ):
        assert main([*run, *extra, f"results_dir={tmp_path}"]) != 0
        assert told in capsys.readouterr().err
