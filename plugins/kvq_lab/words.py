"""Commands whose words have the form `name=value`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

from kvq.errors import ConfigError, KvqError, printable


def run_command(
    arguments: Sequence[str] | None,
    usage: str,
    work: Callable[[list[str]], int],
    failed: type[KvqError],
    needs_words: bool = True,
) -> int:
    """The exit status of a command: that of `work`, or one line and 1 for an error of `failed`, 2 for any other.

    `--help` prints `usage` and gives 0, as no words at all where some are needed, which gives 2.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(words) or (needs_words and not words):
        print(usage)
        return 0 if words else 2
    try:
        return work(words)
    except KvqError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1 if isinstance(error, failed) else 2


def parse_words(words: Sequence[str], names: Collection[str], bounds: bool = False) -> dict[str, str]:
    """Values by name; with `bounds`, also of `name<=value`.

    Raises:
        ConfigError: a word that is not one of `names` with a value.
    """
    values = {}
    for word in words:
        name, _, value = (word.replace("<=", "=", 1) if bounds else word).partition("=")
        if name not in names or not value:
            *others, last = (f"{known}=" for known in names)
            raise ConfigError(f"{word}: {', '.join(others)} or {last}")
        values[name] = value
    return values


def parse_number(name: str, text: str, says: str, fits: Callable[[float], bool]) -> float:
    """A number. Raises: ConfigError: `text` is none, or does not fit, with what it `says` instead."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise ConfigError(f"{name}={text}: {says}")
    return value
