"""Which versions of which parts made a record, and whether one has been raised since.

A class that decides numbers (a stage, a quantizer, a codec, a policy, the cache, a task's settings) has a
`version: ClassVar[int]`, raised by hand when what it computes changes; `tests/golden` fails where it changes and the
version does not. A part outside the package has no version to raise: the code of its file stands for it.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvq.config.task import TaskConfig
from kvq.config.tasks import SCHEMAS
from kvq.errors import RecordError
from kvq.results.record import Record
from kvq.results.source import code_hash, file_of_module

Versions = dict[str, int | str]

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_CLASS: Final = re.compile(r"^class (\w+)|^    version: ClassVar\[int\] = (\d+)$", re.MULTILINE)
# Settings of a method without a `_target_`, and the class that reads them.
_BEHIND: Final = {
    "sink_tokens": "SinkSide",
    "gqa_compensation": "GqaCompensation",
    "merge_rotation": "MergedRotation",
    "merge_key_rotation": "MergedRotation",
    "kept_keys": "KeptSide",
    "backend": "BackendConfig",
    "calibration": "CalibrationConfig",
}

_ENGINES: Final = {"llamacpp": "LlamaCpp", "mlx": "Mlx"}


@functools.cache
def declared() -> Mapping[str, int]:
    """Version of every class of the package that has one, by its name, and of every task; nothing is imported."""
    found: dict[str, int] = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = ""
        for match in _CLASS.finditer(text) if "version: ClassVar[int]" in text else ():
            if match[1]:
                name = match[1]
            elif found.setdefault(name, int(match[2])) != int(match[2]):
                raise RecordError(f"two classes named {name} have versions; a name stands for one class")
    return found | {name: schema.version for name, schema in SCHEMAS.items()}


def versions_of(config: Mapping[str, Any], task: type[TaskConfig] | None = None) -> Versions:
    """Versions of all that makes the numbers of a run, by name: its task, the cache, the parts of its method.

    A task outside the package is there by its version and, as the class of its settings, by the code of its file.

    Args:
        config: the run's canonical settings (`kvq.config.identity.canonical`); its `_target_`s are imported.
        task: the class of the task's settings (None: that of the package's task).

    Raises:
        RecordError: a part of the package without a version.
    """
    name = config["task"]["name"]
    task = task or SCHEMAS[name]
    names = {"KVCache"} if task.reads_cache else set()
    if config["model"].get("outliers"):
        names.add("OutliersConfig")
    if (engine := config["task"].get("engine")) is not None:
        names.add(_ENGINES[engine["name"]])
    own = {name: declared()[name] for name in names}
    found: Versions = {name: task.version, **own, **versions_of_method(config["method"])}
    if name not in SCHEMAS:
        found |= _versions_behind(task)
    return dict(sorted(found.items()))


def versions_of_method(method: Mapping[str, Any]) -> Versions:
    """Versions of all that a method's canonical settings ask for: the classes that they name, and those they imply.

    Raises:
        RecordError: as `versions_of_parts`.
    """
    implied = {behind: declared()[behind] for setting, behind in _BEHIND.items() if method.get(setting)}
    return {**implied, **versions_of_parts(method)}


def versions_of_parts(method: Any) -> Versions:
    """Versions of the classes that a method's canonical settings name, which are imported.

    Raises:
        RecordError: a part of the package without a version.
    """
    found: Versions = {}
    for target in set(_targets(method)):
        found |= _versions_behind(pkgutil.resolve_name(target))
    return found


def is_stale(record: Record) -> bool:
    """Return whether a part that made a record has another version since, or is gone; nothing is imported."""
    return judge()(record)


def judge() -> Callable[[Record], bool]:
    """`is_stale` for many records at once: files outside the package are read once."""
    now = functools.cache(_now)
    return lambda record: any(now(name) != version for name, version in _judged(record))


def _judged(record: Record) -> Iterator[tuple[str, int | str]]:
    """The versions that decide whether a record is stale: of a task outside the package, the hash of its file."""
    by_file = record.task not in SCHEMAS and any(isinstance(version, str) for version in record.versions.values())
    return ((name, version) for name, version in record.versions.items() if not (by_file and name == record.task))


def _targets(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("_target_"), str):
            yield value["_target_"]
        for item in value.values():
            yield from _targets(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _targets(item)


def _versions_behind(part: Any) -> Versions:
    """Versions of a class and of those it inherits from; of what lies outside the package, a hash of its file."""
    found: Versions = {}
    for kind in inspect.getmro(part) if inspect.isclass(part) else (part,):
        if kind.__module__ == "kvq" or kind.__module__.startswith("kvq."):
            if kind.__name__ in declared():
                found[kind.__name__] = declared()[kind.__name__]
        elif kind.__module__ not in sys.stdlib_module_names and (file := file_of_module(kind.__module__)) is not None:
            found[f"{kind.__module__}.{kind.__qualname__}"] = code_hash(file)
    if not found:
        raise RecordError(f"{part.__module__}.{part.__qualname__}: no version: ClassVar[int] to tell its numbers by")
    return found


def _now(name: str) -> int | str | None:
    if name in declared():
        return declared()[name]
    parts = name.split(".")
    files = (file_of_module(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    found = next((file for file in files if file is not None), None)
    return None if found is None else code_hash(found)
