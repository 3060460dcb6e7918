"""What a record says about its process is what the system says."""

from __future__ import annotations

import mmap
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvq import cli, runs
from kvq.config import compose, resolve
from kvq.report.labels import label
from kvq.results import Record, Store
from kvq.results.presets import departures_of, find_departures, with_departures
from kvq.results.provenance import PeakMemory, collect, full_precision_words, git_state, single_command, utc_now

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


def test_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    before = utc_now()
    monkeypatch.setattr(sys, "argv", ["/somewhere/run.py", "bits={key: 3, value: 2}", "method=nsn"])
    found = collect(dtype="float32", seed=7, started=before, wall_seconds={"load": 1.5}, peak_memory_bytes=3)
    assert found.command == "run.py 'bits={key: 3, value: 2}' method=nsn"
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.packages["torch"] == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert (found.device, found.dtype, found.seed) == ("cpu", "float32", 7)
    assert (found.started, found.wall_seconds, found.peak_memory_bytes) == (before, {"load": 1.5}, 3)
    assert (found.dataset_fingerprint, found.model_fingerprint) == (None, None)
    assert found.cpu


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_memory_of_a_gpu() -> None:
    peak = PeakMemory("cuda")
    block = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    del block
    found = peak.read()
    assert found is not None
    assert found >= 64 * MIB


COMMITTED = Path(__file__).parents[2] / "results"
WINDOWS = "task.context=128 task.stride=128 task.max_windows=2"
WORDS = f"model=tiny method=kivi bits=2 method.sink_tokens=1 {WINDOWS}".split()


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return Store(COMMITTED).scan()[0]


def test_a_run_keeps_its_words_and_the_command_that_measures_it_alone(tmp_path: Path) -> None:
    given = [*WORDS, f"results_dir={tmp_path}"]
    record = runs.run(resolve(compose(given)), lambda: given)
    assert record.label == label(record) == "kivi, sink tokens 1"
    assert record.from_presets == find_departures(record)
    assert record.command == f"python run.py {' '.join(WORDS)}"
    assert record.baseline_key is not None
    baseline = Store(tmp_path).get(record.baseline_key)
    assert baseline is not None
    assert baseline.command == f"python run.py model=tiny {WINDOWS} method=fp16"
    for one in (record, baseline):
        assert one.command is not None
        again = resolve(compose([*shlex.split(one.command)[2:], f"results_dir={tmp_path}"]))
        assert runs.Prepared(again).key == one.key


def test_the_words_are_those_of_the_day_of_measuring(records: list[Record]) -> None:
    """They are not asked of presets again, which may have changed or be gone."""
    record = next(record for record in records if record.from_presets and not record.from_presets.method)
    kept = record.model_copy(update={"method": "a preset that is gone"})
    assert label(kept) == "a preset that is gone"
    changed = with_departures(record).model_copy(
        update={"from_presets": record.from_presets.model_copy(update={"method": ["+ x"]})}
    )
    assert label(changed) == f"{record.method} + x"


@pytest.mark.every_plugin
def test_a_record_of_an_earlier_version_has_words_all_the_same(records: list[Record]) -> None:
    for record in records[::40]:
        before = record.model_copy(update={"from_presets": None, "label": None, "command": None})
        assert (label(before), departures_of(before).protocol) == (label(record), departures_of(record).protocol)


def test_words_do_not_depend_on_the_order_of_settings(records: list[Record]) -> None:
    record = next(record for record in records if "calibration length" in str(record.label))
    calibration = record.config["method"]["calibration"]
    turned = {name: calibration[name] for name in sorted(calibration, reverse=True)}
    method = {**record.config["method"], "calibration": turned}
    other = with_departures(record.model_copy(update={"config": {**record.config, "method": method}}))
    assert (other.label, other.from_presets) == (with_departures(record).label, with_departures(record).from_presets)


def test_every_committed_record_has_words_and_a_command(records: list[Record]) -> None:
    assert [record.key for record in records if None in (record.label, record.from_presets, record.command)] == []
    assert [record.command for record in records if "experiment=" in str(record.command)] == []


@pytest.mark.parametrize("asked", ["+experiment=embedded/decoding model=tiny", "+experiment=int4_valley model=tiny"])
def test_the_command_of_a_run_that_an_experiment_asked_for_is_of_that_run_alone(tmp_path: Path, asked: str) -> None:
    given = "method=rtn bits=2 task.context=64 task.stride=64 task.max_windows=1"
    assert cli.main([*asked.split(), *given.split(), f"results_dir={tmp_path}"]) == 0
    records = Store(tmp_path).scan()[0]
    assert {record.method for record in records} == {"fp16", "rtn"}
    for record in records:
        assert record.command is not None
        assert "experiment" not in record.command
        again = resolve(compose([*shlex.split(record.command)[2:], f"results_dir={tmp_path}"]))
        assert runs.Prepared(again).key == record.key


def test_a_command_is_without_places_and_a_baseline_without_the_method() -> None:
    words = ["+experiment=main", "results_dir=/tmp/x", "plan=true", "task.stop=[a, b]", "method.key=null"]
    words.append("residual.size=8")
    assert single_command(words) == "python run.py +experiment=main 'task.stop=[a, b]' method.key=null residual.size=8"
    assert full_precision_words(words[3:]) == ["task.stop=[a, b]", "method=fp16"]
