"""Which versions of which parts made a record, and whether one has been raised since.

A class that decides numbers (a stage, a quantizer, a codec, a policy, the cache, a task's settings) has a
`version: ClassVar[int]`, raised by hand when what it computes changes; `tests/golden` fails where it changes and the
version does not. A part outside the package has no version to raise: the hash of its file stands for it (`code_hash`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from kvq.config import plugins
from kvq.config.diagnostics import TaskConfig
from kvq.config.limits import file_hash
from kvq.config.method import current_names
from kvq.config.tasks import SCHEMAS
from kvq.errors import RecordError
from kvq.results.record import Record

Versions = dict[str, int | str]

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_CLASS: Final = re.compile(
    r"^class (\w+)|^    version: ClassVar\[int\] = (\d+)$|^    name: str = \"(\w+)\"$", re.MULTILINE
)
# Settings of a method without a `_target_`, and the class that reads them.
_IMPLIED: Final = {
    "sink_tokens": "SinkSide",
    "gqa_compensation": "GqaCompensation",
    "merge_rotation": "MergedRotation",
    "kept_keys": "KeptSide",
    "calibration": "CalibrationConfig",
}
_LONG_TRELLIS: Final = 8  # bits of a state, above which a trellis is one


@functools.cache
def declared_versions() -> Mapping[str, int]:
    """Version of every class of kvq and its plugins that has one, by name, and of every task; nothing is imported."""
    found: dict[str, int] = {}
    tasks = {task for plugin in plugins.installed().values() for task in plugin.tasks}
    for file in sorted(path for folder in (_PACKAGE, *plugins.packages()) for path in folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = task = ""
        for match in _CLASS.finditer(text) if "version: ClassVar[int]" in text else ():
            name, task = match[1] or name, "" if match[1] else match[3] or task
            if match[2] and found.setdefault(name, int(match[2])) != int(match[2]):
                raise RecordError(f"two classes named {name} have versions; a name stands for one class")
            if task in tasks and name in found:
                found[task] = found[name]
    return found | {name: schema.version for name, schema in SCHEMAS.items()}


def versions_of(config: Mapping[str, Any], task: type[TaskConfig] | None = None) -> Versions:
    """Versions of all that makes the numbers of a run, by name: its task, the cache, the parts of its method.

    A task outside the package is there by its version and, as the class of its settings (`task`), by the code of its
    file. The `_target_`s of `config`, the run's canonical settings, are imported.
    """
    name = config["task"]["name"]
    task = task or SCHEMAS.get(name) or plugins.settings_of_task(name)
    names = {*task.versioned_parts(config["task"]), *(("KVCache",) if task.reads_cache else ())}
    if config["model"].get("outliers"):
        names.add("OutliersConfig")
    own = {name: declared_versions()[name] for name in names}
    found: Versions = {name: task.version, **own, **versions_of_method(config["method"])}
    if name not in declared_versions():
        found |= _versions_of_class(task)
    return dict(sorted(found.items()))


def versions_of_method(method: Mapping[str, Any]) -> Versions:
    """Versions of all that a method's canonical settings ask for: the classes that they name, and those they imply."""
    names = {implied for setting, implied in _IMPLIED.items() if method.get(setting)}
    if any(isinstance(own, list) for layers in method.get("bits_by_layer", {}).values() for own in layers):
        names.add("HeadsCodec")
    return {**{name: declared_versions()[name] for name in names}, **versions_of_parts(method)}


def versions_of_parts(method: Any) -> Versions:
    """Versions of the classes that a method's canonical settings name, which are imported."""
    found, current = Versions(), current_names()
    for target in {current.get(name, name) for name in _values_of_setting("_target_", method) if isinstance(name, str)}:
        found |= _versions_of_class(pkgutil.resolve_name(target))
    if any(memory > _LONG_TRELLIS for memory in _values_of_setting("memory", method)):
        found["LongTrellis"] = declared_versions()["LongTrellis"]
    return found


def is_stale(record: Record) -> bool:
    """Return whether a part that made a record has another version since, or is gone; nothing is imported.

    Of a task outside the package the hash of its file counts, if there is one, and not its version.
    """
    hashed = any(isinstance(version, str) for version in record.versions.values())
    left_out = record.task if hashed and record.task not in declared_versions() else None
    return any(_current_version(name) != version for name, version in record.versions.items() if name != left_out)


def _values_of_setting(name: str, value: Any) -> Iterator[Any]:
    """Every value that settings, at any depth of mappings and lists, have under this name."""
    if isinstance(value, Mapping):
        yield from (own for key, own in value.items() if key == name)
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _values_of_setting(name, item)


def _versions_of_class(part: Any) -> Versions:
    """Versions of a class and its base classes; of what lies outside the package, a hash of its file."""
    found: Versions = {}
    versioned = {"kvq", *(name for name in plugins.installed() if plugins.installed()[name].has_versions)}
    for kind in inspect.getmro(part) if inspect.isclass(part) else (part,):
        if kind.__module__.partition(".")[0] in versioned:
            if kind.__name__ in declared_versions():
                found[kind.__name__] = declared_versions()[kind.__name__]
        elif kind.__module__ not in sys.stdlib_module_names and (file := file_of_module(kind.__module__)) is not None:
            found[f"{kind.__module__}.{kind.__qualname__}"] = code_hash(file)
    if not found:
        raise RecordError(f"{part.__module__}.{part.__qualname__}: no version: ClassVar[int] to tell its numbers by")
    return found


def _current_version(name: str) -> int | str | None:
    """The version that a class or task has now, or the hash of its file outside the package; None: it is gone."""
    if name in declared_versions():
        return declared_versions()[name]
    parts = name.split(".")
    files = (file_of_module(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    found = next((file for file in files if file is not None), None)
    return None if found is None else code_hash(found)


def code_hash(*files: Path) -> str:
    """Return the SHA-256 (hex) of the bytes of `files`, in any order."""
    digests = sorted(bytes.fromhex(file_hash(file)) for file in files)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def code_behind(part: Any) -> str:
    """Return `code_hash` of the file in which a function, or the class of an object, is written.

    What has no file counts by the name of its class.
    """
    part = inspect.unwrap(getattr(part, "func", part))  # a partial's
    for written in (part, type(part)):
        with contextlib.suppress(TypeError, OSError):
            return code_hash(Path(inspect.getfile(written)))
    return hashlib.sha256(f"{type(part).__module__}.{type(part).__qualname__}".encode()).hexdigest()


def file_of_module(name: str) -> Path | None:
    """File of a module, found without importing it or its packages; None where there is none."""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
