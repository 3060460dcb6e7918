"""Command lines with wild values, and models and texts with wild bytes: an answer or one line, never a traceback."""

from __future__ import annotations

import functools
import gzip
import json
import random
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from kvq.cli import main
from kvq.config import compose
from kvq.results import Store
from tests.fuzz.amounts import SLOWEST_SECONDS, pieces
from tests.fuzz.odd_records import changed
from tests.sweeps import small_run

WILD = [
    *("null", "-1", "0", "1", "3", "2.5", "-0.5", "1e9", "99999999999999999999", "nan", "inf", "true", "abc", "''"),
    *("' '", "[]", "[1,2]", "[[]]", "[null]", "{}", "{a: 1}", "{key: 2, value: 3}", "${seed}", "${nowhere}", "???"),
    *("'a b'", "é", "x" * 300, "'[1'", "'{'", "_target_", "k3v2", "'%s'", "'{0}'", "'\\u202e'", "[a,a]", "0x10"),
    "1_000",
]
METHODS = ["fp16", "rtn", "kivi", "nsn", "oscar", "nsnquant", "kvquant", "snapkv", "h2o/kivi", "ott", "zipcache"]
METHODS += ["quanto"]
TASKS = [
    "ppl",
    "niah",
    "error",
    "memory",
    "latency",
    "tni",
    "synthetic",
    "random_states",
    "model_states",
    "longbench",
    "lm_eval",
    "multimodal",
    "modality",
    "generate",
    "trajectory",
    "reuse",
    "conversation",
    "sensitivity",
    "tools",
]
# What would write elsewhere, or ask the hub for a name that was made up.
SPARED = ("hydra", "results_dir", "logger", "model.path", "model.revision", "dataset.hub", "dataset.data_files")
SPARED += ("layout",)
# One of so many is measured, where that takes a moment, and one of so many goes through a process of its own.
REAL, PROCESS = 5, 50

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(autouse=True)
def _composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes a command line a first time to read `hydra.mode`, which no example here sets."""
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)


def judged(words: list[str], code: int, said: str) -> str | None:
    """What is wrong with an answer: an exit code and what was said on stderr."""
    if "Traceback" in said:
        return f"{words}: {said[-3000:]}"
    if code not in (0, 1, 2):
        return f"{words}: exit code {code}"
    if code and not any(line.startswith("error: ") for line in said.splitlines()):
        return f"{words}: exit code {code} without a reason: {said[-3000:]}"
    return None


def here(words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with the answer to a command line in this process."""
    began = time.monotonic()
    try:
        code = main(words)
    except BaseException:  # what a shell would show as a traceback
        return f"{words}: {traceback.format_exc()[-3000:]}"
    took = time.monotonic() - began
    slow = f"{words}: took {took:.0f} seconds" if took > SLOWEST_SECONDS else None
    return judged(words, code, capsys.readouterr().err) or slow


def fail_of(wrong: list[str | None]) -> None:
    """Fail with all that is wrong."""
    found = list(filter(None, wrong))
    if found:
        pytest.fail(f"{len(found)} of {len(wrong)}:\n\n" + "\n\n".join(found), pytrace=False)


def elsewhere(words: list[str]) -> str | None:
    """What is wrong with the answer to a command line in a process of its own."""
    done = subprocess.run([sys.executable, "run.py", *words], capture_output=True, text=True, check=False)
    return judged(words, done.returncode, done.stderr)


def leaves(value: Any, name: str = "") -> list[str]:
    """Every setting that a composed configuration has, groups of settings included."""
    parts = value.items() if isinstance(value, dict) else ()
    own = [name] if name and not name.startswith(SPARED) else []
    return own + [leaf for key, part in parts for leaf in leaves(part, f"{name}.{key}" if name else str(key))]


@functools.cache
def settings_of(*chosen: str) -> list[str]:
    """The settings of a command line."""
    return leaves(OmegaConf.to_container(compose(chosen), resolve=False))


