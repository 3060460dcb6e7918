"""Plugins: installed packages, and folders given by `--config-dir`, that add configurations and code to kvq.

An installed package names a `Plugin` as an entry point of the group `kvq.plugins`. A folder is laid out as `conf/`
is; its task `DIR/task/NAME.yaml` is implemented by `DIR/NAME.py`. Importing the module that holds a `Plugin` must be
cheap: what it names is imported when a run or a command first needs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvq.config.choices import Choice, choices_in, conf_dir, store_choice
from kvq.config.diagnostics import TaskConfig
from kvq.errors import ConfigError, one_line

if TYPE_CHECKING:
    from argparse import ArgumentParser

ENTRY_POINTS = "kvq.plugins"
SELECT = "KVQ_PLUGINS"
"""Environment variable: `none`, or the plugins to use, separated by commas; unset: all that are installed."""
_in_use: list[Path] = []
_failures: dict[str, str] = {}
"""Name of a plugin that cannot be imported -> the reason."""


@dataclass(frozen=True)
class Plugin:
    """What a package adds to kvq.

    Attributes:
        name: of the package, as it is imported. Its folder `conf/`, if there is one, holds choices.
        tasks: name of a task -> module that defines it as `TASK`, or in `TASKS` by name.
        settings: module whose `SCHEMAS` has the dataclass of each task's settings; None: each is next to its task.
        commands: word after `kvq` -> module whose `main()` runs the command.
        modules: extension point (`figures`, `kernels`, `trellis`) -> modules that serve it when imported.
        renamed: earlier import path of a class, which keys and records keep -> its path now.
        keyed: class -> the class of kvq that it derives from, whose name and version keys and records have;
            empty: its settings stand there without a class.
        has_versions: its classes that decide numbers have `version: ClassVar[int]`; false: their file's code is it.
    """

    name: str
    tasks: Mapping[str, str] = field(default_factory=dict)
    settings: str | None = None
    commands: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    keyed: Mapping[str, str] = field(default_factory=dict)
    has_versions: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the package."""
        return Path(str(sys.modules[self.name.partition(".")[0]].__file__)).parent


@functools.cache
def installed() -> Mapping[str, Plugin]:
    """The plugins in use by name. One that cannot be imported is left out, with one line on stderr."""
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    selected = {word.strip() for word in os.environ.get(SELECT, ",".join(entries)).split(",")}
    names = sorted(selected & entries.keys())
    found = {name: plugin for name in names if (plugin := _load(entries[name])) is not None}
    owners: dict[tuple[str, str], str] = {}
    for name, plugin in found.items():
        for kind, word in [("task", word) for word in plugin.tasks] + [("command", word) for word in plugin.commands]:
            if (other := owners.setdefault((kind, word), name)) != name:
                raise ConfigError(f"plugins {other} and {name} both register {kind} {word}; uninstall one")
    return found


def _load(entry: importlib.metadata.EntryPoint) -> Plugin | None:
    """The plugin of an entry point; None, with a line on stderr, where its import fails."""
    try:
        plugin = entry.load()
        if not isinstance(plugin, Plugin):
            raise TypeError(f"{entry.value} is no kvq.config.plugins.Plugin")
    except Exception as error:  # a plugin may raise anything
        _failures[entry.name] = reason = f"{type(error).__name__}: {one_line(error)}"
        print(f"plugin {entry.name}: cannot be imported ({reason}); going on without it", file=sys.stderr)
        return None
    return plugin


def failures() -> str:
    """What to add to an error about a name that nobody registered: the plugins that could not be imported."""
    installed()
    return "".join(f" Plugin {name} cannot be imported ({reason})." for name, reason in _failures.items())


def import_modules(point: str) -> list[ModuleType]:
    """Import the modules that plugins register for an extension point, so that they add themselves there."""
    return [importlib.import_module(name) for plugin in installed().values() for name in plugin.modules.get(point, ())]


def merge_tables(name: str) -> dict[str, str]:
    """The tables of this name (`commands`, `renamed`, `keyed`) of all plugins, as one."""
    return {key: value for plugin in installed().values() for key, value in getattr(plugin, name).items()}


def packages() -> list[Path]:
    """The folders of all plugins' packages."""
    return [plugin.folder for plugin in installed().values()]


@contextmanager
def using(folder: str | Path | None) -> Iterator[None]:
    """Within the context, compose from this folder too where none is given (None: none)."""
    before = list(_in_use)
    _in_use[:] = [] if folder is None else [Path(folder).resolve()]
    for path in _in_use:
        _make_importable(path)
    try:
        yield
    finally:
        _in_use[:] = before


