"""The jobs of `+experiment=<paper>/<table>`: those of its layout that can be composed here, under the command line."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from omegaconf import OmegaConf

from kvq.config import compose, conf_dir, outside
from kvq.config.explain import COMPOSE_ERRORS, choices
from kvq.config.files import DISTRIBUTION, EMBEDDED
from kvq.config.layout import LayoutConfig
from kvq.errors import ConfigError
from kvq.papers.cells import Overrides, cells_of, jobs_of, missing_choices

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

EXPERIMENT_SWEEPER = "hydra_plugins.kvq_experiments.ExperimentSweeper"
# Overrides of what a process loads once for several runs (model, then text and task); the first costs most.
_SHARED = (("model=", "model."), ("dataset=", "dataset.", "task=", "task."))
Job = TypeVar("Job", bound=Sequence[str])


@dataclass(frozen=True)
class ExperimentSweep:
    """The jobs that can be composed, and the number of jobs that need a choice which this version lacks."""

    jobs: list[Overrides]
    waiting: dict[str, int]


def layout_of(config: DictConfig) -> LayoutConfig:
    """The checked layout of a composed configuration; its `paper` is None where it has none."""
    layout = OmegaConf.to_object(config.layout)
    assert isinstance(layout, LayoutConfig)
    return layout


def is_embedded(model: str) -> bool:
    """Whether a model ships with the package."""
    return _path_of(model).startswith(EMBEDDED)


def runs_anywhere(model: str) -> bool:
    """Whether a model is embedded or carried by an installed distribution: it may stand in for a paper's models."""
    return _path_of(model).startswith((EMBEDDED, DISTRIBUTION))


def stand_in_of(layout: LayoutConfig, model: str) -> dict[str, str] | None:
    """What stands in for an experiment's overrides on a model that runs anywhere; None: the model is no stand-in.

    Those of `layout.small`; on a model that an installed distribution carries those of `layout.real` come before them.
    """
    path = _path_of(model)
    if path.startswith(DISTRIBUTION):
        return layout.small | layout.real
    return layout.small if path.startswith(EMBEDDED) else None


def _path_of(model: str) -> str:
    try:
        return written("model", model, "path") or str(compose([f"model={model}"]).model.path)
    except COMPOSE_ERRORS:
        return ""  # composing the job says why


def written(group: str, choice: str, setting: str) -> str | None:
    """A setting as the file of a choice has it, such as a model's name; None where it is absent or interpolated."""
    found = _settings(outside.folder_of(), group, choice).get(setting)
    return None if found is None or "${" in found else str(found)


@functools.cache
def _settings(own: Path | None, group: str, choice: str) -> dict[str, Any]:
    """What the file of a choice says; nothing where there is none."""
    files = (folder / group / f"{choice}.yaml" for folder in (own, conf_dir()) if folder is not None)
    found = next((path for path in files if path.is_file()), None)
    return {} if found is None else yaml.safe_load(found.read_text(encoding="utf-8"))


def product(overrides: Iterable[Override]) -> list[list[str]]:
    """One job for each combination of the swept values, the last override varying fastest.

    Raises:
        ConfigError: an interval, which has no list of values.
    """
    values: dict[str, list[str]] = {}
    for override in overrides:
        name = override.get_key_element()
        if not override.is_sweep_override():
            values[name] = [f"{name}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            values[name] = [f"{name}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(f"{override.input_line}: an interval; give values, or range(from,to,step)")
    return [list(job) for job in itertools.product(*values.values())]


def grouped(jobs: Iterable[Job]) -> list[Job]:
    """Jobs of one model one after the other, of these those of one text and task; else as they were.

    A process holds one model, one text and one full-precision reference at a time (`kvq.models.inputs`): a sweep that
    goes back and forth between two would load them for every run.
    """
    given = list(jobs)
    chosen = [[tuple(word for word in job if word.startswith(names)) for names in _SHARED] for job in given]
    ranks = [{words: rank for rank, words in enumerate(dict.fromkeys(column))} for column in zip(*chosen, strict=True)]
    wanted = [[rank[words] for rank, words in zip(ranks, own, strict=True)] for own in chosen]
    return [given[place] for place in sorted(range(len(given)), key=wanted.__getitem__)]


def sweep_of(config: DictConfig, overrides: Sequence[Override]) -> ExperimentSweep:
    """Jobs of the experiment in `config`, for every product of the command line's values."""
    layout = layout_of(config)
    cells, known = cells_of(layout), choices()
    jobs: list[Overrides] = []
    for given in map(tuple, product(overrides)):
        model = next((word.partition("=")[2] for word in given if word.startswith("model=")), "")
        jobs += jobs_of(cells, given, (stand_in_of(layout, model) if model else None) or {})
    ready: list[Overrides] = []
    waiting: dict[str, int] = {}
    for job in grouped(dict.fromkeys(jobs)):
        missing = list(missing_choices(job, known))
        for name in missing:
            waiting[name] = waiting.get(name, 0) + 1
        if not missing:
            ready.append(job)
    return ExperimentSweep(ready, waiting)
