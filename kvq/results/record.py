"""The record of a run: its configuration, measurements and provenance, and the versions of the parts that made it.

A class that decides numbers (a stage, a quantizer, a codec, a policy, the cache, a task's settings) has a
`version: ClassVar[int]`, raised by hand when what it computes changes; `tests/golden` fails where it changes and the
version does not. A part outside the package has no version to raise: the hash of its file stands for it (`code_hash`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import math
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from kvq.config import plugins
from kvq.config.diagnostics import TaskConfig
from kvq.config.limits import file_hash
from kvq.config.method import current_names
from kvq.config.tasks import SCHEMAS
from kvq.errors import RecordError

SCHEMA_VERSION: Final = 2
# Beyond this an integral float no longer names one integer, so 1e300 stays a float in canonical JSON.
Status = Literal["done", "failed", "unsupported"]
KEY_PATTERN = re.compile(r"[0-9a-f]{64}\Z")
Versions = dict[str, int | str]
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_CLASS: Final = re.compile(r"^class (\w+)|^    version: ClassVar\[int\] = (\d+)$|^    name: str = \"(\w+)\"$", re.M)
# Settings of a method without a `_target_`, and the class that reads them.
_IMPLIED: Final = {
    "sink_tokens": "SinkSide",
    "gqa_compensation": "GqaCompensation",
    "merge_rotation": "MergedRotation",
    "kept_keys": "KeptSide",
    "calibration": "CalibrationConfig",
}
_LONG_TRELLIS: Final = 8  # bits of a state, above which a trellis is one


def canonical(value: Any, where: str = "config") -> Any:
    """Return `value` as plain JSON data in one form: tuples as lists, integral floats (8.0, -0.0) as integers."""
    if type(value) in (str, int, bool, type(None)):  # most values of a configuration
        return value
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise RecordError(f"{where}: a key of {list(value)} is not a string")
        return {str(key): canonical(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(f"{where} is {value}; it must be finite")
        return int(value) if value.is_integer() and abs(value) <= 2.0**53 else float(value)  # exact
    if isinstance(value, str):  # of a class of its own, as of an enumeration
        return str(value)
    raise RecordError(f"{where} is of type {type(value).__name__}; allowed is plain JSON data")


def run_key(config: Mapping[str, Any]) -> str:
    """Return the key of a run: 64 hex digits, the SHA-256 of the canonical JSON of `config` (keys sorted)."""
    text = json.dumps(canonical(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Provenance(_Frozen):
    """Where a measurement came from: code, machine, data, model, command and cost."""

    git_commit: str | None = Field(description="commit of the checkout that the package runs from; null outside one")
    git_dirty: bool | None = Field(description="code or configuration differs from that commit")
    packages: dict[str, str] = Field(description="distribution name -> version")
    python: str
    platform: str
    cpu: str
    device: str = Field(description="'cpu', or the name of the accelerator")
    threads: int
    dtype: str = Field(description="compute dtype of the model")
    cpu_linear: str = Field(default="torch", description="library of the model's float32 linear layers on a CPU")
    engine: str | None = Field(default=None, description="program of the logits, with its build; null: transformers")
    dataset_fingerprint: str | None = Field(default=None, description="null: the run ended before the data was loaded")
    dataset_source: str | None = Field(default=None, description="what dataset.path was; null: not local, or unknown")
    model_fingerprint: str | None = Field(default=None, description="null: the run ended before the model was loaded")
    command: str
    started: Annotated[AwareDatetime, AfterValidator(lambda moment: moment.astimezone(UTC))]
    wall_seconds: dict[str, StrictFloat] = Field(default_factory=dict, description="phase -> seconds")
    peak_memory_bytes: int | None = Field(default=None, description="of this run; null where it cannot be measured")
    seed: int


class FromPresets(_Frozen):
    """How a run's settings depart from the presets of the same names, in words; empty: not at all."""

    method: list[str] = Field(description="of the method, such as '− key.hadamard' or 'residual 64'")
    protocol: list[str] = Field(description="of task, model, data set and seed")
    first_token: list[str] = Field(description="how windows or prompts begin, where the model was trained otherwise")


class Record(_Frozen):
    """The record of one run, written once at its end and validated when read; `Store.put` gives `samples_sha256`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    key: str
    status: Status
    reason: str | None = None
    task: str
    model: str
    dataset: str
    method: str
    bits: str = Field(description="bit label such as '3' or 'k3v2'; empty for a method with a fixed rate")
    label: str | None = Field(
        default=None, description="the method's name with what departs from its preset; null: of an earlier version"
    )
    from_presets: FromPresets | None = Field(default=None, description="words of the label and of the table's title")
    command: str | None = Field(
        default=None, description="command of this run alone; null: of an earlier version, or not from a command line"
    )
    baseline_key: str | None = Field(default=None, description="key of the full-precision run it is paired with")
    config: dict[str, Any]
    metrics: dict[str, StrictFloat] = Field(default_factory=dict)
    units: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, int | str] = Field(description="versions of the parts that made the numbers, by name")
    provenance: Provenance
    samples_sha256: str | None = Field(default=None, description="digest of the samples file; null without samples")

    @field_validator("config", mode="before")
    @classmethod
    def _canonical_config(cls, value: Any) -> Any:
        """Bring `config` into the one form whose hash is the key."""
        try:
            return canonical(value)
        except RecordError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _key_names_config(self) -> Record:
        """Refuse a key that is not the hash of `config` (`run_key`)."""
        expected = run_key(self.config)
        if self.key != expected:
            raise ValueError(f"key {self.key[:12]!r}... does not name this config (expected {expected[:12]}...)")
        return self


def _check_finite(record: Record) -> None:
    """Refuse measurements that are not numbers."""
    for name, value in record.metrics.items():
        if not math.isfinite(value):
            where = f"{record.method} bits={record.bits or 'fixed'}"
            raise RecordError(f"{where}: metric '{name}' is {value}; it must be finite")


def dump_record(record: Record) -> bytes:
    """Return the bytes of a record's file: JSON, keys sorted, two spaces of indent, a final newline."""
    _check_finite(record)
    text = json.dumps(record.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False)
    return f"{text}\n".encode()


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which JSON does not have; for `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is not a JSON number")


def parse_record(content: bytes) -> Record:
    """Read what `dump_record` wrote."""
    try:
        data = json.loads(content.decode("utf-8"), parse_constant=refuse_constant)
        if not isinstance(data, dict):
            raise RecordError("not a record: the top level is not an object")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise RecordError(f"schema_version is {data.get('schema_version')!r:.40}; this kvq reads {SCHEMA_VERSION}")
        record = Record.model_validate(data)
    except ValidationError as error:  # a ValueError too
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise RecordError(f"{where}: {' '.join(first['msg'].split())}{more}") from None
    except ValueError as error:
        raise RecordError(f"not valid JSON: {' '.join(str(error).split())}") from None
    except (RecursionError, OverflowError) as error:  # nested too deeply; a date that is none in UTC
        raise RecordError(f"not a record: {error}") from None
    _check_finite(record)
    return record


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
