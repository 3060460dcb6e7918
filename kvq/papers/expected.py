"""Every experiment with the signatures of its runs, by which records are found without a model or texts."""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvq.config import Config, compose, plugins, resolve, resolve_part
from kvq.config.composing import take_values
from kvq.config.explain import COMPOSE_ERRORS, explain
from kvq.config.identity import by_names
from kvq.config.limits import cache_folder
from kvq.config.run import LayoutConfig
from kvq.errors import KvqError
from kvq.papers import sweep
from kvq.report.comparisons import read_records
from kvq.report.tables.experiment_files import fill, grids_of
from kvq.report.tables.experiments import Asked, CellRun, Experiment, by_signature, signature
from kvq.report.tables.formats import print_sheet
from kvq.report.tables.readings import read_reference
from kvq.results import Store
from kvq.results.files import write_file
from kvq.results.presets import cache_by_folder, choices_in_use

Present = frozenset[tuple[str, str]]
"""Pairs (model, method) of the runs that have records."""
# Overrides that have no effect on full precision.
_OF_A_METHOD = ("method", "bits=", "residual", "cache.attention=")
# Parts of a configuration that are composed apart, and the words of a command that belong to each.
_PARTS: dict[str, tuple[str, ...]] = {name: (f"{name}=", f"{name}.") for name in ("model", "dataset", "task")}
_PARTS |= {"method": ("method=", "method.", "bits="), "cache": ("cache.",)}


def names() -> list[str]:
    """Names of the experiments with a table, as `+experiment=` takes them: `paper/table`."""
    return [name for name in choices_in_use()["experiment"] if "/" in name]


@functools.cache
def layout_named(name: str) -> LayoutConfig:
    """Compose the layout of an experiment, once in a process; `KvqError`: its configuration is not valid."""
    chosen = [f"+experiment={name}"]
    try:
        return sweep.layout_of(compose(chosen))
    except COMPOSE_ERRORS as error:
        raise KvqError(f"+experiment={name}: {explain(error, chosen)}") from error


def experiment_of(name: str, present: Present = frozenset()) -> Experiment:
    """An experiment with the cells of its table and their runs, with signatures for models and methods in `present`."""
    layout = layout_named(name)
    cells = sweep.cells_of(layout)
    jobs = sweep.jobs_of(cells, (), {})
    plain: dict[bool, set[sweep.Overrides]] = {True: set(), False: set()}
    for job in jobs:
        rest = tuple(sorted(word for word in job if not word.lstrip("+~").startswith(_OF_A_METHOD)))
        plain["method=fp16" in job or not any(word.startswith("method=") for word in job)].add(rest)
    known = choices_in_use()["model"]
    small = sorted({model for model, _ in present if model in known and sweep.runs_anywhere(model)})
    small = [] if of_no_paper(jobs) else sorted(small, key=sweep.is_embedded)  # a real one first
    waiting = Counter(name for job in jobs for name in sweep.missing_choices(job, choices_in_use()))
    return Experiment(
        name=name,
        layout=layout,
        cells=tuple(
            Asked(cell.labels, cell.metric, tuple(_cell_run(run, present) for run in cell.runs), cell.reason)
            for cell in cells
        ),
        runs=len(jobs),
        baselines=len(plain[False] - plain[True]),
        stand_ins={model: _stand_ins(layout, cells, model, present) for model in small},
        waiting=dict(sorted(waiting.items())),
    )


def experiments(present: Present) -> list[Experiment]:
    """Every experiment that reproduces a paper's table; read from the user's cache, as composing them takes long."""
    path = cache_folder() / f"experiments-{_digest(present)}.pickle"
    with suppress(Exception):  # not kept, or torn
        kept: list[Experiment] = pickle.loads(path.read_bytes())
        return kept
    built = [experiment_of(name, present) for name in names() if layout_named(name).paper is not None]
    with suppress(OSError):  # a cache that cannot be written costs time alone
        for old in path.parent.glob("experiments-*.pickle"):
            old.unlink()
        write_file(path, pickle.dumps(built), durable=False)
    return built


def _digest(present: Present) -> str:
    """A hash of all that decides `experiments`: Python, configurations, the code that composes them, and `present`."""
    package = Path(__file__).parents[1]
    code = [*package.glob("config/*.py"), *package.glob("papers/*.py"), *package.glob("report/tables/experiments.py")]
    files = [path for folder in plugins.conf_dirs() for path in folder.rglob("*") if path.is_file()]
    digest = hashlib.sha256(repr((sys.version, sorted(present))).encode())
    for path in sorted([*code, *files]):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def of_no_paper(jobs: Iterable[sweep.Overrides]) -> bool:
    """Whether the runs choose models, all of them embedded or installed (`sweep.runs_anywhere`): none is a paper's."""
    models = {word.partition("=")[2] for job in jobs for word in job if word.startswith("model=")}
    return bool(models) and all(model in choices_in_use()["model"] and sweep.runs_anywhere(model) for model in models)


