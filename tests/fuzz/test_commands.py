"""Command lines with wild values, and models and texts with wild bytes: an answer or one line, never a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from kvq.cli import main
from kvq.config import compose
from kvq.results import Store
from tests.fuzz.odd_records import changed
from tests.sweeps import small_run

COUNT = int(os.environ.get("KVQ_FUZZ", "1000"))
WILD = [
    *(
        "null",
        "-1",
        "0",
        "1",
        "3",
        "2.5",
        "-0.5",
        "1e9",
        "99999999999999999999",
        "nan",
        "inf",
        "true",
        "abc",
        "''",
        "' '",
    ),
    *("[]", "[1,2]", "[[]]", "[null]", "{}", "{a: 1}", "{key: 2, value: 3}", "${seed}", "${nowhere}", "???", "'a b'"),
    *("é", "x" * 300, "'[1'", "'{'", "_target_", "k3v2", "'%s'", "'{0}'", "'\\u202e'", "[a,a]", "0x10", "1_000"),
]
METHODS = [
    "fp16",
    "rtn",
    "kivi",
    "nsn",
    "oscar",
    "nsnquant",
    "kvquant",
    "snapkv",
    "h2o/kivi",
    "ott",
    "zipcache",
    "quanto",
]
TASKS = ["ppl", "niah", "error", "memory", "latency", "tni", "synthetic", "longbench", "lm_eval", "multimodal"]
# What would write elsewhere, or ask the hub for a name that was made up.
SPARED = (
    "hydra",
    "results_dir",
    "logger",
    "model.path",
    "model.revision",
    "dataset.hub",
    "dataset.data_files",
    "layout",
)

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(7200)]


def answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Exit code of a command line; fails where it raises or shows a traceback."""
    try:
        code = main(words)
    except BaseException as error:  # what a shell would show as a traceback
        pytest.fail(f"{words}: {type(error).__name__}: {error}")
    said = capsys.readouterr().err
    assert code in (0, 1, 2), words
    assert "Traceback" not in said, f"{words}: {said[-2000:]}"
    if code and "-m" not in words:
        assert [line for line in said.splitlines() if line.startswith("error: ")], words
    return code


def leaves(value: Any, name: str = "") -> list[str]:
    """Every setting that a composed configuration has, groups of settings included."""
    parts = value.items() if isinstance(value, dict) else ()
    own = [name] if name and not name.startswith(SPARED) else []
    return own + [leaf for key, part in parts for leaf in leaves(part, f"{name}.{key}" if name else str(key))]


@pytest.mark.parametrize("seed", range(4))
def test_wild_values_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    rng = random.Random(seed)
    base = [*small_run(tmp_path), f"results_dir={tmp_path / 'results'}"]
    known: dict[tuple[str, str], list[str]] = {}
    for number in range(COUNT // 4):
        method, task = rng.choice(METHODS), rng.choice([*TASKS, "ppl", "ppl", "ppl"])
        chosen = [f"method={method}", f"task={task}"]
        if (method, task) not in known:
            known[method, task] = leaves(OmegaConf.to_container(compose(chosen), resolve=False))
        given = [
            f"{rng.choice(['', '', '', '+', '~', '++'])}{rng.choice(known[method, task])}"
            for _ in range(rng.randint(1, 3))
        ]
        wild = [word if word.startswith("~") else f"{word}={rng.choice(WILD)}" for word in given]
        kept = [word for word in base if task == "ppl" or not word.startswith("task.")]
        # Measured for real now and then, where that takes a moment.
        real = number % 5 == 0 and task == "ppl" and method in ("fp16", "rtn", "kivi", "nsn")
        answered([*kept, *chosen, *wild, *([] if real else ["plan=true"])], capsys)
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


@pytest.mark.parametrize("seed", range(2))
def test_wild_bytes_of_models_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    rng = random.Random(seed)
    base = [*small_run(tmp_path), "task.max_windows=1", "method=rtn", "bits=2", "threads=1"]
    texts = {"a.txt": b"word " * 300, "a.jsonl": b'{"text": "' + b"word " * 200 + b'"}\n'}
    texts["a.json"] = json.dumps([{"text": "word " * 200}, {"text": "more"}]).encode()
    import gzip

    import pandas

    texts["a.jsonl.gz"] = gzip.compress(texts["a.jsonl"])
    pandas.DataFrame({"text": ["word " * 200]}).to_parquet(tmp_path / "a.parquet")
    texts["a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    for number in range(COUNT // 5 // 2):
        results = f"results_dir={tmp_path / 'results' / str(number)}"
        if number % 3 == 0:
            name = rng.choice(sorted(texts))
            (tmp_path / name).write_bytes(torn(texts[name], rng))
            kept = [word for word in base if not word.startswith("dataset.path=")]
            answered([*kept, f"dataset.path={tmp_path / name}", results], capsys)
            continue
        shutil.rmtree(tmp_path / "odd", ignore_errors=True)
        shutil.copytree(tmp_path / "model", tmp_path / "odd")
        file = rng.choice(sorted(path for path in (tmp_path / "odd").iterdir() if path.is_file()))
        file.write_bytes(torn(file.read_bytes(), rng))
        kept = [word for word in base if not word.startswith("model.path=")]
        answered([*kept, f"model.path={tmp_path / 'odd'}", results], capsys)
