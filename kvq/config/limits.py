"""Ranges of settings, declared where a setting is (`windows: Count = 8`) and checked as it is resolved."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from kvq.errors import MAX_RESAMPLES, at_least, check_choice, check_path, check_seed, not_empty, require, within

Check = Callable[[str, Any], None]
"""Raises `ConfigError` for a value, naming its setting; None is no value."""


def least(lowest: int) -> Check:
    """A check for numbers from `lowest` on."""
    return functools.partial(at_least, lowest=lowest)


def between(lowest: int, highest: int) -> Check:
    """A check for numbers from `lowest` to `highest`, both included."""
    return functools.partial(within, lowest=lowest, highest=highest)


def among(options: Sequence[str]) -> Check:
    """A check for one of these names."""
    return functools.partial(check_choice, options=options)


def each(lowest: int) -> Check:
    """A check for lists of distinct numbers, at least one, none below `lowest`."""

    def check(setting: str, given: Sequence[float]) -> None:
        each_once(setting, given)
        at_least(setting, min(given), lowest)

    return check


def each_once(setting: str, given: Sequence[Any]) -> None:
    """Raise `ConfigError` for an empty list, or one with equal entries."""
    require(bool(given) and len(set(given)) == len(given), setting, given, "a list of one or more, each once")


def no_twice(setting: str, given: Sequence[Any]) -> None:
    """Raise `ConfigError` for a list of names with equal entries; it may be empty."""
    require(len(set(given)) == len(given), setting, [str(name) for name in given], "each once")


Natural = Annotated[int, least(0)]
Count = Annotated[int, least(1)]
Several = Annotated[int, least(2)]
Resamples = Annotated[int, between(2, MAX_RESAMPLES)]
Seed = Annotated[int, check_seed]
Text = Annotated[str, not_empty]
PathName = Annotated[str, check_path]
Positive = Annotated[float, lambda setting, given: require(given > 0, setting, given, "above 0")]
Share = Annotated[float, lambda setting, given: require(0 < given < 1, setting, given, "above 0 and below 1")]
Counts = Annotated[list[int], each(1)]
Names = Annotated[list[str], each_once]


def check_limits(prefix: str, settings: object) -> None:
    """Check all settings of a dataclass (`prefix`) whose annotations declare a range, but those that are null."""
    kind: Any = type(settings)
    for name, check in _checks(kind):
        if (given := getattr(settings, name)) is not None:
            check(f"{prefix}.{name}", given)


@functools.cache
def _checks(kind: type) -> tuple[tuple[str, Check], ...]:
    """The name and check of every field of a dataclass whose annotation declares one."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((name, check) for name, hint in hints.items() for check in _declared_checks(hint))


def _declared_checks(hint: Any) -> list[Check]:
    """The checks of `Annotated[...]`, also where it is one of several types (`Count | None`)."""
    own = list(hint.__metadata__) if get_origin(hint) is Annotated else []
    return own or [check for inner in get_args(hint) for check in _declared_checks(inner)]


def cache_folder() -> Path:
    """Where kvq keeps joined files and composed settings: `$XDG_CACHE_HOME/kvq`, or `~/.cache/kvq`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvq"


def file_hash(file: Path) -> str:
    """The sha256 (hex) of a file, which is read once in a process unless it changes."""
    state = file.stat()
    return _file_hash(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _file_hash(file: Path, modified: int, size: int) -> str:  # a changed file is hashed again
    """The sha256 (hex) of a file, cached until its time of change or size differs."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
