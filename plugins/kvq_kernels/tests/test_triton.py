"""Triton kernels in Triton's interpreter, on CPU tensors; on a GPU, `experiments/bench/gpu_check.py` compiles them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]


def run(*command, **environment):
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["methods", "tables", "shifted", "drawn", "shapes", "layouts"])
def test_interpreted(part):
    run("kvq_kernels.tests.interpreted", part, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["methods", "exact", "shapes", "chains", "books"])
def test_encoding_interpreted(part):
    run("kvq_kernels.tests.interpreted_encode", part, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_trellises_interpreted():
    run("kvq_kernels.tests.interpreted_trellis", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_compiled_for_an_h100(tmp_path):
    run("kvq_kernels.tests.compiled", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
