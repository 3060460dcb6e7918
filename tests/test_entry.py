"""Ctrl-C, SIGTERM, closed pipes, full disks and narrow encodings: one line at most, and the status that shells know."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvq.entry import COMMANDS, main
from kvq.results import Store
from tests.report import sweeps
from tests.results import made

ROOT = Path(__file__).resolve().parents[1]
STARTS = [["run.py"], *(["-m", module.removesuffix(".__main__")] for module in COMMANDS.values())]
STARTS += [["-m", "kvq"]]
"""Ways to start a command of kvq that has something to do; `kvq.config.explain` is one only by its name."""
STARTS = [words for words in STARTS if words[-1] not in ("kvq.config.explain", "kvq.results.store")]
MOST_SECONDS = 60.0
UNIGNORED = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
"""Python's own way with SIGINT, which what a shell starts in the background inherits as ignored."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("results"))
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 32.0)
    sweeps.put_run(store, "kivi", "2", sweeps.losses(0.2, 0.01, 12), full, 2.1)
    store.put(made.record("nsn", "2", task="memory", dataset="shape", metrics={"total_bytes_512": 3e6}))
    return store.root


def started(words: Sequence[str], **streams: int | None) -> subprocess.Popen[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    command = [sys.executable, "-S", "-c", UNIGNORED, sys.executable, *words]
    return subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **given)  # type: ignore[call-overload]


def wait_until_guarded(process: subprocess.Popen[str]) -> None:
    """Wait until the process catches SIGTERM: before, it is Python that starts, and no code of kvq."""
    status = Path(f"/proc/{process.pid}/status")
    until = time.monotonic() + MOST_SECONDS
    while time.monotonic() < until:
        caught = next((line for line in status.read_text().splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("never guarded")


def options(words: Sequence[str], results: Path, out: Path) -> list[str]:
    """A command that has something to do for a while."""
    name = words[-1].removeprefix("kvq.")
    if name in ("run.py", "kvq"):
        return [*words, "model=tiny", "method=kivi", f"results_dir={out}"]
    if name == "recommend.allocate":  # reads the committed records
        return [*words, "model=tiny", "method=kivi", "bits=2"]
    if name == "report.wandb":
        return [*words, "--results", str(results), "--offline"]
    return [*words, "--results", str(results), "--out", str(out / "x")]


@pytest.mark.thin(6)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what a process catches")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("words", STARTS, ids=lambda words: words[-1])
def test_a_signal_is_one_line(words: list[str], number: signal.Signals, results: Path, tmp_path: Path) -> None:
    """While its modules are imported, mostly: a command that would be over before is not taken."""
    process = started(options(words, results, tmp_path))
    wait_until_guarded(process)
    time.sleep(random.Random(f"{words} {number}").uniform(0.0, 0.3))
    process.send_signal(number)
    _, said = process.communicate(timeout=MOST_SECONDS)
    name = {"SIGINT": "interrupted", "SIGTERM": "terminated"}[number.name]
    assert said == f"error: {name}; what is done is kept, repeat the command to go on\n"
    assert process.returncode == 128 + number


@pytest.mark.long
def test_a_signal_that_is_ignored_stays_ignored(results: Path) -> None:
    command = [sys.executable, "-m", "kvq.report", "--results", str(results)]
    script = 'trap "" INT; exec "$@"'  # as a shell does for what it starts in the background
    child = subprocess.Popen(["/bin/sh", "-c", script, "sh", *command], cwd=ROOT, stdout=subprocess.DEVNULL, text=True)
    wait_until_guarded(child)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=MOST_SECONDS) == 0


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


PRINTING = [
    pytest.param(["run.py", "report", "--print"], marks=pytest.mark.long),
    ["run.py", "--help"],
    pytest.param(["run.py", "ls", "methods"], marks=pytest.mark.long),
    pytest.param(["-m", "kvq", "report", "--help"], marks=pytest.mark.long),
]


@pytest.mark.parametrize("words", PRINTING, ids=lambda words: " ".join(words))
def test_outputs_that_cannot_be_written(words: list[str], results: Path) -> None:
    words = [*words, "--results", str(results)] if words[-1] == "--print" else words
    pipe = closed_pipe()
    process = started(words, stdout=pipe)
    os.close(pipe)
    assert process.communicate(timeout=MOST_SECONDS)[1] == ""
    assert process.returncode == 141
    with Path("/dev/full").open("w") as full:
        process = started(words, stdout=full.fileno())
        assert process.communicate(timeout=MOST_SECONDS)[1] == "error: standard output: No space left on device\n"
    assert process.returncode == 1


@pytest.mark.long
def test_an_encoding_without_the_marks(results: Path) -> None:
    command = [sys.executable, "-m", "kvq", "report", "--print", "--results", results, "--out", results / "tables"]
    given = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, check=True)
    assert "kivi" in done.stdout.decode("ascii")
    assert done.stderr == b""


def test_a_command_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr("kvq.entry.enter", entered.append)
    for words in (["ls"], ["method=kivi"], [], ["--help"], ["figures", "--out", "x"]):
        monkeypatch.setattr(sys, "argv", ["kvq", *words])
        main()
        assert "ls" not in sys.argv
        assert "figures" not in sys.argv
    assert entered == ["kvq.config.explain", "kvq.cli", "kvq.cli", "kvq.cli", "kvq.report.figures.every"]
