"""`task=lm_eval`: tasks of lm-eval, by name or as local YAML files, through the quantized cache."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvq.config import Loader
from kvq.config.tasks import LmEvalConfig
from kvq.data.rows import go_offline_if_silent
from kvq.errors import ConfigError, DataError, one_line
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.load import model_folder
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.record import code_behind, code_hash
from kvq.tasks.items import Sample, Scored, by_part, changed_share, compare, costs, mean_score, print_items
from kvq.tasks.lm_eval_model import CacheLM, check_settings
from kvq.tasks.measurement import Baseline, Measurement, Task, items_fingerprint
from kvq.tasks.reader import Reader, check_prefill

# lm-eval's own seeds, so that prompts equal those of published results: of few-shot examples and NumPy (RULER),
# and of what a task draws as it loads (GPQA shuffles its choices).
_FEWSHOT_SEED, _LOADING_SEED = 1234, 0
# Task files of this package, and those of them whose items are a file of the user's.
_OWN_FILES = Path(__file__).with_name("lm_eval_files")
_FROM_FILE = {"ruler_file"}
_CODE_LEAVE = "HF_ALLOW_CODE_EVAL"  # environment variable that metrics which execute code check
_DECIDING = (  # settings of a task that decide its prompts and scores
    *("output_type", "description", "doc_to_text", "doc_to_target", "doc_to_choice", "process_docs", "process_results"),
    *("target_delimiter", "fewshot_delimiter", "num_fewshot", "generation_kwargs", "metric_list", "filter_list"),
    *("repeats", "gen_prefix", "metadata"),
)


class Part(NamedTuple):
    """A group or tag: names of its tasks, and whether each task counts by its number of items, as lm-eval's default."""

    tasks: list[str]
    by_size: bool


def load_tasks(inputs: Inputs) -> tuple[dict[str, Any], dict[str, Part]]:
    """lm-eval's task objects by name, changed as the settings say, and the groups and tags among what was asked for."""
    task: LmEvalConfig = inputs.config.task
    dataset = inputs.config.dataset
    if dataset.path is None and _FROM_FILE & set(task.tasks):
        raise ConfigError(f"task.tasks={','.join(task.tasks)}: reads its items from a file; give dataset.path=")
    if dataset.loader is not Loader.items or (dataset.path is not None and not set(task.tasks) <= _FROM_FILE):
        given = f"dataset.path={dataset.path}" if dataset.path is not None else f"dataset={dataset.name}"
        raise ConfigError(f"{given}: task=lm_eval brings its own items; leave the dataset to it")
    if task.allow_code:
        os.environ[_CODE_LEAVE] = "1"
    files = [Path(name) for name in task.tasks if name.endswith((".yaml", ".yml"))]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(f"task.tasks={missing[0]}: no such file")
    go_offline_if_silent()
    manager = _manager(inputs, task, defaults=len(files) < len(task.tasks))
    out: dict[str, Any] = {}
    parts: dict[str, Part] = {}
    for name in task.tasks:
        if name not in manager.all_tasks and Path(name) not in files:
            raise ConfigError(f"task.tasks={name}: lm-eval has no task, group or tag of that name")
        try:
            random.seed(_LOADING_SEED)
            np.random.seed(_FEWSHOT_SEED)
            loaded = manager.load([name])
        # Data comes by several libraries, each with errors of its own; to a user they are one.
        except Exception as error:
            if _CODE_LEAVE in str(error):
                raise _code_refused(name) from error
            raise DataError(f"task.tasks={name}: cannot be loaded: {one_line(error, 300)}") from error
        out |= loaded["tasks"]
        if name in manager.all_tags:
            parts[name] = Part(list(loaded["tasks"]), by_size=True)
        for label, group in loaded["groups"].items():
            by_size = all(metric.weight_by_size for metric in group.aggregate_metric_list or ())
            parts[label] = Part([one.task_name for one in group.get_all_tasks()], by_size)
    _change_generation(task, out)
    shots, own = task.num_fewshot, {name: one.get_config("num_fewshot") for name, one in out.items()}
    if shots and all(number == 0 for number in own.values()):
        raise ConfigError(f"task.num_fewshot={shots}: the tasks say 0, which lm-eval keeps")
    for name, one in out.items():
        if own[name] is None or (shots is not None and own[name] != 0):
            one.set_config(key="num_fewshot", value=shots or 0)
        one.set_fewshot_seed(seed=_FEWSHOT_SEED)
    return out, parts


def _change_generation(task: LmEvalConfig, tasks: Mapping[str, Any]) -> None:
    """Change the generation settings of tasks as `task.generation` says."""
    changes = task.generation or {}
    check_settings("task.generation", changes)
    generating = {name: one for name, one in tasks.items() if one.get_config("output_type") == "generate_until"}
    if changes and not generating:
        raise ConfigError(f"task.generation={changes}: none of {', '.join(tasks)} generates an answer")
    for name, one in generating.items():
        if changes:
            one.set_config(key="generation_kwargs", value=dict(changes), update=True)
        check_settings(f"{name}: generation_kwargs", one.get_config("generation_kwargs") or {})


