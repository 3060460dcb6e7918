"""What lives outside the package: configurations and modules in a folder, and tasks of installed packages.

A folder (`--config-dir`) is laid out as `conf/` is. Its modules can be imported, behind all that is installed. A task
is a module `DIR/<name>.py` beside `DIR/task/<name>.yaml`; an installed package names one as an entry point of the group
`kvq.tasks` (`<name> = "package.module"`), and needs no YAML.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore

from kvq.config.task import TaskConfig
from kvq.config.tasks import SCHEMAS
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "kvq.tasks"
_failed: dict[str, str] = {}
_registered: dict[str, type[TaskConfig]] = {}
_used: list[Path] = []


def use(folder: str | Path | None) -> None:
    """Set the folder from which the process also composes where none is given (None: only from `conf/`)."""
    _used[:] = [] if folder is None else [Path(folder).resolve()]
    for own in _used:
        _make_importable(own)


@contextmanager
def using(folder: str | Path | None) -> Iterator[None]:
    """Within the context, compose from this folder too, as `use` does; afterwards from the previous one."""
    before = list(_used)
    use(folder)
    try:
        yield
    finally:
        _used[:] = before


def folder_of(given: str | Path | None = None) -> Path | None:
    """The further folder of configurations: the one given, or the one in use."""
    return Path(given).resolve() if given is not None else next(iter(_used), None)


def admit(folder: Path | None) -> None:
    """Make the modules of a folder importable, and its tasks and those of installed packages known to Hydra.

    A task that cannot be imported is left out: `why_not` says why when it is asked for.
    """
    for name, entry in installed().items():
        _register(name, entry.module, None)
    if folder is None or not folder.is_dir():
        return
    _make_importable(folder)
    for yaml in sorted((folder / "task").glob("*.yaml")):
        module = folder / f"{yaml.stem}.py"
        if yaml.stem not in SCHEMAS and module.is_file():
            _register(yaml.stem, yaml.stem, module)


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path and folder.is_dir():
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def add_option(parser: ArgumentParser) -> None:
    """Add `--config-dir` to a command that reads records: it finds what made them, and presets to name them by."""
    parser.add_argument(
        "--config-dir", type=Path, help="a further folder of configurations and modules, as run.py has it"
    )


def import_path(folder: Path) -> str:
    """`PYTHONPATH` under which processes that this one starts find the modules of a folder too."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(folder)]))


@functools.cache
def installed() -> dict[str, EntryPoint]:
    """Tasks of installed packages by name; none is imported."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry for entry in sorted(found, key=lambda entry: entry.name) if entry.name not in SCHEMAS}


def described() -> dict[str, str]:
    """Tasks of installed packages by name, each with a line for `--help`."""
    named = {name: entry.dist for name, entry in installed().items()}
    return {name: f"Task of {dist.name} {dist.version}." if dist else "" for name, dist in named.items()}


def why_not(name: str, folder: Path | None) -> str:
    """One line for a task whose settings are not known."""
    if name in _failed:
        return f"task={name}: {_failed[name]}"
    beside = f"no {name}.py in {folder}" if folder else "no --config-dir"
    return (
        f"task={name}: its settings ({name}_schema) are not known: {beside}, and no installed package has an entry "
        f"point {name} of the group {ENTRY_POINTS}"
    )


def searched(module: str) -> str:
    """What to add to an error about a module that is not found: where it was looked for, and what to do."""
    skipped = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    folders = dict.fromkeys(Path(path or ".").resolve() for path in sys.path)
    shown = [str(path) for path in folders if path.is_dir() and path not in skipped and path.name != "lib-dynload"]
    return (
        f"; looked in {', '.join([*shown, 'installed packages'])}. Put {module}.py in the folder of --config-dir=..., "
        "or set PYTHONPATH to its folder, or install its package"
    )


def _register(name: str, module: str, file: Path | None) -> None:
    try:
        settings = _settings_of(name, _imported(module, file))
    except ConfigError as error:
        _failed[name] = str(error)
        return
    _failed.pop(name, None)
    if _registered.get(name) is settings:
        return
    _registered[name] = settings
    ConfigStore.instance().store(group="task", name=f"{name}_schema", node=settings)
    if file is None:
        ConfigStore.instance().store(group="task", name=name, node=settings)


def _imported(name: str, file: Path | None) -> ModuleType:
    where = name if file is None else str(file)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # somebody else's code may raise anything
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} cannot be imported ({type(error).__name__}: {reason})") from error
    found = getattr(module, "__file__", None)
    if file is not None and (found is None or Path(found).resolve() != file.resolve()):
        raise ConfigError(f"{where}: the name is taken by {found or 'a built-in module'}; rename the task")
    return module


def _settings_of(name: str, module: ModuleType) -> type[TaskConfig]:
    where = module.__file__
    if not hasattr(module, "TASK"):
        raise ConfigError(f"{where} has no TASK (a kvq.tasks.measurement.Task)")
    settings = getattr(module.TASK, "settings", None)
    if not (isinstance(settings, type) and issubclass(settings, TaskConfig) and is_dataclass(settings)):
        raise ConfigError(f"{where}: TASK has no settings=..., a dataclass that derives from kvq.config.TaskConfig")
    if settings.__module__ != module.__name__:
        raise ConfigError(f"{where}: {settings.__name__} is defined in {settings.__module__}; keep it beside TASK")
    if settings.name != name:
        raise ConfigError(f"{where}: {settings.__name__}.name is '{settings.name}'; expected '{name}'")
    if not isinstance(getattr(settings, "version", None), int):
        raise ConfigError(f"{where}: {settings.__name__} has no version; give version: ClassVar[int] = 1")
    return settings