@pytest.mark.every_plugin
@pytest.mark.parametrize(("seed", "count"), pieces(full=1000, quick=15, most=125))
def test_wild_values_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, count: int) -> None:
    rng = random.Random(seed)
    base = [*small_run(tmp_path), f"results_dir={tmp_path / 'results'}"]
    wrong: list[str | None] = []
    for number in range(count):
        method, task = rng.choice(METHODS), rng.choice([*TASKS, "ppl", "ppl", "ppl"])
        chosen = [f"method={method}", f"task={task}"]
        known = settings_of(f"method={method}", f"task={task}")
        given = [f"{rng.choice(['', '', '', '+', '~', '++'])}{rng.choice(known)}" for _ in range(rng.randint(1, 3))]
        wild = [word if word.startswith("~") else f"{word}={rng.choice(WILD)}" for word in given]
        kept = [word for word in base if task == "ppl" or not word.startswith("task.")]
        real = number % REAL == 0 and task == "ppl" and method in ("fp16", "rtn", "kivi", "nsn")
        words = [*kept, *chosen, *wild, *([] if real else ["plan=true"])]
        wrong.append(here(words, capsys))
        if number % PROCESS == PROCESS - 1:
            wrong.append(elsewhere(words))
    fail_of(wrong)
    assert not Store(tmp_path / "results").scan()[1]


def torn(content: bytes, rng: random.Random) -> bytes:
    """Bytes cut short, turned, repeated or put in between; of JSON also one value changed for an odd one."""
    kind = rng.choice(["cut", "turn", "turn", "insert", "json", "json", "nothing", "swap"])
    if kind == "json":
        try:
            return json.dumps(changed(json.loads(content), rng)).encode("utf-8", "surrogatepass")
        except ValueError:
            kind = "turn"
    if kind == "cut":
        return content[: rng.randrange(len(content) + 1)]
    if kind == "turn":
        changed_bytes = bytearray(content)
        for _ in range(rng.choice([1, 3, 50])):
            place = rng.randrange(min(len(content), rng.choice([64, 4096, len(content)])))
            changed_bytes[place] = rng.randrange(256)
        return bytes(changed_bytes)
    if kind == "insert":
        place = rng.randrange(len(content) + 1)
        return content[:place] + bytes(rng.randrange(256) for _ in range(rng.randint(1, 40))) + content[place:]
    return b"" if kind == "nothing" else bytes(rng.randrange(256) for _ in range(500))


def texts_in(folder: Path) -> dict[str, bytes]:
    """A sound file of each kind that `dataset.path` reads."""
    texts = {"a.txt": b"word " * 300, "a.jsonl": b'{"text": "' + b"word " * 200 + b'"}\n'}
    texts["a.json"] = json.dumps([{"text": "word " * 200}, {"text": "more"}]).encode()
    texts["a.jsonl.gz"] = gzip.compress(texts["a.jsonl"])
    pd.DataFrame({"text": ["word " * 200]}).to_parquet(folder / "a.parquet")
    texts["a.parquet"] = (folder / "a.parquet").read_bytes()
    return texts


@pytest.mark.parametrize(("seed", "count"), pieces(full=200, quick=15, most=50))
def test_wild_bytes_of_models_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, count: int) -> None:
    rng = random.Random(seed)
    base = [*small_run(tmp_path), "task.max_windows=1", "method=rtn", "bits=2", "threads=1"]
    texts = texts_in(tmp_path)
    wrong: list[str | None] = []
    for number in range(count):
        # A folder of its own for each: what a process has read from a path it does not read again.
        odd, results = tmp_path / f"odd{number}", f"results_dir={tmp_path / 'results' / str(number)}"
        if number % 3 == 0:
            odd.mkdir()
            name = rng.choice(sorted(texts))
            (odd / name).write_bytes(torn(texts[name], rng))
            setting, path = "dataset.path=", odd / name
        else:
            shutil.copytree(tmp_path / "model", odd)
            file = rng.choice(sorted(path for path in odd.iterdir() if path.is_file()))
            file.write_bytes(torn(file.read_bytes(), rng))
            setting, path = "model.path=", odd
        words = [*(word for word in base if not word.startswith(setting)), f"{setting}{path}", results]
        wrong.append(here(words, capsys))
        shutil.rmtree(odd)
    fail_of(wrong)
