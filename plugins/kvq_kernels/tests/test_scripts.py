"""The scripts that measure attention on packed codes, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.long
def test_the_gpu_check_runs_without_one(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "experiments/bench/gpu_check.py", "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text(encoding="utf-8"))
    assert not report["left_out"]
    assert not report["failed"]
    for name, error in report["errors"].items():
        assert error < (1e-5 if name.endswith("float32") else 2e-3), name
    for name, found in report["encoding"].items():
        assert found["parts_differing"] < 2e-2, name  # fp16 norms whose sums round apart
        assert found["decoded_difference"] < 2e-3, name
    for cell in report["attention"] + report["attention_by_tables"]:
        assert cell["fastest_sdpa"].startswith("sdpa")
        assert cell["bytes"] * cell["memory_ratio"] == pytest.approx(cell["bf16_bytes"])
    assert set(report["encode"]) == {f"oscar_2b_{side}_{tokens}" for side in ("key", "value") for tokens in (256, 128)}
    assert report["encode_share"]["encode_share_of_prefill"] < 1
    ends = report["end_to_end"]
    assert ends["packed"]["cache_bytes"] <= ends["preallocated"]["cache_bytes"]
    assert ends["packed"]["batch"] > ends["preallocated"]["batch"]
    assert all(found["ratio"] > 2 for found in report["cache_bytes"].values())
