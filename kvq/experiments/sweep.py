"""The jobs of `+experiment=<paper>/<table>`: those of its layout that can be composed here, under the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from omegaconf import OmegaConf

from kvq.config import compose
from kvq.experiments.cells import Overrides, cells_of, jobs_of, missing_choices
from kvq.explain import COMPOSE_ERRORS, choices
from kvq.layout_config import LayoutConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

EXPERIMENT_SWEEPER = "hydra_plugins.kvq_experiments.ExperimentSweeper"
EMBEDDED = "embedded:"


@dataclass(frozen=True)
class ExperimentSweep:
    """What is run, and what is left out: (choice that does not exist, how many runs wait for it)."""

    jobs: list[Overrides]
    waiting: dict[str, int]


def layout_of(config: DictConfig) -> LayoutConfig:
    """The checked layout of a composed configuration; its `paper` is None where it has none."""
    layout = OmegaConf.to_object(config.layout)
    assert isinstance(layout, LayoutConfig)
    return layout


def is_embedded(model: str) -> bool:
    """Whether a model ships with the package, so that an experiment on it is a stand-in for the paper's."""
    try:
        return str(compose([f"model={model}"]).model.path).startswith(EMBEDDED)
    except COMPOSE_ERRORS:
        return False  # composing the job says why


def grouped(jobs: Iterable[Sequence[str]]) -> list[list[str]]:
    """Jobs of one model one after the other, of these those of one text and task; else as they were.

    A process holds one model, one text and one full-precision reference at a time (`kvq.tasks.inputs`): a sweep that
    goes back and forth between two would load them for every run.
    """
    ordered = [list(job) for job in jobs]
    for groups in (("dataset", "task"), ("model",)):  # sorting is stable: the last is the outermost
        chosen = [tuple(word for word in job if re.match(rf"({'|'.join(groups)})[.=]", word)) for job in ordered]
        first = {words: place for place, words in reversed(list(enumerate(chosen)))}
        places = sorted(range(len(ordered)), key=lambda place: first[chosen[place]])
        ordered = [ordered[place] for place in places]
    return ordered


def sweep_of(config: DictConfig, overrides: Sequence[Override]) -> ExperimentSweep:
    """Jobs of the experiment in `config`, for every product of the command line's values."""
    layout = layout_of(config)
    cells, known = cells_of(layout), choices()
    jobs: list[Overrides] = []
    for given in (tuple(job) for batch in BasicSweeper.split_arguments(list(overrides), None) for job in batch):
        model = next((word.partition("=")[2] for word in given if word.startswith("model=")), "")
        jobs += jobs_of(cells, given, layout.small if model and is_embedded(model) else {})
    ready: list[Overrides] = []
    waiting: dict[str, int] = {}
    for job in map(tuple, grouped(dict.fromkeys(jobs))):
        missing = list(missing_choices(job, known))
        for name in missing:
            waiting[name] = waiting.get(name, 0) + 1
        if not missing:
            ready.append(job)
    return ExperimentSweep(ready, waiting)