def _manager(inputs: Inputs, task: LmEvalConfig, defaults: bool) -> Any:
    """The index of task files; that of lm-eval's own takes a quarter of a minute, so it is read only when needed."""
    from lm_eval.tasks import TaskManager

    metadata = {"pretrained": model_folder(inputs.config.model.path), **(task.metadata or {})}
    if inputs.config.model.gguf is not None:  # a task that sizes its prompts reads a tokenizer from a folder
        folder = inputs.shared("tokenizer folder", repr(inputs.config.model), tempfile.TemporaryDirectory)
        if not any(Path(folder.name).iterdir()):
            inputs.tokenizer.save_pretrained(folder.name)
        metadata["pretrained"] = folder.name
    if task.include_path and not Path(task.include_path).is_dir():
        raise ConfigError(f"task.include_path={task.include_path}: no such folder")
    folders = [task.include_path] if task.include_path else []
    if _FROM_FILE & set(task.tasks):
        folders, metadata["path"] = [*folders, str(_OWN_FILES)], inputs.config.dataset.path

    def make(with_defaults: bool) -> Any:
        given = {"include_path": folders or None, "include_defaults": with_defaults, "metadata": metadata}
        return inputs.shared("lm_eval index", repr(given), lambda: TaskManager(**given))

    if defaults and folders:
        local = make(False)
        if all(name in local.all_tasks or name.endswith((".yaml", ".yml")) for name in task.tasks):
            return local
    return make(defaults)


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the items: every document, and the settings of its task that make prompts and scores."""
    task: LmEvalConfig = inputs.config.task
    settings = (task.tasks, task.include_path, task.limit, task.metadata, task.generation, task.num_fewshot)
    name = repr((settings, inputs.config.model, inputs.config.dataset.path))
    return inputs.shared("lm_eval items", name, lambda: _fingerprint(inputs))


def _fingerprint(inputs: Inputs) -> str:
    from lm_eval.api.task import ConfigurableTask

    parts: list[Any] = []
    if inputs.config.task.include_path:  # functions of a task may take others from files beside theirs
        parts.append(code_hash(*Path(inputs.config.task.include_path).rglob("*.py")))
    for name, task in sorted(_quietly(load_tasks, inputs)[0].items()):
        deciding = {key: _plain(task.get_config(key)) for key in _DECIDING}
        if name in _FROM_FILE:
            deciding["metadata"] = None  # where the file lies; its items follow
        if type(task) is not ConfigurableTask:
            deciding["class"] = _plain(type(task))  # a task of its own, as `class:` names it
        if task.get_config("num_fewshot"):
            deciding["shots"] = [_plain(task.get_config("fewshot_config")), *(task.fewshot_docs() or ())]
        parts += [[name, deciding], *(doc for _, doc in task.doc_iterator(limit=inputs.config.task.limit))]
    return items_fingerprint(inputs, parts)


def _plain(value: Any) -> Any:
    """JSON data of a setting; a function is its name and its code."""
    if callable(value):
        return [getattr(value, "__qualname__", type(value).__name__), code_behind(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key != "pretrained"}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Run the tasks under `method`; a baseline is compared with item by item."""
    task: LmEvalConfig = inputs.config.task
    reader = Reader.of(inputs, method)

    def model(seed: int, copies: int = 1) -> CacheLM:
        longest = inputs.longest_context
        return CacheLM(reader, inputs.tokenizer, task.batch_size, longest, journal, seed, copies, inputs.bos)

    drawn: list[list[Sample]] = []
    odd: dict[str, str] = {}
    metrics: dict[str, float] = {}
    for repeat in range(task.repeats):
        asked = model(inputs.config.seed + repeat)
        samples, results, parts = evaluate(inputs, asked)
        drawn.append(samples)
        odd |= asked.odd
        metrics |= results
    samples = []  # of several draws one row per item, whose score is their mean
    for same in zip(*drawn, strict=True) if len(drawn) > 1 else ():
        scores, responses = ([row[name] for row in same] for name in ("score", "responses"))
        samples.append(same[0] | {"score": float(np.mean(scores)), "scores": scores, "responses": responses})
    samples = samples or drawn[0]
    for sample in samples:
        if sample["item"] in odd:
            sample["odd"] = odd[sample["item"]]
    print_items(odd, "odd")
    rows = [row for name, row in journal.rows.items() if not name.startswith("again/")]
    metrics = {"score": mean_score(samples), **scores_of(samples, parts), **(metrics if task.repeats == 1 else {})}
    metrics |= costs([Scored(row["sample"], row["cost"]) for row in rows])
    metrics |= {"items": float(len(samples)), "skipped_items": 0.0, "odd_items": float(len(odd))}
    if baseline is not None:
        metrics |= compare(samples, baseline, task, "score")
    elif task.noise_floor and not (task.generation or {}).get("do_sample"):
        again = model(inputs.config.seed, copies=2)
        again.prefix = "again/"
        metrics["noise_flips"] = changed_share(samples, evaluate(inputs, again)[0])
    return Measurement(metrics, units_of(metrics, dict.fromkeys(metrics, "1")), samples)


