"""The cells of an experiment's table, and the jobs of `+experiment=<paper>/<table>` that measure them."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hydra.core.override_parser.types import Glob
from omegaconf import OmegaConf

from kvq.config import plugins
from kvq.config.choices import find
from kvq.config.explain import choices
from kvq.config.run import DISTRIBUTION, EMBEDDED, LayoutConfig
from kvq.errors import ConfigError
from kvq.results.presets import cache_by_folder, model_path

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

Overrides = tuple[str, ...]
# Overrides of what a process loads once for several runs (model, then text and task); the first costs most.
_SHARED = (("model=", "model."), ("dataset=", "dataset.", "task=", "task."))
Job = TypeVar("Job", bound=Sequence[str])


@dataclass(frozen=True)
class Cell:
    """One number of a table. `labels`: axis -> label; `runs`: overrides of each run it pools; `reason`: why no run."""

    labels: Mapping[str, str]
    runs: tuple[Overrides, ...]
    metric: str
    reason: str | None = None


def cells_of(layout: LayoutConfig) -> list[Cell]:
    """The cells of a table: one for each combination of labels, the last axis fastest."""
    cells = []
    for chosen in itertools.product(*layout.labels.values()):
        labels = dict(zip(layout.labels, chosen, strict=True))
        metric = layout.metric.format(**{axis: named[labels[axis]] for axis, named in layout.metrics.items()})
        reason = next((layout.reasons[label] for label in chosen if label in layout.reasons), None)
        named = [layout.names[labels[axis]] for axis in labels if axis in layout.axes]
        choices = [[layout.common], *([words] if isinstance(words, str) else words or [] for words in named)]
        # Of several overrides of one setting the last holds; a label without overrides has no run.
        runs = tuple(
            tuple({word.partition("=")[0]: word for part in parts for word in _words(part)}.values())
            for parts in itertools.product(*choices)
        )
        cells.append(Cell(labels, runs, metric, reason))
    return cells


@functools.cache
def _words(overrides: str) -> Overrides:
    """Split a string of overrides at spaces, as a shell does; cached, as all runs of a table share a few strings."""
    return tuple(shlex.split(overrides))


def override_run(run: Overrides, overrides: Sequence[str], small: Mapping[str, str]) -> Overrides:
    """Replace overrides of a run by those that `small` maps them to, then add `overrides`, which take precedence.

    One of them, `x=`, removes the run's `x=` and all of its `x.…=`.
    """
    replaced = (_words(small[word]) if word in small else (word,) for word in run)
    kept = {word.partition("=")[0]: word for words in replaced for word in words}
    names = {word.partition("=")[0].lstrip("+~"): word for word in overrides}
    for name in names:
        kept = {key: word for key, word in kept.items() if key != name and not key.startswith(f"{name}.")}
    return (*kept.values(), *overrides)


def jobs_of(cells: Iterable[Cell], overrides: Sequence[str], small: Mapping[str, str]) -> list[Overrides]:
    """The runs of all cells, each once, after `override_run` with the command line's `overrides` and `small`."""
    return list(dict.fromkeys(override_run(run, overrides, small) for cell in cells for run in cell.runs))


def choice_of(run: Iterable[str], group: str) -> str:
    """What overrides choose of a group: `ppl/nsn` of `task=ppl/nsn`; empty where they choose nothing."""
    return next((word.partition("=")[2] for word in run if word.startswith(f"{group}=")), "")


def missing_choices(run: Sequence[str], choices: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Choices of a run that this version does not have, such as `method=kvquant`."""
    for word in run:
        group, _, name = word.lstrip("+").partition("=")
        if group in choices and name not in choices[group]:
            yield f"{group}={name}"


def command(run: Sequence[str]) -> str:
    """The shell command that makes a run."""
    return f"python run.py {shlex.join(run)}"


def layout_of(config: DictConfig) -> LayoutConfig:
    """The checked layout of a composed configuration; its `paper` is None where no paper has the table."""
    layout = OmegaConf.to_object(config.layout)
    assert isinstance(layout, LayoutConfig)
    return layout


def is_embedded(model: str) -> bool:
    """Whether a model ships with the package."""
    return model_path(model).startswith(EMBEDDED)


def runs_anywhere(model: str) -> bool:
    """Whether a model is embedded or carried by an installed distribution: it may stand in for a paper's models."""
    return model_path(model).startswith((EMBEDDED, DISTRIBUTION))


def stand_in_overrides(layout: LayoutConfig, model: str) -> dict[str, str] | None:
    """Replacements of overrides (`override_run`) for a model that stands in for the paper's; None: it does not.

    They are `layout.small`, for an installed model updated by `layout.real`.
    """
    if not runs_anywhere(model):
        return None
    return layout.small if is_embedded(model) else layout.small | layout.real


@cache_by_folder
def setting_in_file(group: str, choice: str, setting: str) -> str | None:
    """A setting as written in the file of a choice, such as a model's name; None where it is absent or interpolated."""
    file = find(group, choice, *reversed(plugins.conf_dirs()))
    value = None if file is None else file.read().get(setting)
    return None if value is None or "${" in value else str(value)


def list_jobs(overrides: Iterable[Override]) -> list[list[str]]:
    """One job for each combination of the swept values, the last fastest; `ConfigError`: an interval, a glob."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        name = override.get_key_element()
        if not override.is_sweep_override():
            values[name] = [f"{name}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep() and not isinstance(override.value(), Glob):
            values[name] = [f"{name}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(f"{override.input_line}: an interval or a glob; give values, or range(from,to,step)")
    return [list(job) for job in itertools.product(*values.values())]


def group_jobs(jobs: Iterable[Job]) -> list[Job]:
    """Sort jobs by model, then by text and task, since a process keeps one of each loaded; order is kept otherwise."""
    unsorted = list(jobs)
    chosen = [[tuple(word for word in job if word.startswith(names)) for names in _SHARED] for job in unsorted]
    ranks = [{words: rank for rank, words in enumerate(dict.fromkeys(column))} for column in zip(*chosen, strict=True)]
    wanted = [[rank[words] for rank, words in zip(ranks, columns, strict=True)] for columns in chosen]
    return [unsorted[place] for place in sorted(range(len(unsorted)), key=wanted.__getitem__)]


def sweep_of(config: DictConfig, overrides: Sequence[Override]) -> list[Overrides]:
    """The experiment's jobs for each combination of the command line's values, without jobs with missing choices."""
    layout = layout_of(config)
    cells, known = cells_of(layout), choices()
    jobs: list[Overrides] = []
    for words in map(tuple, list_jobs(overrides)):
        model = choice_of(words, "model")
        jobs += jobs_of(cells, words, (stand_in_overrides(layout, model) if model else None) or {})
    return [job for job in group_jobs(dict.fromkeys(jobs)) if not any(missing_choices(job, known))]
