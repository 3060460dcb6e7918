from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.bench
def test_norms_are_streamed(tmp_path: Path) -> None:
    """At 2,048 tokens on `tiny`, looking at all norms takes less than twice the memory of a plain forward."""
    out = tmp_path / "bench.json"
    command = [sys.executable, "experiments/bench", "--only", "tni_peak_over_forward", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
    peaks = json.loads(out.read_text(encoding="utf-8"))["tni_peak_over_forward"]
    assert peaks["bytes"] < 2 * peaks["forward_bytes"], peaks