def scores_of(samples: Sequence[Sample], parts: Mapping[str, Part]) -> dict[str, float]:
    """Mean scores of the tasks, and over the tasks of each group and tag, as `score[task=NAME]`."""
    found = by_part(samples, "task", "score")
    for name, part in parts.items():
        tasks = set(part.tasks)
        own = [found[f"score[task={task}]"] for task in tasks]
        by_item = mean_score([sample for sample in samples if sample["task"] in tasks])
        found[f"score[task={name}]"] = by_item if part.by_size else float(np.mean(own))
    return found


def evaluate(inputs: Inputs, model: Any) -> tuple[list[Sample], dict[str, float], dict[str, Part]]:
    """Run the tasks on a model of lm-eval: samples, its own results as `metric[task]`, groups and tags by name."""
    import lm_eval.evaluator

    task: LmEvalConfig = inputs.config.task
    tasks, parts = _quietly(load_tasks, inputs)
    unsafe = [name for name, one in tasks.items() if getattr(one, "UNSAFE_CODE", False)]
    if unsafe and not task.allow_code:
        raise _code_refused(unsafe[0])
    with np.errstate(divide="ignore"):  # scores are divided by lengths, of which an odd item's may be 0
        found = _quietly(
            lm_eval.evaluator.evaluate,
            model,
            {"tasks": tasks, "groups": {}, "group_map": {}},
            limit=task.limit,
            bootstrap_iters=0,
            apply_chat_template=task.chat_template,
            fewshot_as_multiturn=task.chat_template,
            confirm_run_unsafe_code=task.allow_code,
        )
    samples = [sample for name, rows in sorted(found["samples"].items()) for sample in item_samples(name, rows, task)]
    return samples, dict(_metrics_of(found["results"])), parts


def item_samples(name: str, logged: list[Mapping[str, Any]], task: LmEvalConfig) -> Iterator[Sample]:
    """One row per document that lm-eval logged; its score is the task's main metric under the first filter."""
    first = logged[0]["filter"] if logged else ""
    for row in (row for row in logged if row["filter"] == first):
        # RULER has a metric for each length, and -1 for the lengths that the document does not have.
        metrics = {metric: row[metric] for metric in row["metrics"]}
        given = [metric for metric, value in metrics.items() if not (isinstance(value, int | float) and value < 0)]
        metric = task.metric if task.metric is not None else next(iter(given), "")
        numbers = [key for key, value in metrics.items() if isinstance(value, int | float | np.number | np.bool_)]
        if metric not in numbers:
            known = ", ".join(numbers) or "no number per item"
            raise ConfigError(f"task.metric={metric or 'null'}: {name} has {known}")
        about = {"item": f"{name}/{row['doc_id']}", "task": name, "score": float(metrics[metric]), "metric": metric}
        responses = json.loads(json.dumps(row["filtered_resps"], default=str))
        yield about | {"target": str(row["target"]), "responses": responses}


def _metrics_of(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield lm-eval's finite results as `metric/filter[task]` and number, without standard errors."""
    for name, figures in sorted(results.items()):
        for label, value in figures.items():
            metric, _, chosen = label.partition(",")
            absent = metric.isdecimal() and value == -1  # RULER's word for a length that no item has
            number = isinstance(value, int | float | np.number) and math.isfinite(value)
            if chosen and number and not absent and "_stderr" not in metric:
                yield f"{metric}{'' if chosen == 'none' else f'/{chosen}'}[{name}]", float(value)


def _quietly(action: Any, *arguments: Any, **settings: Any) -> Any:
    """Call `action`, without what lm-eval itself prints where no terminal shows it."""
    if sys.stderr.isatty():
        return action(*arguments, **settings)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return action(*arguments, **settings)


def _code_refused(name: str) -> ConfigError:
    """The error for a task that runs a model's code without `task.allow_code`."""
    return ConfigError(f"task.tasks={name}: runs code that the model writes; task.allow_code=true allows it")


def texts(inputs: Inputs) -> list[str]:
    """What the documents say, one string each."""
    limit = inputs.config.task.limit
    tasks = _quietly(load_tasks, inputs)[0].values()
    return [" ".join(map(str, doc.values())) for task in tasks for _, doc in task.doc_iterator(limit=limit)]


TASK = Task(lambda inputs, method: check_prefill(method, inputs.config.task.prefill), measure, fingerprint, texts=texts)
