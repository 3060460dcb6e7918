"""A sweep of 16 runs in one process and over two, in turns: wall time of the commands, records and all.

Both wait for full precision once, so two processes can reach (1 + 8) / (1 + 16) of one, and of nine runs only 6 / 10.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attention_bench

ROOT = Path(__file__).parents[2]
SWEEP = ["-m", "method=nsn,oscar,kivi,rtn", "bits=2,3,4,8", "threads=1", "task.max_windows=16"]
TWO = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def said(swept: Mapping[str, Any]) -> str:
    """What `measure` found, as a line says it."""
    runs = math.prod(word.count(",") + 1 for word in swept["sweep"])
    return f"{swept['ratio_median']:8.2f}x of one process, {runs} runs"


def seconds(overrides: list[str]) -> float:
    """Wall time of the sweep, as a command, into an empty folder.

    Raises:
        subprocess.CalledProcessError: a run of the sweep has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "run.py"), *SWEEP, *overrides, f"results_dir={folder}"]
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - start


def measure(pairs: int) -> dict[str, Any]:
    """Time over two processes (joblib) by that of one; a thread each."""
    taken = [(seconds(TWO), seconds([])) for _ in range(pairs)]
    two, one = zip(*taken, strict=True)
    return {"sweep": SWEEP, "two_processes": TWO, "seconds": taken, **attention_bench.ratios(two, one)}
