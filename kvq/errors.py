"""Errors that a user can act on, and range checks; a message names the setting, what was given, what is allowed."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable

MAX_SEED = 2**32 - 1
MAX_RESAMPLES = 10**6
MAX_THREADS = 1024
MAX_DIGITS = 18
"""Digits of a number that fits into 64 bits."""


class KvqError(Exception):
    """An expected failure: bad input or a combination that cannot be done. The message is one line."""


class ConfigError(KvqError):
    """A setting that is unknown or out of range."""


class Unsupported(KvqError):
    """A valid setting that this method, head dim or model cannot do; a sweep records it and goes on."""


class DataError(KvqError):
    """Text or tensors that cannot be used: missing, empty, too short, or not finite."""


class RecordError(KvqError):
    """A results folder or record that cannot be read or written."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest option, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def printable(text: str) -> str:
    """`text` with its lines, without other control characters and marks that change the direction of writing."""
    if text.isprintable():
        return text
    kept = text.expandtabs(4)
    return "".join(character for character in kept if character == "\n" or unicodedata.category(character)[0] != "C")


def one_line(error: BaseException, most: int | None = None) -> str:
    """All that another library's error says in one line of at most `most` characters, or its type if it is silent."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most]


def reason_of(error: Exception) -> str:
    """Why a file cannot be used, in one line: what the system says, without the path, else the error's own words."""
    return (error.strerror if isinstance(error, OSError) else None) or one_line(error)


def check_choice(setting: str, value: str, options: Iterable[str]) -> None:
    """Raise `ConfigError` naming `setting` when `value` is none of `options`."""
    known = list(options)
    if value not in known:
        raise ConfigError(f"{setting}={value}: one of {', '.join(known)}.{did_you_mean(str(value), known)}")


def at_least(setting: str, value: int | float | None, lowest: int | float) -> None:
    """Raise `ConfigError` naming `setting` when `value` lies below `lowest`; None is no value."""
    require(value is None or value >= lowest, setting, value, f"at least {lowest}")


def within(setting: str, value: int | None, lowest: int, highest: int) -> None:
    """Raise `ConfigError` naming `setting` when `value` lies outside of a range; None is no value."""
    at_least(setting, value, lowest)
    require(value is None or value <= highest, setting, value, f"at most {highest}")


def require(
    holds: bool, setting: str, value: object, allowed: str, kind: type[ConfigError | Unsupported] = ConfigError
) -> None:
    """Raise `kind` naming `setting`, the `value` given and what is `allowed`, unless a condition `holds`."""
    if not holds:
        raise kind(f"{setting}={value}: {allowed}")


def check_seed(setting: str, value: int) -> None:
    """Raise `ConfigError` naming `setting` when `value` is no seed."""
    require(0 <= value <= MAX_SEED, setting, value, f"0 to {MAX_SEED}")


def not_empty(setting: str, value: str | None) -> None:
    """Raise `ConfigError` naming `setting` when `value` is an empty text, such as that of an unset variable."""
    require(value is None or bool(value.strip()), setting, value, "empty")


def check_path(setting: str, path: str | None) -> None:
    """Raise `ConfigError` naming `setting` for what no path can be: empty, too long, with a null character."""
    not_empty(setting, path)
    try:
        os.lstat(path or ".")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}={str(path)[:40]!r}...: {reason_of(error)}") from error
