"""Runs of transformers' own quantized cache: scored in decode mode, labelled so, and refused where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.cli import main
from kvq.report.tables.build import build_tables
from kvq.results import Store
from kvq_zoo.library_caches import BITS, is_installed
from tests.sweeps import records, refused, small_run

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(not is_installed(name), reason=f"extra [{name}]")) for name in BITS
]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sweep_is_measured_and_labelled(name: str, tmp_path: Path) -> None:
    given = [*small_run(tmp_path), f"results_dir={tmp_path / 'results'}"]
    assert main(["-m", *given, f"method={name}", "bits=2,4"]) == 0
    found = records(tmp_path / "results")
    assert set(found) == {"fp16", f"{name} 2", f"{name} 4"}
    low, high = found[f"{name} 2"], found[f"{name} 4"]
    assert low.config["method"]["backend"] == {
        "_target_": "kvq_zoo.library_caches.LibraryCache",
        "name": name,
        "bits": 2,
        "group_size": 64,
    }
    assert low.config["residual"]["key"]["size"] == 32
    assert low.versions["LibraryCache"] >= 1
    for record, bits in ((low, 2), (high, 4)):
        # Scale and zero point are in the model's fp32; quanto fills its last bytes up.
        measured = record.metrics["bits_per_element"]
        assert bits + 1 <= measured < bits + 1.04
        # 95 tokens: one, then twice 32, and 30 that wait.
        assert record.metrics["effective_bits"] == pytest.approx(
            (65 * record.metrics["bits_per_element"] + 30 * 32) / 95
        )
    assert low.metrics["kl_mean"] > high.metrics["kl_mean"] > 0
    (table,) = build_tables(Store(tmp_path / "results")).tables
    assert any(note.startswith(f"{name}, residual 32: decode mode.") for note in table.notes)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("task.scoring=parallel", "scoring=parallel: backend of {} quantizes anew"),
        ("residual=none", "residual: {} has that of transformers' cache"),
        ("bits=k4v2", "keys and values of the same bits"),
    ],
)
def test_what_it_cannot_do_is_one_line(
    name: str, change: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*small_run(tmp_path), f"results_dir={tmp_path / 'results'}", f"method={name}", "bits=4"]
    refused(capsys, run, change, says.format(name))
