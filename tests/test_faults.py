"""What is killed, shared or refused disk loses nothing: processes that really die, on real sweeps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvq.cli import main
from kvq.results import Store
from tests.sweeps import numbers, records, small_run

SWEEP = ["-m", "method=nsn,rtn", "bits=2,3"]

# Importing takes seconds and torch's threads do not survive a fork: a server imports once and forks clean children.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["conftest", "tests.test_faults", "kvq.runs"])


def _command(words: list[str], log: Path | None = None) -> None:
    """Run a command line; with `log`, add a line to it for each run that is measured."""
    import torch

    from kvq import runs

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull if log is None else f"{log}.{os.getpid()}", "w")  # noqa: SIM115, PTH123
    if log is not None:
        measure = runs._measure

        def logged(prepared, *rest):  # type: ignore[no-untyped-def]
            with log.open("a") as stream:
                stream.write(f"{prepared.key}\n")
            return measure(prepared, *rest)

        runs._measure = logged
    sys.exit(main(words))


def _again_and_again(words: list[str]) -> None:
    while True:
        with contextlib.suppress(SystemExit):
            _command(words)


def _small_files(words: list[str], log: Path) -> None:
    # A file may not pass this size: as a full disk, it fails in the middle of a write.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    _command(words, log)


def start(target: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = _server.Process(target=target, args=arguments)
    process.start()
    return process


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 100])
def test_many_kills_and_one_clean_run(tmp_path: Path, kills: int) -> None:
    given = [*small_run(tmp_path), "task.max_windows=4"]
    whole, results = tmp_path / "whole", tmp_path / "killed"
    for _ in range(2):  # the second time says how long a sweep takes once everything is imported
        began = time.monotonic()
        clean = start(_command, [*given, *SWEEP, f"results_dir={whole}", "force=true"])
        clean.join()
        assert clean.exitcode == 0
        took = time.monotonic() - began
    moments = random.Random(7)
    for _ in range(kills):
        process = start(_again_and_again, [*given, *SWEEP, f"results_dir={results}", "force=true"])
        time.sleep(moments.uniform(0.1, 1.2) * took)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    found, broken = Store(results).scan()
    assert found
    assert not broken
    assert len({record.key for record in found}) == len(found)
    last = start(_command, [*given, *SWEEP, f"results_dir={results}"])
    last.join()
    assert last.exitcode == 0
    assert numbers(results) == numbers(whole)
    for record in records(results).values():
        assert len(Store(results).samples(record.key)) == 4
    assert not [path for path in (results / "runs").iterdir() if path.name.endswith(".tmp")]


@pytest.mark.long
@pytest.mark.slow
def test_four_processes_on_one_sweep_measure_each_run_once(tmp_path: Path) -> None:
    given = small_run(tmp_path)
    results, log = tmp_path / "results", tmp_path / "log"
    together = [start(_command, [*given, *SWEEP, f"results_dir={results}"], log) for _ in range(4)]
    for process in together:
        process.join()
    assert [process.exitcode for process in together] == [0] * 4
    measured = log.read_text().split()
    assert len(measured) == len(set(measured)) == len(records(results)) == 5


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_a_line_and_no_record(tmp_path: Path) -> None:
    given = [*small_run(tmp_path), f"results_dir={tmp_path / 'results'}"]
    first = start(_command, [*given, "method=rtn", "bits=2"])
    first.join()
    before = {path.name: path.read_bytes() for path in (tmp_path / "results" / "runs").rglob("*.json*")}
    assert len(before) == 4
    full = start(_small_files, [*given, "method=rtn", "bits=3"], tmp_path / "log")
    full.join()
    assert full.exitcode == 1
    said = (tmp_path / f"log.{full.pid}").read_text().strip().splitlines()[-1]
    assert said.startswith("error: results_dir: cannot write")
    assert {path.name: path.read_bytes() for path in (tmp_path / "results" / "runs").rglob("*.json*")} == before
