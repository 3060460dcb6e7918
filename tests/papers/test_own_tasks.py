"""Every metric that a layout names occurs in a record of that layout's own task, made from small items of its kind.

Runs are those of the layout but for their sizes: the model is random, texts and items are made here, and the numbers of
`SMALLER` stand in settings and in the names of metrics alike. A stand-in of the layout (`small:`) is never used.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kvq_engines.tests import installed

import tests.golden.tasks as golden
from kvq.config import compose, resolve
from kvq.config.explain import choices
from kvq.errors import KvqError
from kvq.papers.expected import layout_named, names
from kvq.papers.sweep import Cell, cells_of, missing_choices
from kvq.report.tables.readings import read_metric, read_reference
from kvq.results import Record
from kvq.runs import run
from kvq.tasks import speed
from tests.papers.suite_items import without_extras, write_suites
from tests.tasks.diagnosed import InThisProcess
from tests.tasks.test_longbench import ANSWERS, item

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]
REFERENCE = read_reference()
SMALLER = {
    "task.lengths=[2048,8192,32768,130048]": "task.lengths=[400,410,420,440]",
    "length=2048": "length=400",
    "length=8192": "length=410",
    "length=32768": "length=420",
    "length=130048": "length=440",
    "task.lengths=[32768]": "task.lengths=[430]",
    "task.lengths=[8192]": "task.lengths=[420]",
    "task.lengths=[8000]": "task.lengths=[430]",
    "task.vector_windows=10": "task.vector_windows=2",
    "task.contexts=[131072]": "task.contexts=[96]",
    "task.contexts=[4096]": "task.contexts=[64]",
    "task.contexts=[512]": "task.contexts=[48]",
    "_b32_t512": "_b2_t48",
    "task.batches=[32]": "task.batches=[2]",
    "task.batches=[48]": "task.batches=[2]",
    "_b1_t1024": "_b1_t40",
    "task.batches=[1,4,16,64,128,256,512,1024,2048]": "task.batches=[1,2,4]",
    "_b64": "_b2",
    "task.prompt=8192": "task.prompt=40",
    "task.prompt=4096": "task.prompt=40",
    "task.prompt=3584": "task.prompt=64",
    "task.vector_layer=15": "task.vector_layer=0",
    "task.vector_layer=31": "task.vector_layer=1",
    "task.layers=[2]": "task.layers=[1]",
    "task.layers=[5]": "task.layers=[1]",
    "task.layers=[1,2]": "task.layers=[0,1]",
}
_TIMED = ["task.new_tokens=2", "task.repeats=2", "task.warmup=0"]
_ITEMS = ["task.resamples=50", "task.noise_floor=false"]
_CAPTURED = ["task.context=96", "task.windows=2"]
SIZES: dict[str, list[str]] = {
    "ppl": ["task.context=96", "task.max_windows=3", "task.bootstrap.resamples=50"],
    "niah": [*_ITEMS, "task.repeats=1"],
    "longbench": [*_ITEMS, "task.max_length=300", "task.limit=1"],
    "lm_eval": [*_ITEMS, "task.allow_code=true", "task.repeats=1"],
    "multimodal": [*_ITEMS, "task.max_new_tokens=4"],
    "modality": ["task.limit=2"],
    "generate": ["task.max_new_tokens=4"],
    "trajectory": ["task.prompts=2", "task.context=96", "task.new_tokens=4"],
    "drift": ["task.prompts=2", "task.context=96", "task.new_tokens=8", "task.parts=2"],
    "speculate": ["task.prompts=2", "task.context=96", "task.new_tokens=4"],
    "reuse": ["task.prefix=64", "task.scored=32", "task.windows=2"],
    "conversation": [*("task.conversations=2", "task.branches=1", "task.user=16", "task.answer=8")],
    "latency": [*_TIMED, "task.references=[dynamic]"],
    "throughput": [*_TIMED, "task.references=[dynamic]"],
    "tni": _CAPTURED,
    "limit": _CAPTURED,
    "sensitivity": [*_CAPTURED, "task.maps=2"],
    "error": _CAPTURED,
    "distribution": ["task.context=96", "task.windows=2"],
    "memory": ["task.measured=100"],
    "random_states": ["task.draws=2"],
    "model_states": ["task.windows=2"],
}
STATISTIC = re.compile(
    r"(?:p of )?(?:spearman|median|change|fisher p|mean reduction in percent|models \w+ [\d.]+) of (.+)"
)


def printed(name: str) -> Iterator[Cell]:
    """Cells of an experiment that print something and have a run."""
    layout = layout_named(name)
    for cell in cells_of(layout):
        published = layout.table and REFERENCE.find(layout.paper or "", layout.table, cell.labels)
        shown = published or not layout.table or set(layout.own) & set(cell.labels.values())
        if shown and cell.runs and cell.reason is None:
            yield cell


def smaller(word: str) -> str:
    for large, small in SMALLER.items():
        word = word.replace(large, small)
    return word


class Records:
    """Records of small runs, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._made = folder, dict[tuple[str, ...], Record | str]()
        self._places: dict[str, list[str]] = {}
        (folder / "other.txt").write_text(" ".join(f"half of {2 * n} is {n};" for n in range(400)), encoding="utf-8")

    def of(self, words: tuple[str, ...]) -> Record | str:
        """The record of a run, or why there is none."""
        if words not in self._made:
            try:
                record = run(resolve(compose(self._words(words))))
                self._made[words] = record if record.status == "done" else f"{record.status}: {record.reason}"
            except KvqError as error:
                self._made[words] = str(error)
        return self._made[words]

    def _words(self, words: tuple[str, ...]) -> list[str]:
        chosen = next((word.partition("=")[2] for word in words if word.startswith("task=")), "ppl")
        task = str(compose([f"task={chosen}"]).task.name) if chosen != "ppl" else "ppl"
        kept = [smaller(word) for word in words if not word.startswith(("model", "dataset"))]
        if task == "ppl":
            continues = "kvquant_plus_plus" in chosen or "task.scoring=continuation" in words
            kept += ["task.prompt=64"] * continues
            kept += ["task.stride=32"] * ("task.windows=disjoint" not in words and "nsnquant" not in chosen)
        kept += ["task.lengths=[400]"] * (task == "niah" and not any(word.startswith("task.lengths") for word in kept))
        if chosen == "lm_eval/ruler_file":
            kept += [f"dataset.path={ruler(self.folder)}"]
        kept += short(chosen)
        if task in ("latency", "throughput") or not any(word.startswith("residual.size") for word in kept):
            kept.append("residual.size=16")
        if any("nsn_dequantization" in word for word in words):
            kept.append("task.contexts=[40]")
        if "method.calibration.dataset" in " ".join(kept) or task not in ("random_states", "memory", "synthetic"):
            kept += [f"method.calibration.path={self.folder / 'other.txt'}"]
            kept += ["method.calibration.samples=3", "method.calibration.length=64", "method.calibration.tokens=null"]
        if task not in self._places:
            place = self.folder / task
            place.mkdir()
            self._places[task] = PLACES.get(task, golden._FILES.get(task, golden._texts))(place)
        kept += [*SIZES[task], *self._places[task]]
        last = {word.partition("=")[0]: word for word in kept}
        return [*last.values(), f"results_dir={self.folder / 'results'}", "device=cpu", "threads=1"]