def _make_importable(folder: Path) -> None:
    """Append a folder to Python's path: a file in it never replaces an installed module."""
    if str(folder) not in sys.path and folder.is_dir():
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def folder_in_use(folder: str | Path | None = None) -> Path | None:
    """The resolved folder, or where None is given the one in use, if any."""
    return Path(folder).resolve() if folder is not None else next(iter(_in_use), None)


def conf_dirs(folder: str | Path | None = None) -> list[Path]:
    """The folders of choices: kvq's, those of plugins in order of their names, then `folder` or the one in use."""
    last = folder_in_use(folder)
    return [*_shared_dirs(), *([] if last is None or not last.is_dir() else [last])]


@functools.cache
def _shared_dirs() -> tuple[Path, ...]:
    """The folders of choices of kvq and the plugins."""
    found = (conf_dir(), *(conf for package in packages() if (conf := package / "conf").is_dir()))
    owners: dict[tuple[str, str], Path] = {}
    for choice in (choice for folder in found for choice in choices_in(folder)):
        other = owners.setdefault((choice.group, choice.name), choice.file)
        if other != choice.file:
            raise ConfigError(f"{choice.group}={choice.name}: defined in {other} and in {choice.file}; rename one")
    return found


def all_choices(config_dir: str | Path | None = None) -> Iterator[Choice]:
    """The choices of all folders of `conf_dirs`."""
    for folder in conf_dirs(config_dir):
        yield from choices_in(folder)


def add_option(parser: ArgumentParser) -> None:
    """Add `--config-dir` to a command that reads records: it finds what made them, and presets to name them by."""
    parser.add_argument("--config-dir", type=Path, help="another folder of configurations and modules, as in run.py")


def register_tasks(folder: Path | None) -> None:
    """Make the schemas of tasks of plugins and of a folder known to Hydra, as `NAME_schema` of the group `task`.

    A task's module is imported when Hydra reads its schema.
    """
    for plugin in installed().values():
        for name in plugin.tasks:
            store_choice("task", f"{name}_schema", partial(settings_of_task, name))
    if folder is None or not folder.is_dir():
        return
    _make_importable(folder)
    for yaml in (folder / "task").glob("*.yaml"):
        if (file := folder / f"{yaml.stem}.py").is_file():
            store_choice("task", f"{yaml.stem}_schema", partial(_settings_of, yaml.stem, yaml.stem, file))


def unknown_task(task: str, folder: Path | None) -> str:
    """The error line for a task whose schema neither a plugin nor the folder registers."""
    place = f"no {task}.py in {folder}" if folder else "no --config-dir"
    return (
        f"task={task}: its settings ({task}_schema) are not known: {place}, and no plugin (entry point of the group "
        f"{ENTRY_POINTS}) registers task {task}.{failures()}"
    )


def settings_of_task(task: str) -> type[TaskConfig]:
    """The dataclass of the settings of a plugin's task, whose module is imported."""
    plugin = next((plugin for plugin in installed().values() if task in plugin.tasks), None)
    if plugin is None:
        raise ConfigError(unknown_task(task, None))
    if plugin.settings is not None:
        found: type[TaskConfig] = importlib.import_module(plugin.settings).SCHEMAS[task]
        return found
    return _settings_of(task, plugin.tasks[task])


def module_of_task(settings: TaskConfig) -> str:
    """Module of the task of these settings: that of their class, or the one that the class's plugin names."""
    home = type(settings).__module__
    return next((one.tasks[settings.name] for one in installed().values() if one.settings == home), home)


def _settings_of(task: str, module: str, file: Path | None = None) -> type[TaskConfig]:
    """The dataclass of a task's settings, checked; its module is imported (from `file`: of a folder)."""
    where = f"task={task}: {file or module}"
    try:
        found = importlib.import_module(module)
    except Exception as error:  # somebody else's code may raise anything
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{where} cannot be imported ({reason})") from error
    if file is not None and Path(getattr(found, "__file__", None) or "").resolve() != file.resolve():
        raise ConfigError(f"{where}: the name is taken by another module; rename the task")
    defined = getattr(found, "TASKS", {}).get(task) or getattr(found, "TASK", None)
    settings: Any = getattr(defined, "settings", None)
    if not (isinstance(settings, type) and issubclass(settings, TaskConfig) and is_dataclass(settings)):
        raise ConfigError(f"{where}: no TASK with settings=..., a dataclass that derives from kvq.config.TaskConfig")
    if settings.name != task and settings.name not in {getattr(base, "name", None) for base in settings.__bases__}:
        raise ConfigError(f"{where}: {settings.__name__}.name is '{settings.name}'; expected '{task}'")
    if not isinstance(getattr(settings, "version", None), int):
        raise ConfigError(f"{where}: {settings.__name__} has no version; give version: ClassVar[int] = 1")
    return settings
