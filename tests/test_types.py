"""Shapes and types of kvq, checked at each call of a part of the tests; `make test-all` checks them in all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def has_codecs(path: Path) -> bool:
    """Whether a method has a codec of its own for keys and for values, as test_every_method.py wants."""
    text = path.read_text(encoding="utf-8")
    return "_target_: kvq.codecs.Codec" in text and "_target_: kvq.codecs.StoredWithKeys" not in text


CODED = sorted(path.stem for path in ROOT.glob("**/conf/method/*.yaml") if has_codecs(path))
EVERY_METHOD = [f"tests/codecs/test_every_method.py::test_a_block_is_on_its_own[{name}-16]" for name in CODED]
EVERY_ROOM = [
    "tests/cache/test_cache.py",
    "plugins/kvq_zoo/tests/test_eviction.py::test_equal_budgets_are_equal_bytes",
    "tests/cache/test_packed.py::test_sliding_window_and_softcap",
    "tests/cache/test_packed.py::test_forks_and_beams",
    "tests/calibration/test_collect.py",
    "tests/diagnostics/test_fidelity.py",
    "tests/models/test_outliers.py",
    "tests/results/test_statistics.py",
    "tests/tasks/test_capture.py",
    "tests/tasks/test_tni.py",
    "tests/test_runner.py::test_the_canaries",
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(os.environ.get("KVQ_TYPES") == "1", reason="every test checks types with KVQ_TYPES=1")
@pytest.mark.parametrize("words", [[*EVERY_METHOD, "-m", ""], EVERY_ROOM], ids=["every method", "every room"])
def test_shapes_and_types_hold_at_each_call(words: list[str]) -> None:
    """In a process of its own, since the checks go into the modules as they are imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    names = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST")
    settings = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        command, cwd=ROOT, env=settings | {"KVQ_TYPES": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
