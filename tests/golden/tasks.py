"""Scores of a small case of every task, on random models and made texts.

Latency and throughput have no golden: their scores are times.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from kvq.config import compose, resolve
from kvq.runs import run
from tests.golden.held import Golden
from tests.media_models import picture, save_llava
from tests.random_models import save_random_model
from tests.sweeps import TEXT
from tests.tasks.test_lm_eval import write_tasks
from tests.tasks.test_longbench import item

_WINDOWS = ["task=ppl", "task.context=96", "task.max_windows=4", "task.bootstrap.resamples=50"]
_ITEMS = ["task.resamples=50", "task.noise_floor=false"]
_CAPTURED = ["task.context=96", "task.windows=2"]
_FILES = Path(__file__).parents[2] / "plugins" / "kvq_lab" / "tests" / "bfcl"
_BFCL = [f"task.path={_FILES / 'requests.json'}", f"task.answers={_FILES / 'answers.json'}"]

CASES: dict[str, list[str]] = {
    "ppl sliding generation": [*_WINDOWS, "task.stride=32"],
    "ppl sliding parallel": [*_WINDOWS, "task.stride=32", "task.scoring=parallel"],
    "ppl disjoint generation": [*_WINDOWS, "task.windows=disjoint"],
    "ppl disjoint parallel": [*_WINDOWS, "task.windows=disjoint", "task.scoring=parallel"],
    "ppl continuation": [*_WINDOWS, "task.windows=disjoint", "task.scoring=continuation", "task.prompt=64"],
    "ppl outliers": [*_WINDOWS, "task.stride=32", "model.outliers.key_pairs=2", "model.outliers.value_channels=1"],
    "niah": ["task=niah", "task.lengths=[300]", "task.depths=[0,1]", "task.repeats=2", *_ITEMS],
    "niah distractors": [
        *("task=niah", "task.mode=distractors", "task.lengths=[400]", "task.depths=[0.5]", "task.repeats=4", *_ITEMS)
    ],
    "longbench": ["task=longbench", "task.subsets=[qasper,trec]", "task.max_length=300", "task.limit=1", *_ITEMS],
    "lm_eval": ["task=lm_eval", "task.tasks=[letters,say]", *_ITEMS],
    "multimodal": ["task=multimodal", "task.max_new_tokens=4", *_ITEMS],
    "generate": ["task=generate", "task.max_new_tokens=8", "task.prompt=a square is the number that is the square of"],
    "tools": [
        *("task=tools", "task.items=1", "task.shots=0", "task.padding=8", "task.max_new_tokens=6", *_BFCL, *_ITEMS),
    ],
    "trajectory": ["task=trajectory", "task.prompts=2", "task.context=96", "task.new_tokens=6"],
    "drift": ["task=drift", "task.prompts=2", "task.context=96", "task.new_tokens=8", "task.parts=2"],
    "speculate": ["task=speculate", "task.prompts=2", "task.context=96", "task.new_tokens=6"],
    "conversation": [
        *(
            "task=conversation",
            "task.conversations=2",
            "task.turns=2",
            "task.user=24",
            "task.answer=8",
            "task.branches=1",
        )
    ],
    "reuse": ["task=reuse", "task.windows=2", "task.prefix=64", "task.scored=32"],
    "sensitivity": ["task=sensitivity", *_CAPTURED, "task.maps=3"],
    "tni": ["task=tni", *_CAPTURED],
    "modality": ["task=modality", "task.limit=2", "method=fp16"],
    "error": ["task=error", *_CAPTURED],
    "distribution": ["task=distribution", *_CAPTURED, "method=fp16"],
    "limit": ["task=limit", *_CAPTURED, "method=fp16"],
    "memory": ["task=memory", "task.lengths=[64,300]", "task.measured=100"],
    "synthetic": ["task=synthetic", "task.tokens=32", "task.head_dim=32", "task.repeats=2"],
    "random_states": ["task=random_states", "task.tokens=32", "task.head_dim=32", "task.draws=2", "task.against=nsn"],
    "model_states": ["task=model_states", "task.context=96", "task.held_out=32", "task.windows=2", "task.against=nsn"],
}


def golden_of(name: str, folder: Path) -> Golden:
    """Metrics of one case but its times. `folder` is for its files."""
    task = name.partition(" ")[0]
    place = _FILES.get(task, _texts)
    given = ["method=rtn", "bits=2", "residual.size=16", f"results_dir={folder / 'results'}", "device=cpu", "threads=1"]
    record = run(resolve(compose([*_ordered(CASES[name]), *_later(given, CASES[name]), *place(folder)])))
    assert record.status == "done", record.reason
    seconds = {metric for metric, unit in record.units.items() if unit in ("s", "tokens/s", "MB/s")}
    scores = {metric: [value] for metric, value in record.metrics.items() if metric not in seconds}
    return Golden(versions=record.versions, numbers=scores)


def _ordered(overrides: list[str]) -> list[str]:
    return sorted(overrides, key=lambda override: not override.startswith("task="))


def _later(given: list[str], own: list[str]) -> list[str]:
    """Overrides that a case does not make itself."""
    named = {override.partition("=")[0] for override in own}
    return [override for override in given if override.partition("=")[0] not in named]


def _model(folder: Path) -> list[str]:
    return ["model=hf", f"model.path={save_random_model(folder / 'model')}", "model.dtype=float32"]


def _texts(folder: Path) -> list[str]:
    (folder / "squares.txt").write_text(TEXT, encoding="utf-8")
    return [*_model(folder), "dataset=text", f"dataset.path={folder / 'squares.txt'}"]


def _longbench(folder: Path) -> list[str]:
    data = folder / "longbench"
    data.mkdir()
    for base in ("qasper", "trec"):
        rows = "".join(json.dumps(item(base, number)) + "\n" for number in range(2))
        (data / f"{base}.jsonl").write_text(rows, encoding="utf-8")
    return [*_model(folder), f"dataset.path={data}"]


def _lm_eval(folder: Path) -> list[str]:
    write_tasks(folder)
    model = _model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.eos_token = "~"
    tokenizer.save_pretrained(folder / "model")
    return [*model, f"task.include_path={folder}"]


def _multimodal(folder: Path) -> list[str]:
    save_llava(folder / "model")
    rows = []
    for index in range(3):
        picture(index).save(folder / f"{index}.png")
        kind = {"question_type": "Regular Text Recognition", "dataset": "made", "question": f"what is {index}?"}
        rows.append({"image": f"{index}.png", **kind, "answer": [chr(letter) for letter in range(97, 110)]})
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    local = ["model=hf", f"model.path={folder / 'model'}", "model.dtype=float32"]
    return [*local, f"dataset.path={folder / 'items.jsonl'}"]


_FILES: dict[str, Callable[[Path], list[str]]] = {
    "longbench": _longbench,
    "lm_eval": _lm_eval,
    "multimodal": _multimodal,
    "modality": _multimodal,
    "synthetic": lambda _: [],
    "random_states": lambda _: [],
    "generate": _model,
}