def short(chosen: str) -> list[str]:
    """Short answers and few examples for the presets of lm-eval's tasks that have long ones."""
    name = chosen.partition("/")[2]
    if name in ("aime24", "aime25"):
        return ["task.generation.max_gen_toks=8"]
    few = ["task.num_fewshot=1"] * (name in ("gsm8k", "mmlu_pro"))
    suites = ("math500", "gpqa", "mmlu_pro", "ifeval", "gsm8k", "ruler", "infinitebench")
    if name == "longbench2":
        return ["task.limit=1"]  # generates no answer
    return [*few, "task.generation={max_gen_toks:8}", "task.limit=1"] if name in suites else []


def in_chat(folder: Path) -> None:
    """Give the model's tokenizer a chat template."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    changed(folder / "model" / "tokenizer_config.json", chat_template=template)


def niah(folder: Path) -> list[str]:
    given = golden._texts(folder)
    in_chat(folder)
    return given


def longbench(folder: Path) -> list[str]:
    for base in ANSWERS:
        for name in (base, f"{base}_e"):
            (folder / f"{name}.jsonl").write_text(json.dumps(item(base)) + "\n", encoding="utf-8")
    given = golden._model(folder)
    changed(folder / "model" / "config.json", max_position_embeddings=1024)  # answers to some subsets take 512 tokens
    in_chat(folder)
    return [*given, f"dataset.path={folder}"]


def memory(folder: Path) -> list[str]:
    given = golden._texts(folder)
    changed(folder / "model" / "config.json", max_position_embeddings=131072)
    return given


def changed(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")


def lm_eval(folder: Path) -> list[str]:
    """Tasks of the names that the presets ask for: a leaf, or two leaves under the tag or group that lm-eval has."""
    given = golden._lm_eval(folder)
    in_chat(folder)
    leaf = yaml.safe_load((folder / "say.yaml").read_text(encoding="utf-8"))
    for name, kind in kinds().items():
        for own in [name] if kind == "task" else [f"{name}_1", f"{name}_2"]:
            inside = {"tag": name} if kind == "tag" else {}
            (folder / f"{own}.yaml").write_text(yaml.safe_dump(leaf | inside | {"task": own}), encoding="utf-8")
        if kind == "group":
            tasks = {"group": name, "task": [f"{name}_1", f"{name}_2"]}
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(tasks), encoding="utf-8")
    write_suites(folder)
    return given


def ruler(folder: Path) -> Path:
    """Two items as RULER's scripts write them."""
    items = [{"input": f"The number of {name} is", "outputs": [str(n)]} for n, name in enumerate(("ann", "bob"))]
    file = folder / "ruler.jsonl"
    file.write_text("\n".join(json.dumps(item) for item in items), encoding="utf-8")
    return file


