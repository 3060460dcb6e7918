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
    """Run `work` on the words of a command and return its exit status; errors print one line: `failed` 1, others 2.

    `--help` prints `usage` and returns 0; no words where `needs_words` print it and return 2.
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
    """Parse a number. Raises: ConfigError: `text` is no number, or `fits` refuses it; `says` is what is expected."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise ConfigError(f"{name}={text}: {says}")
    return value
