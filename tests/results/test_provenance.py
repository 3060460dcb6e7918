"""What a record says about its process is what the system says."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from kvq.results import provenance
from kvq.results.provenance import PeakMemory, collect, command_line, device_name, git_state, package_versions, utc_now

MIB = 2**20


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in ("kvq/a.py", "conf/config.yaml", "run.py", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    git_state.cache_clear()


def test_clean_and_dirty(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert git_state(checkout / "kvq") == (head, False)
    (checkout / "README.md").write_text("2\n")
    (checkout / "results").mkdir()
    (checkout / "results" / "new.json").write_text("{}")
    git_state.cache_clear()
    assert git_state(checkout / "kvq") == (head, False)
    for name in ("kvq/new.py", "conf/config.yaml", "run.py"):
        git(checkout, "stash", "-qu")
        (checkout / name).write_text("2\n")
        git_state.cache_clear()
        assert git_state(checkout / "kvq") == (head, True), name


def test_somebody_elses_checkout_is_not_ours(checkout: Path) -> None:
    installed = checkout / ".venv" / "kvq"
    installed.mkdir(parents=True)
    (installed / "a.py").write_text("1\n")
    assert git_state(installed) == (None, None)


def test_no_checkout_and_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) == (None, None)
    monkeypatch.setenv("PATH", "")
    git_state.cache_clear()
    assert git_state(tmp_path) == (None, None)


def test_collect() -> None:
    before = utc_now()
    found = collect(dtype="float32", seed=7, started=before, wall_seconds={"load": 1.5}, peak_memory_bytes=3)
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.packages["torch"] == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert (found.device, found.dtype, found.seed) == ("cpu", "float32", 7)
    assert (found.started, found.wall_seconds, found.peak_memory_bytes) == (before, {"load": 1.5}, 3)
    assert (found.dataset_fingerprint, found.model_fingerprint) == (None, None)
    assert found.cpu


def test_time_is_utc() -> None:
    assert utc_now().utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - utc_now()) < timedelta(seconds=2)


def test_versions_of_absent_packages_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGES", ("numpy", "no-such-package-anywhere"))
    package_versions.cache_clear()
    try:
        assert package_versions().keys() == {"numpy"}
    finally:
        package_versions.cache_clear()


def test_command_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/run.py", "bits={key: 3, value: 2}", "method=nsn"])
    assert command_line() == "run.py 'bits={key: 3, value: 2}' method=nsn"


def test_device_name() -> None:
    assert device_name("cpu") == "cpu"
    if torch.cuda.is_available():
        assert device_name("cuda") == torch.cuda.get_device_name()


def test_peak_memory_is_this_runs_alone() -> None:
    first = PeakMemory()
    if first.read() is None:
        pytest.skip("this system cannot reset a process's peak")
    # Pages of its own: an allocator may hand out, and keep, memory that earlier tests left resident.
    with mmap.mmap(-1, 256 * MIB) as block:
        for start in range(0, 256 * MIB, mmap.PAGESIZE):
            block[start] = 1
        high = first.read()
    low = PeakMemory().read()
    assert high is not None
    assert low is not None
    assert 200 * MIB < high - low < 400 * MIB


def test_peak_memory_that_cannot_be_reset_is_not_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PeakMemory, "_RESET", tmp_path / "absent" / "clear_refs")
    assert PeakMemory().read() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_memory_of_a_gpu() -> None:
    peak = PeakMemory("cuda")
    block = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    del block
    found = peak.read()
    assert found is not None
    assert found >= 64 * MIB
