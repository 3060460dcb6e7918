"""Items for the tasks of suites: lm-eval's own task files, whose data is replaced by an item that is made here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ITEMS: dict[str, dict[str, Any]] = {
    "aime": {"Problem": "What is 1 + 2?", "Answer": "3", "problem": "What is 1 + 2?", "answer": "3"},
    "hendrycks_math": {"problem": "What is 1 + 2?", "solution": "It is $\\boxed{3}$.", "answer": "3"},
    "gpqa": {"Question": "Which is red?", "Correct Answer": "blood"}
    | {f"Incorrect Answer {place}": name for place, name in enumerate(("sky", "coal", "snow"), 1)},
    "mmlu_pro": {"question": "Which is red?", "options": ["blood", "sky"], "answer": "A", "answer_index": 0}
    | {"cot_content": "A: Let's think step by step. The answer is (A)."},
    "ifeval": {"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"]}
    | {"kwargs": [{"num_words": None}]},
    "gsm8k": {"question": "What is 1 + 2?", "answer": "1 + 2 = 3\n#### 3"},
    "longbench2": {"context": "Blood is red.", "question": "Which is red?", "answer": 0}
    | {"choices": ["blood", "sky", "coal", "snow"]},
    "ruler": {"input": "One of ann is 3. What is it?", "outputs": ["3"], "gen_prefix": "It is", "max_length": 4096},
    "infinitebench": {"id": 0, "context": "The key is 3.", "input": "What is it?", "answer": ["3"]}
    | {"options": ["1", "2", "3", "4"]},
}
"""An item of each folder of lm-eval's tasks, with the fields that its files read."""
TASKS = ("aime24", "aime25", "hendrycks_math500", "gpqa_diamond_cot_zeroshot", "ifeval", "gsm8k")
"""Of folders with other tasks beside (`_MIXED`); of the others all are taken."""
_MIXED = ("aime", "hendrycks_math", "gpqa", "ifeval", "gsm8k")


def write_suites(folder: Path) -> None:
    """Write lm-eval's tasks and groups of `ITEMS` with data from here."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    root = Path(lm_eval.tasks.__file__).parent
    for family, item in ITEMS.items():
        for file in sorted((root / family).rglob("*.yaml")):
            known = load_yaml(file, resolve_func=False)
            if "group" in known:
                (folder / f"{known['group']}_group.yaml").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
            elif isinstance(known.get("task"), str) and (family not in _MIXED or known["task"] in TASKS):
                _write_task(folder, file, known, item)


def _write_task(folder: Path, file: Path, known: dict[str, Any], item: dict[str, Any]) -> None:
    name = known["task"]
    rows = [item | {"category": name.removeprefix("mmlu_pro_").replace("_", " ")}] * 2
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    splits = {known.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot")} - {None}
    task: dict[str, Any] = {"include": str(file), "task": name, "dataset_path": "json", "dataset_name": None}
    files = dict.fromkeys(sorted(splits), str(data))
    task["dataset_kwargs"] = {"data_files": files, "cache_dir": str(folder / "cache" / name)}
    task |= {"custom_dataset": None} if "custom_dataset" in known else {}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def without_extras(patch: pytest.MonkeyPatch) -> None:
    """Stand-ins of what IFEval and RULER import and these items do not call."""
    import nltk

    patch.setattr(nltk.data, "find", lambda *_, **__: "")
    for name in ("langdetect", "immutabledict"):
        try:
            __import__(name)
        except ImportError:
            patch.setitem(sys.modules, name, SimpleNamespace(immutabledict=dict))  # type: ignore[arg-type]
