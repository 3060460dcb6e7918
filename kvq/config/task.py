"""The base class of the settings of every task, in the package and outside it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from kvq.config.limits import check_limits
from kvq.errors import ConfigError

Prefill = enum.StrEnum("Prefill", "whole chunked")
"""How a prompt is read, up to its last token, which always reads the quantized cache as a decoded token does.

`whole`: in one forward at full precision, then quantized, as the papers generate; `chunked`: as if its tokens came
one by one, so that they read the quantized cache too.
"""


@dataclass
class TaskConfig:
    """The settings of a task. A subclass gives `name` its default, which is the task's name, and a `version`.

    `version` is raised when the task's scores would change: records of the one before are stale. Ranges that its
    annotations declare (`kvq.config.limits`) are checked. Class variables are no settings.
    """

    version: ClassVar[int]
    reads_weights: ClassVar[bool] = True
    """False: a model's shape is enough, and no weights are loaded."""
    reads_cache: ClassVar[bool] = True
    """False: the task encodes and decodes states itself, so that the version of the cache says nothing of it."""
    timed: ClassVar[bool] = False
    """The task measures time: how a token attends is part of what it measures, and the machine names its runs."""

    later: ClassVar[tuple[str, ...]] = ()
    """Settings that came after the first records: at their default they are no part of a run's key."""

    outputs: ClassVar[tuple[str, ...]] = ()
    """Settings that name a file which the run writes: no part of its key; a run with one is measured again."""

    of_methods: ClassVar[tuple[str, ...]] = ()
    """Settings of what a method does: they are no part of the key of full precision."""

    calibrates_itself: ClassVar[bool] = False
    """The task fits calibrated methods to states that it draws: they need no text."""

    name: str = MISSING

    @classmethod
    def versioned_parts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of further classes with a version that compute the numbers of a run with these canonical settings."""
        return ()

    def __post_init__(self) -> None:
        if self.name != type(self).name:
            raise ConfigError(f"task.name={self.name}: choose another task by task=..., not by its name")
        check_limits("task", self)


@dataclass
class ReadingConfig(TaskConfig):
    """Settings of every task that reads prompts (a passage, a prefix, what a user says).

    `bos`: whether a prompt or window begins with the begin-of-text token; None: if the model was trained with it.
    """

    prefill: Prefill = Prefill.whole
    bos: bool | None = None
