"""The record of a run: its configuration, its measurements and their provenance."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from kvq.errors import RecordError

SCHEMA_VERSION: Final = 2
# Beyond this an integral float no longer names one integer, so 1e300 stays a float in canonical JSON.
_EXACT_INTEGERS = 2.0**53
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})  # most values of a configuration

Status = Literal["done", "failed", "unsupported"]
KEY_PATTERN = re.compile(r"[0-9a-f]{64}\Z")


def canonical(value: Any, where: str = "config") -> Any:
    """Return `value` as plain JSON data in one form: tuples as lists, integral floats (8.0, -0.0) as integers."""
    if type(value) in _AS_THEY_ARE:
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
        return int(value) if value.is_integer() and abs(value) <= _EXACT_INTEGERS else float(value)
    if isinstance(value, str):  # of a class of its own, as of an enumeration
        return str(value)
    raise RecordError(f"{where} is of type {type(value).__name__}; allowed is plain JSON data")


def run_key(config: Mapping[str, Any]) -> str:
    """Return the key of a run: 64 hex digits, the SHA-256 of the canonical JSON of `config` (keys sorted)."""
    text = json.dumps(canonical(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _check_number(value: Any) -> Any:
    """Refuse text and booleans, which pydantic would convert to a float."""
    if isinstance(value, str | bool):
        raise ValueError(f"{value!r:.40} is not a number")
    return value


Number = Annotated[float, BeforeValidator(_check_number)]


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
    engine: str | None = Field(
        default=None, description="program that computed the logits, with its build; null: transformers"
    )
    dataset_fingerprint: str | None = Field(default=None, description="null: the run ended before the data was loaded")
    dataset_source: str | None = Field(
        default=None, description="what dataset.path was; null: no local text, or unknown"
    )
    model_fingerprint: str | None = Field(default=None, description="null: the run ended before the model was loaded")
    command: str
    started: Annotated[AwareDatetime, AfterValidator(lambda moment: moment.astimezone(UTC))]
    wall_seconds: dict[str, Number] = Field(default_factory=dict, description="phase -> seconds")
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
    metrics: dict[str, Number] = Field(default_factory=dict)
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
