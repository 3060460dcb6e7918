"""Errors a user can act on: each message is one line that names the setting, what was given and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def first_line(error: Exception) -> str:
    """The first line of what another library's error says, or the error's type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
