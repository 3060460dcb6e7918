"""Sweeps under Hydra's launchers: the same records, the same table, the same exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvq.cli import main
from tests.sweeps import numbers, records, small_run

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_a_sweep_under_a_launcher_is_the_same_sweep(tmp_path: Path, launcher: str) -> None:
    if launcher == "ray":
        pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    given = small_run(tmp_path)
    sweep = ["-m", "bits=1,2", "dataset.path=squares.txt,gone.txt"]
    given = [word for word in given if not word.startswith("dataset.path")]
    (tmp_path / "here").mkdir()
    command = [sys.executable, str(ROOT / "run.py"), *given, *sweep, "results_dir=there", f"hydra/launcher={launcher}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 3
    assert sum("gone.txt" in line for line in said) == 2
    assert sum("nsn does 2 to 8 bits" in line for line in said) == 2
    assert "fp16" in done.stdout
    alone = [f"dataset.path={tmp_path / 'squares.txt'}", f"results_dir={tmp_path / 'here'}"]
    assert main([*given, "-m", "bits=1,2", *alone]) == 1
    assert numbers(tmp_path / "there") == numbers(tmp_path / "here")
    assert set(records(tmp_path / "there")) == {"fp16", "nsn 2"}


def test_a_launcher_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "bits=2,3", "hydra/launcher=joblb"]) == 2
    assert "hydra/launcher=joblb: one of basic" in (said := capsys.readouterr().err)
    assert "Did you mean 'joblib'" in said
    assert said.count("\n") == 1
