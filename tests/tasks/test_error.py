from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvq import build_method
from kvq.config.diagnostics import Arms, ErrorConfig, SyntheticConfig
from kvq.diagnostics import reconstruct, relative_mse
from kvq.errors import Unsupported
from kvq.tasks import error
from kvq.tasks.error import bins_of, cell
from kvq.tasks.measurement import LayerStates, Measurement, block_of, capture
from tests.tasks.diagnosed import DiagnosedInputs, journal


def measured(folder: Path, name: str, bits: int = 2, overrides: tuple[str, ...] = (), **settings: Any) -> Measurement:
    inputs = DiagnosedInputs(ErrorConfig(context=128, **settings))
    method = build_method(name, bits, 32, overrides)
    error.check_error(inputs, method)
    return error.measure(inputs, method, None, journal(folder))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kvquant", "calibration of kvquant fits tables"),
        ("waterfill_kv", "value of waterfill_kv is stored with the keys"),
    ],
)
def test_calibrated_methods_are_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=f"^task=error: .*{said}"):
        measured(tmp_path, name)


def test_every_stage_of_oscar_before_and_after_rope(tmp_path: Path) -> None:
    found = measured(tmp_path, "oscar", windows=2, arms=Arms.subsets)
    rows = [row for row in found.samples if row["kind"] == "error"]
    cases = {(row["side"], row["arm"], row["rope"]) for row in rows}
    keys = {("key", arm, rope) for arm in ("none", "hadamard", "norm", "hadamard+norm") for rope in ("after", "before")}
    values = {("value", arm, "after") for arm in ("none", "hadamard")}
    assert cases == keys | values | {("both", "complete", "after")}
    assert len(rows) == len(cases) * 2 * 2  # layers, KV heads
    assert set(found.units) == set(found.metrics)


def test_errors_are_those_of_the_codec_on_captured_states(tmp_path: Path) -> None:
    found = measured(tmp_path, "kivi", windows=1)
    method, inputs = build_method("kivi", 2, 32), DiagnosedInputs(ErrorConfig())
    layers: list[LayerStates] = []
    capture(inputs.model, inputs.ids[:128], layers.append)
    assert method.value is not None
    expected = [relative_mse(x.value, method.value.decode(method.value.encode(x.value, 128))) for x in layers]
    assert found.metrics["value_rel_mse"] == pytest.approx(float(torch.stack(expected).mean()))


def test_first_tokens_and_layers_in_full_precision_have_no_error(tmp_path: Path) -> None:
    found = measured(tmp_path, "rtn", overrides=("sink_tokens=100", "full_precision_layers.value=[0]"), windows=1)
    rows = [row for row in found.samples if row["kind"] == "error" and row["complete"] and row["rope"] == "after"]
    assert {row["layer"] for row in rows if row["side"] == "value"} == {1}
    codec, inputs, layers = build_method("rtn", 2, 32).key, DiagnosedInputs(ErrorConfig()), list[Any]()
    capture(inputs.model, inputs.ids[:128], layers.append)
    ends = [torch.cat([x.key[:, :, :100], reconstruct(codec, x.key[:, :, 100:], 128, None)], 2) for x in layers]
    expected = torch.stack([relative_mse(x.key, end) for x, end in zip(layers, ends, strict=True)])
    assert found.metrics["key_rel_mse"] == pytest.approx(float(expected.mean()))


def test_a_sliding_window_leaves_in_whole_groups() -> None:
    for size, name, block in ((0, "rtn", 1), (16, "kivi", 32), (100, "kivi", 96), (100, "rtn", 100)):
        method: Any = build_method(name, 2, 32, ["residual.policy=sliding", f"residual.key.size={size}"])
        assert block_of(method.residual.key, method.key) == block


