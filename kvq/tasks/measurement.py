"""The interface of tasks: their inputs and outputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvq.config import Loader, TaskConfig
from kvq.config.tasks import is_timed
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.methods.method import Method
    from kvq.models.inputs import Inputs
    from kvq.results.journal import Journal


@dataclass(frozen=True)
class Baseline:
    """The full-precision run that a run is compared with: its key, metrics and samples."""

    key: str
    metrics: dict[str, float]
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class Measurement:
    """Metrics by name with their units, and one sample per item; `engine`: the program that computed the logits."""

    metrics: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    engine: str | None = None


def decoded(inputs: Inputs, tokens: Iterable[Tensor]) -> list[str]:
    """The text of each sequence of tokens."""
    return [str(inputs.tokenizer.decode(sequence.tolist(), skip_special_tokens=True)) for sequence in tokens]


def text_of_dataset(inputs: Inputs) -> list[str]:
    """The text of a run's data set by stream of tokens; none where it holds items or is not scored."""
    config = inputs.config
    if config.dataset.loader is Loader.items or is_timed(config.task):
        return []
    return decoded(inputs, inputs.streams(getattr(config.task, "context", 2)).streams)


@dataclass(frozen=True)
class Task:
    """A task, as the runner calls it.

    `check` reads no weights and raises `Unsupported` for a method, `ConfigError` for a length, that the task cannot do.
    `measure` writes what it has scored to the journal, from which a killed run resumes. `fingerprint` names the data
    that is scored, `texts` gives the texts in it, with which those of a calibration are compared.
    `settings`: of a task outside the package, the dataclass of its settings, which is defined beside it (those of the
    package's own tasks are in `kvq.config.tasks`, which imports no torch).
    """

    check: Callable[[Inputs, Method], None]
    measure: Callable[[Inputs, Method, Baseline | None, Journal], Measurement]
    fingerprint: Callable[[Inputs], str]
    settings: type[TaskConfig] | None = None
    texts: Callable[[Inputs], list[str]] = text_of_dataset


def task_of(settings: TaskConfig) -> Task:
    """The task of these settings: the module of its name in this package, or outside it the one that defines them.

    So a process that was handed settings, as a launcher's workers are, finds the task by them alone.

    Raises:
        ConfigError: a package that the task needs is not installed.
    """
    home = type(settings).__module__
    module = f"kvq.tasks.{settings.name}" if home.startswith("kvq.") else home
    try:
        task: Task = importlib.import_module(module).TASK
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvq":
            raise
        raise ConfigError(f"task={settings.name}: needs {error.name}; pip install -e '.[eval]'") from error
    return task
