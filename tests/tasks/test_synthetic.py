from __future__ import annotations

from pathlib import Path

import pytest

from kvq import build_method
from kvq.config.diagnostics import SyntheticConfig
from kvq.errors import Unsupported
from kvq.tasks import error
from kvq.tasks.capture import block_of
from kvq.tasks.error import cell
from tests.tasks.diagnosed import DiagnosedInputs, journal


def errors(name: str, lowness: float, outliers: float, sink_outliers: bool = False) -> dict[str, float]:
    method = build_method(name, 2, 128)
    assert method.key is not None
    task = SyntheticConfig(repeats=4, sink_outliers=sink_outliers)
    return cell(method.key, task, block_of(method.residual.key), lowness, outliers)


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