def test_identity_has_no_error_and_zero_all_of_it(tmp_path: Path) -> None:
    exact, nothing = measured(tmp_path, "identity").metrics, measured(tmp_path, "zero").metrics
    for side in ("key", "value"):
        assert exact[f"{side}_rel_mse"] == 0
        assert exact[f"{side}_output_error"] < 1e-20
        assert exact[f"{side}_cosine"] == pytest.approx(1)
        assert nothing[f"{side}_rel_mse"] == 1
    assert exact["key_weight_kl"] < 1e-12
    assert nothing["value_output_error"] == pytest.approx(1)
    assert nothing["both_output_error"] == pytest.approx(1)


def test_both_is_not_the_sum_of_its_sides(tmp_path: Path) -> None:
    found = measured(tmp_path, "oscar").metrics
    keys, values = (found[f"{side}_output_error"] for side in ("key", "value"))
    assert max(keys, values) < found["both_output_error"]
    only_values = measured(tmp_path, "oscar", overrides=("key=null",)).metrics
    assert only_values["both_output_error"] == pytest.approx(values)
    assert "key_rel_mse" not in only_values


def test_full_precision_reads_no_weights(tmp_path: Path) -> None:
    found = measured(tmp_path, "fp16")
    assert found.samples == []
    assert found.metrics == {"windows": 2.0, "context": 128.0}


def test_bins_cover_every_position_once() -> None:
    assert bins_of(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert bins_of(2, 5) == [(0, 1), (1, 2)]


def errors(name: str, lowness: float, outliers: float, sink_outliers: bool = False) -> dict[str, float]:
    method = build_method(name, 2, 128)
    assert method.key is not None
    task = SyntheticConfig(repeats=4, sink_outliers=sink_outliers)
    return cell(method.key, task, block_of(method.residual.key, method.key), lowness, outliers)


def test_a_shared_scale_loses_a_low_sink_and_its_norm_keeps_it() -> None:
    without = [errors("oscar/cr_only", lowness, 0.0)["sink_error"] for lowness in (1.0, 5.0, 20.0)]
    scaled = [errors("oscar", lowness, 0.0)["sink_error"] for lowness in (1.0, 5.0, 20.0)]
    assert without[0] < 0.2 < 2 < without[1] < 20 < without[2]
    assert max(scaled) < 0.2


def test_low_norm_alone_does_not_harm_the_neighbours() -> None:
    high, low = (errors("kivi/block", lowness, 0.0)["neighbour_apart_error"] for lowness in (1.0, 50.0))
    assert low == pytest.approx(high, rel=0.1)


def test_a_sink_without_the_others_outliers_harms_them_at_any_norm() -> None:
    """What widens a group's range is where the sink points, not how low it is; scaling makes that worse."""
    alike = errors("kivi/block", 1.0, 20.0, sink_outliers=True)["neighbour_apart_error"]
    apart = [errors("kivi/block", lowness, 20.0)["neighbour_apart_error"] for lowness in (1.0, 50.0)]
    assert min(apart) > 1.5 * alike
    assert apart[0] == pytest.approx(apart[1], rel=0.1)
    assert errors("oscar/ots_only", 50.0, 20.0)["neighbour_apart_error"] > 1.2 * apart[1]


def test_a_plane_of_cells(tmp_path: Path) -> None:
    task = SyntheticConfig(lowness=[1.0, 10.0], outliers=[0.0, 5.0, 20.0], repeats=2, sinks=0)
    inputs = DiagnosedInputs(task)
    found = error.measure_synthetic(inputs, build_method("identity"), None, journal(tmp_path))
    assert len(found.samples) == 6
    assert all(row["error"] == 0 for row in found.samples)
    assert "sink_error_mean" not in found.metrics
    assert error.measure_synthetic(inputs, build_method("fp16"), None, journal(tmp_path)).metrics == {"cells": 6.0}


def test_methods_of_values_alone(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="leaves keys in full precision"):
        error.check_synthetic(DiagnosedInputs(SyntheticConfig()), build_method("nsn", 2, 128, ["key=null"]))
