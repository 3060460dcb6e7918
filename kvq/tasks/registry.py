"""The task behind the settings of a run, imported when a run first asks for it."""

from __future__ import annotations

import importlib

from kvq.config import TaskConfig
from kvq.errors import ConfigError
from kvq.tasks.measurement import Task


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
