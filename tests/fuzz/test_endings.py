"""Commands that are stopped, or whose output goes nowhere, at random: at most one line, the right status, no traceback.

Most run in children of a server that has imported everything, so that a signal falls among the work; some are processes
of their own, where it falls among the imports.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from kvq.results import Store
from tests.fuzz.amounts import pieces
from tests.fuzz.odd_records import examples, put
from tests.fuzz.test_commands import METHODS, WILD, fail_of, settings_of
from tests.sweeps import small_run

ROOT = Path(__file__).parents[2]
HOW = ("SIGINT", "SIGTERM", "closed", "full", "ascii", "")
KINDS = {"run": 20, "sweep": 6, "ls": 6, "help": 6, "diff": 6, "report": 3, "html": 3, "figures": 1, "papers": 1}
"""Commands, and how often each is tried."""
LONG = ("papers", "figures")
"""Commands that are only stopped: whole they compose and draw for a minute."""
REASON = re.compile(r"(python -m [\w.]+: )?error: ")
"""How a line begins that says why a command failed; argparse names the command."""
HANGS_SECONDS = 600.0
PROCESS = 12
"""One of so many is a process of its own."""
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["conftest", "kvq.runs", "kvq.sweep", "kvq.cli", "kvq.papers.figures"])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


class Ending(NamedTuple):
    """A command line, how it is disturbed, and after how many seconds of its work."""

    words: list[str]
    how: str
    after: float


def _stopped_later(number: signal.Signals, after: float) -> None:
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)
    time.sleep(after)
    os.kill(os.getpid(), number)


def _command(ending: Ending, log: Path) -> None:
    """Run a command in this process, whose standard streams become what `how` says."""
    from kvq.entry import main

    out = os.open("/dev/full" if ending.how == "full" else os.devnull, os.O_WRONLY)
    if ending.how == "closed":
        reader, out = os.pipe()
        os.close(reader)
    os.dup2(out, 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    encoding = "ascii" if ending.how == "ascii" else "utf-8"
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding=encoding, closefd=False) for number in (1, 2))
    sys.argv = ["run.py", *ending.words]
    if ending.how.startswith("SIG"):
        given = (signal.Signals[ending.how], ending.after)
        threading.Thread(target=_stopped_later, args=given, daemon=True).start()
    main()


def judged(ending: Ending, code: int | None, said: str) -> str | None:
    """What is wrong with how a command ended."""
    lines, allowed = said.splitlines(), {0, 1, 2}
    stopped = [line for line in lines if line.endswith("what is done is kept, repeat the command to go on")]
    if ending.how.startswith("SIG"):
        allowed |= {128 + signal.Signals[ending.how]}
        if any(REASON.match(line) for line in lines):  # it was over: Python's own end has no handlers any more
            allowed |= {-signal.Signals[ending.how]}
    if ending.how == "closed":
        allowed |= {141}
    if "Traceback" in said or "Exception ignored" in said:
        return f"{ending}: {said[-3000:]}"
    if code not in allowed or (code in (130, 143)) != bool(stopped) or len(stopped) > 1:
        return f"{ending}: exit code {code}: {said[-3000:]}"
    if code not in (0, 141) and not any(REASON.match(line) for line in lines):
        return f"{ending}: exit code {code} without a reason: {said[-3000:]}"
    return None


def in_child(ending: Ending, log: Path) -> str | None:
    child = _server.Process(target=_command, args=(ending, log))
    child.start()
    child.join(HANGS_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        return f"{ending}: took more than {HANGS_SECONDS:.0f} seconds"
    return judged(ending, child.exitcode, log.read_text(errors="replace") if log.exists() else "")


def in_process(ending: Ending) -> str | None:
    """A process of its own is disturbed by a signal, or not at all."""
    command = [sys.executable, "run.py", *ending.words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{process.pid}/status")
    if ending.how.startswith("SIG"):
        while not _catches(status.read_text(), signal.SIGTERM) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(ending.after)
        process.send_signal(signal.Signals[ending.how])
    _, said = process.communicate(timeout=HANGS_SECONDS)
    return judged(ending, process.returncode, said)


def _catches(status: str, number: int) -> bool:
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def commands(rng: random.Random, base: list[str], records: Path, out: Path) -> list[str]:
    """A run with wild settings, a sweep, or a command on records."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind in ("run", "sweep"):
        method = rng.choice(METHODS)
        wild = [f"{rng.choice(settings_of(f'method={method}'))}={rng.choice(WILD)}"] if rng.random() < 0.5 else []
        several = ["-m", "bits=2,3"] if kind == "sweep" else []
        return [*several, *base, f"method={method}", *wild, f"results_dir={out}"]
    if kind == "ls":
        return ["ls", *rng.choice([[], ["methods"], ["tasks", "ppl"], ["nothing"], ["models", "\u202e"]])]
    if kind == "help":
        return rng.choice([["--help"], ["--version"], ["--cfg", "job"], ["report", "--help"], ["diff"], ["--nothing"]])
    if kind == "diff":
        return ["diff", str(records), str(rng.choice([records, out]))]
    more = {"report": ["--print"], "figures": []}.get(kind, [])
    return [kind, "--results", str(rng.choice([records, records, out])), "--out", str(out / kind), *more]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what a process catches")
@pytest.mark.parametrize(("seed", "count"), pieces(full=500, quick=5, most=125))
def test_a_command_ends_as_it_should_however_it_is_disturbed(tmp_path: Path, seed: int, count: int) -> None:
    rng, records = random.Random(f"endings {seed}"), tmp_path / "records"
    for record, samples in examples(ROOT / "results", tasks=1)[:6]:
        put(records, record, samples)
    base = [*small_run(tmp_path), "threads=1"]
    wrong: list[str | None] = []
    for number in range(count):
        out = tmp_path / "out" / str(number)
        words = commands(rng, base, records, out)
        own = number % PROCESS == PROCESS - 1
        stopped = own or words[0] in LONG
        how, after = rng.choice(HOW[:2] if stopped else HOW), rng.uniform(0.0, rng.choice([0.05, 0.5, 3.0]))
        ending = Ending(words, how, after)
        wrong.append(in_process(ending) if own else in_child(ending, tmp_path / f"log{number}"))
        assert not Store(out).scan()[1]
    fail_of(wrong)