def _stand_ins(layout: LayoutConfig, cells: Iterable[sweep.Cell], model: str, present: Present) -> tuple[Asked, ...]:
    """The cells with runs on `model`, a small one in place of the paper's, and without the label of the model.

    Behind a text's label is the text in its place. A cell whose runs then are of another task (`LayoutConfig.small`)
    reads that task's main metric, without labels.
    """
    asked: set[tuple[sweep.Overrides, ...]] = set()
    by_labels: dict[tuple[tuple[str, str], ...], Asked] = {}
    instead = sweep.stand_in_overrides(layout, model) or {}
    for cell in cells:
        runs = tuple(dict.fromkeys(sweep.override_run(run, [f"model={model}"], instead) for run in cell.runs))
        tasks = [{sweep.choice_of(run, "task").partition("/")[0] for run in its} for its in (cell.runs, runs)]
        texts = [{sweep.choice_of(run, "dataset") for run in its} - {""} for its in (cell.runs, runs)]
        other = tasks[0] != tasks[1]
        dropped = {"model", *(layout.metrics if other else ())}
        labels = {axis: label for axis, label in cell.labels.items() if axis not in dropped}
        if labels.get("dataset") and texts[1] and texts[0] != texts[1]:
            labels["dataset"] += f" ({', '.join(sorted(texts[1]))})"
        answers = tuple(_cell_run(run, present) for run in runs)
        made = Asked(labels, "" if other else cell.metric, answers, cell.reason)
        if runs and not (other and runs in asked):
            asked.add(runs)
            by_labels[tuple(labels.items())] = made
    return tuple(by_labels.values())


@cache_by_folder
def _cell_run(run: sweep.Overrides, present: Present) -> CellRun:
    """A run's command, with its signature if `present` has its model and method, or the reason why it cannot run."""
    missing = list(sweep.missing_choices(run, choices_in_use()))
    if missing:
        return CellRun(sweep.command(run), waits=f"{', '.join(missing)}: not in this version")
    chosen = {word.partition("=")[0]: word.partition("=")[2] for word in run}
    groups = ("model", "method")
    wanted = tuple(sweep.setting_in_file(group, chosen[group], "name") if group in chosen else None for group in groups)
    if wanted not in _present_or_any(present):
        return CellRun(sweep.command(run))
    try:
        return CellRun(sweep.command(run), _signature(run))
    except COMPOSE_ERRORS as error:
        return CellRun(sweep.command(run), waits=str(error) if isinstance(error, KvqError) else explain(error, run))


@functools.cache
def _present_or_any(present: Present) -> frozenset[tuple[str | None, str | None]]:
    """The pairs (model, method) of `present`, and these with None, which stands for any, for one or both."""
    return frozenset(itertools.chain.from_iterable(itertools.product((a, None), (b, None)) for a, b in present))


@functools.cache
def _signature(run: sweep.Overrides) -> str:
    """A hash of a run's settings, equal to that of its records (`kvq.report.tables.experiments.signature`)."""
    config = resolved(run)
    return signature(by_names(config), config.model.name, config.dataset.name)


def resolved(run: sweep.Overrides) -> Config:
    """Compose and resolve a run's configuration, each part of `_PARTS` once for all runs that share its overrides.

    `model.context` is null unless the run chooses a model.
    """
    words = {part: tuple(word for word in run if word.lstrip("+~").startswith(names)) for part, names in _PARTS.items()}
    apart = {part: config for part, some in words.items() if some and (config := _resolve_part(part, some)) is not None}
    rest = tuple(word for word in run if not any(word in words[part] for part in apart))
    return replace(_resolve_rest(rest), **{name: setting for part in apart.values() for name, setting in part.items()})


@functools.cache
def _resolve_rest(rest: sweep.Overrides) -> Config:
    """The configuration of overrides outside `_PARTS`; `model.context` is null, as the default may be too short."""
    return resolve(compose([*rest, "model.context=null"]))


@functools.cache
def _resolve_part(part: str, words: sweep.Overrides) -> dict[str, Any] | None:
    """The resolved settings of a part of `_PARTS`; None if its overrides `words` change other parts, as some do."""
    config, defaults = take_values(compose(words)), compose([])
    if any(config._get_node(name) != defaults._get_node(name) for name in config.keys() - {part, "bits"}):
        return None
    settings = {part: resolve_part(config, part)}
    return settings | {"bits": resolve_part(config, "bits")} if part == "method" else settings


def print_experiment(name: str, results_dir: str) -> None:
    """Print an experiment's table of measured and published numbers, from the records of a folder."""
    records = read_records(Store(results_dir))[0]
    experiment, console = experiment_of(name, frozenset((record.model, record.method) for record in records)), Console()
    for grid in grids_of(fill(experiment, by_signature(records), read_reference())):
        print_sheet(grid, console)
        console.print()


def print_cost(name: str, jobs: int) -> None:
    """Print the number of runs asked for (`jobs`) and in the paper's experiment, and what this version cannot run."""
    experiment = experiment_of(name)
    full = f"{experiment.runs} runs and {experiment.baselines} of full precision beside them"
    print(f"{name}: {jobs} runs here; in full {full}")
    for choice, runs in experiment.waiting.items():
        print(f"{choice} is not in this version: {runs} of the {experiment.runs} runs wait for it")
    for reason in dict.fromkeys(cell.reason for cell in experiment.cells if cell.reason):
        print(f"cells that cannot be measured: {reason}")
