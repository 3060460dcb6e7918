"""What the commands that read a results folder share: options, files, errors, and outputs without odd records.

At the end: commands whose words have the form `name=value`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from kvq.config import plugins
from kvq.config.composing import unchanged_files
from kvq.errors import ConfigError, KvqError, RecordError, check_path, printable
from kvq.results.files import cause, write_file
from kvq.results.store import Broken, Store


def parser_of(module: str, doc: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """The options of `python -m <module>`: the results folder, `--config-dir`, and where there is one `--out`.

    Args:
        module: its name.
        doc: its docstring.
        out: what `--out` names, with its default; None: the command has no such option.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder that holds runs/ (default: results)"
    )
    if out is not None:
        parser.add_argument("--out", type=Path, help=out)
    plugins.add_option(parser)
    return parser


def run(given: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """The exit status of a command: that of `work`, or 1 and one line for an error."""
    collect_seldom()
    try:
        folder: Path | None = getattr(given, "config_dir", None)  # not of every command
        check_path("--config-dir", None if folder is None else str(folder))
        with plugins.using(folder), unchanged_files():
            return work(given)
    except KvqError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1


def say_skipped(broken: tuple[Broken, ...] | list[Broken]) -> None:
    """Name the files that are not records, one a line."""
    for file in broken:
        print(printable(f"skipped {file.path}: {file.reason}"), file=sys.stderr)


def no_records(store: Store) -> RecordError:
    """The error of a folder without records."""
    return RecordError(f"no records under '{store.runs}': run a sweep first, such as python run.py -m method=nsn,kivi")


def write_files(what: str, folder: Path, files: Mapping[str, str | bytes]) -> list[Path]:
    """Replace each file of a folder as a whole, text in UTF-8, and return their paths.

    Raises:
        RecordError: the folder cannot be written; the message begins with `what`.
    """
    try:
        for name, content in files.items():
            write_file(folder / name, content.encode() if isinstance(content, str) else content, durable=False)
    except OSError as error:
        raise RecordError(f"{what}: cannot write under '{folder}': {cause(error)}") from error
    return [folder / name for name in files]


def collect_seldom() -> None:
    """Collect garbage rarely: at Python's own thresholds its search for cycles takes a tenth of a report's time."""
    gc.set_threshold(5_000_000, 20, 20)


Part = TypeVar("Part")
Made = TypeVar("Made")


def made_of(
    parts: Sequence[Part],
    make: Callable[[list[Part]], Made],
    name: Callable[[Part], str],
    what: str,
    skip: Callable[[Part, str], None],
) -> Made | None:
    """Call `make` on the parts without those for which it raises; None where no part is left.

    A record that validates may still lack a setting, or its samples may be of another task or missing. After any
    exception, `make` is tried with each part by itself. Those for which it raises go to `skip` with the reason in one
    line (the first part where none does), and `make` is called with the rest.
    """
    left = list(parts)
    while left:
        try:
            return make(left)
        except Exception as error:
            caught_of = enumerate(_why_not(make, part) for part in left)
            found = {place: caught for place, caught in caught_of if caught is not None} or {0: error}
        for place, caught in found.items():
            skip(left[place], f"{name(left[place])}: {what}: {line(caught)}")
        left = [part for place, part in enumerate(left) if place not in found]
    return None


def _why_not(make: Callable[[list[Part]], object], part: Part) -> Exception | None:
    try:
        make([part])
    except Exception as error:
        return error
    return None


def line(error: Exception) -> str:
    """Why something cannot be made, in one line."""
    return " ".join(str(error).split()) if isinstance(error, KvqError) else f"cannot be made of it, {why(error)}"


def why(error: Exception) -> str:
    """The kind of an error and what it says, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def noted(skipped: list[str] | None) -> Callable[[object, str], None]:
    """Make a `skip` for `made_of` that adds each reason to a list once; without a list it raises `RecordError`."""

    def skip(_: object, reason: str) -> None:
        if skipped is None:
            raise RecordError(reason)
        if reason not in skipped:
            skipped.append(reason)

    return skip


def answered(
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


def given_words(words: Sequence[str], names: Collection[str], bounds: bool = False) -> dict[str, str]:
    """Values by name; with `bounds`, also of `name<=value`.

    Raises:
        ConfigError: a word that is not one of `names` with a value.
    """
    given = {}
    for word in words:
        name, _, value = (word.replace("<=", "=", 1) if bounds else word).partition("=")
        if name not in names or not value:
            *others, last = (f"{known}=" for known in names)
            raise ConfigError(f"{word}: {', '.join(others)} or {last}")
        given[name] = value
    return given


def number(name: str, text: str, says: str, fits: Callable[[float], bool]) -> float:
    """A number. Raises: ConfigError: `text` is none, or does not fit, with what it `says` instead."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise ConfigError(f"{name}={text}: {says}")
    return value
