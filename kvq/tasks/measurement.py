"""The interface of tasks: their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvq.config import TaskConfig

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
    """Metrics by name with their units, and one sample per item."""

    metrics: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """A task, as the runner calls it.

    `check` reads no weights and raises `Unsupported` for a method, `ConfigError` for a length, that the task cannot do.
    `measure` writes what it has scored to the journal, from which a killed run resumes. `fingerprint` names the data
    that is scored.
    `settings`: of a task outside the package, the dataclass of its settings, which is defined beside it (those of the
    package's own tasks are in `kvq.config.tasks`, which imports no torch).
    """

    check: Callable[[Inputs, Method], None]
    measure: Callable[[Inputs, Method, Baseline | None, Journal], Measurement]
    fingerprint: Callable[[Inputs], str]
    settings: type[TaskConfig] | None = None
