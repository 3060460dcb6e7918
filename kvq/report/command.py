"""What the commands that read a results folder share: options, files and errors."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvq.config import plugins
from kvq.config.composing import assume_unchanged_files
from kvq.errors import KvqError, RecordError, check_path, printable, reason_of
from kvq.results.files import write_file
from kvq.results.store import Broken, Store


def parser_of(module: str, doc: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """The options of `python -m <module>`: the results folder, `--config-dir`, and where `out` describes it `--out`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of runs/ (default: results)")
    if out is not None:
        parser.add_argument("--out", type=Path, help=out)
    plugins.add_option(parser)
    return parser


def run(given: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """The exit status of a command: that of `work`, or 1 and one line for an error."""
    gc.set_threshold(5_000_000, 20, 20)  # at Python's own its search for cycles takes a tenth of a report's time
    try:
        folder: Path | None = given.config_dir
        check_path("--config-dir", None if folder is None else str(folder))
        with plugins.using(folder), assume_unchanged_files():
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
    """Replace each file of a folder as a whole, text in UTF-8, and return their paths."""
    try:
        for name, content in files.items():
            write_file(folder / name, content.encode() if isinstance(content, str) else content, durable=False)
    except OSError as error:
        raise RecordError(f"{what}: cannot write under '{folder}': {reason_of(error)}") from error
    return [folder / name for name in files]


def line(error: Exception) -> str:
    """Why something cannot be made, in one line."""
    said = " ".join(str(error).split())
    return said if isinstance(error, KvqError) else f"cannot be made of it, {type(error).__name__}: {said[:120]}"