def kinds() -> dict[str, str]:
    """What lm-eval's own files say that a name is: `task`, `tag` or `group`."""
    from lm_eval import tasks
    from lm_eval.tasks import TaskManager

    root = Path(tasks.__file__).parent
    asked = {name for own in ("nsnquant", "aime24", "mmlu") for name in compose([f"task=lm_eval/{own}"]).task.tasks}
    folders = [str(root / at) for at in ("gsm8k", "humaneval", "coqa", "aime", "mmlu/default", "mmlu/flan_cot_fewshot")]
    manager = TaskManager(include_path=folders, include_defaults=False)
    known = {"tag": manager.all_tags, "group": manager.all_groups, "task": manager.all_subtasks}
    return {name: next(kind for kind, of_kind in known.items() if name in of_kind) for name in asked}


PLACES: dict[str, Callable[[Path], list[str]]] = {
    "longbench": longbench,
    "lm_eval": lm_eval,
    "memory": memory,
    "niah": niah,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    """Cells of time run in this process without a compiler; the reference has no room for a batch of 4."""
    timed = speed.timed

    def short(loaded: Any, cache: Any, prompt: torch.Tensor, new_tokens: int) -> dict[str, Any]:
        if type(cache).__name__ == "DynamicCache" and len(prompt) > 2:
            raise torch.OutOfMemoryError
        return timed(loaded, cache, prompt, new_tokens)

    with pytest.MonkeyPatch.context() as patch:
        without_extras(patch)
        patch.setattr(speed, "ProcessPoolExecutor", InThisProcess)
        patch.setattr(speed, "timed", short)
        patch.setattr(torch, "compile", lambda call, **_: call)
        yield Records(tmp_path_factory.mktemp("own"))


def wanted(metric: str) -> list[str]:
    """The metrics of records that a cell's reading takes."""
    found = STATISTIC.fullmatch(metric)
    return [smaller(name) for name in (found[1].split(" and ") if found else [metric])]


def of_engines(name: str) -> Any:
    """An experiment as a parameter; one that asks an engine is skipped where the engine is not installed."""
    engine = installed.mlx if name.endswith("/agreement_mlx") else installed.llamacpp
    return pytest.param(name, marks=[engine] * ("/agreement" in name))


@pytest.mark.parametrize("name", [of_engines(name) for name in names()])
def test_each_metric_occurs_in_a_record_of_its_own_task(name: str, made: Records) -> None:
    if layout_named(name).paper is None:
        pytest.skip("no table")
    known, runs = choices(), defaultdict[str, dict[tuple[str, ...], None]](dict)
    for cell in printed(name):
        for metric in wanted(cell.metric):
            for words in cell.runs:
                if not list(missing_choices(words, known)):
                    runs[metric][tuple(word for word in words if not word.startswith(("model", "dataset")))] = None
    lacking = {}
    for metric, found in runs.items():
        said = []
        for words in reversed(found):  # a paper's own method stands last
            record = made.of(words)
            if isinstance(record, Record) and read_metric(record, metric) is not None:
                break
            said.append(record if isinstance(record, str) else f"{' '.join(words)}: only {', '.join(record.metrics)}")
        else:
            lacking[metric] = said
    assert not lacking
