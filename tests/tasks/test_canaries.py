"""The canaries on the embedded model: a protocol that does not read the cache is found here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.cli import main
from kvq.results import Store

# Windows measured, and how many standard errors decoding to zeros then costs at least.
FEW, MANY = (12, 7), (384, 50)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("windows", "scoring", "measured"),
    [
        ("sliding", "generation", FEW),
        pytest.param("disjoint", "parallel", FEW, marks=pytest.mark.long),
        *(
            pytest.param(windows, scoring, MANY, marks=pytest.mark.long)
            for windows in ("sliding", "disjoint")
            for scoring in ("generation", "parallel")
        ),
    ],
    ids=str,
)
def test_identity_changes_nothing_and_zero_wrecks_the_score(
    tmp_path: Path, windows: str, scoring: str, measured: tuple[int, int]
) -> None:
    number, errors = measured
    protocol = [f"task.windows={windows}", f"task.scoring={scoring}", "residual.size=8", "task.batch_size=16"]
    sizes = ["task.context=256", "task.stride=128", f"task.max_windows={number}", "dataset.max_tokens=131072"]
    assert main(["-m", "method=identity,zero", *protocol, *sizes, f"results_dir={tmp_path}"]) == 0
    found = {record.method: record.metrics for record in Store(tmp_path).scan()[0]}
    # Full precision runs in chunks of 128 tokens and identity in chunks of 8: the same up to rounding.
    assert found["identity"]["delta_nll"] == pytest.approx(0, abs=1e-5)
    assert found["identity"]["kl_mean"] < 1e-6
    assert found["identity"]["top1_agreement"] > 0.9999
    assert found["zero"]["delta_nll"] > errors * found["zero"]["delta_nll_se"] > 0
    assert found["zero"]["bits_per_element"] == 0
