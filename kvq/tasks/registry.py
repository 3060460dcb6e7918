"""Tasks by name, each imported when a run first asks for it."""

from __future__ import annotations

import importlib

from kvq.config.diagnostics import SCHEMAS as DIAGNOSTICS
from kvq.config.speed import SCHEMAS as SPEED
from kvq.errors import ConfigError, did_you_mean
from kvq.tasks.measurement import Task

_TASKS = ("ppl", "niah", "longbench", "lm_eval", "multimodal", *DIAGNOSTICS, *SPEED)
MODULES = {name: f"kvq.tasks.{name}" for name in _TASKS}


def task_of(name: str) -> Task:
    """The task of a name.

    Raises:
        ConfigError: an unknown name, or a package that the task needs and that is not installed.
    """
    if name not in MODULES:
        raise ConfigError(f"task={name}: one of {', '.join(MODULES)}.{did_you_mean(name, MODULES)}")
    try:
        task: Task = importlib.import_module(MODULES[name]).TASK
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvq":
            raise
        raise ConfigError(f"task={name}: needs {error.name}; pip install -e '.[eval]'") from error
    return task
