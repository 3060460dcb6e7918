"""Drawings: a table, the function that makes a figure of it, and their files; drawn again only where one changed."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.entry import apart
from kvq.errors import KvqError
from kvq.report.command import collect_seldom, write_files
from kvq.report.figures.style import png_of, save
from kvq.report.isolated import made_of, noted, why

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = ".drawn.json"
"""What each figure of a folder was drawn from, and the files that came of it."""
# A worker process needs a second or two to start; fewer figures than this are drawn before it has.
_FEWEST_FOR_WORKERS = 12
_MOST_WORKERS = 8
# Columns of a figure's numbers that tell its lines or bars apart.
_NAMES = ("method", "variant")
Written = tuple[list[Path], list[str]]
"""Files, and in one line each what could not be drawn."""


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Drawing:
    """One figure. Functions are a module's own, so that another process can draw it.

    Attributes:
        stem: the files' name without its ending.
        table: the numbers, or what `derive` makes them of.
        draw: makes the figure of the numbers and `arguments`; None: the numbers alone are written.
        arguments: strings and tables.
        derive: for numbers that take long to compute.
    """

    stem: str
    table: pd.DataFrame
    draw: Callable[..., Figure] | None
    arguments: tuple[str | pd.DataFrame, ...] = ()
    derive: Callable[[pd.DataFrame], pd.DataFrame] | None = None

    @property
    def title(self) -> str:
        """What the figure is called."""
        return next((part for part in reversed(self.arguments) if isinstance(part, str)), self.stem)

    def numbers(self) -> pd.DataFrame:
        """The figure's numbers."""
        return self.table if self.derive is None else self.derive(self.table)

    def figure(self) -> Figure | None:
        """The figure."""
        return None if self.draw is None else self.draw(self.numbers(), *self.arguments)

    def mark(self) -> str:
        """A hash of everything that decides what the files hold: numbers, texts, the code that draws."""
        digest = hashlib.sha256(_code().encode())
        for function in (self.draw, self.derive):
            digest.update(f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}\0".encode())
        for part in (self.table, *self.arguments):
            digest.update((part if isinstance(part, str) else _csv(part)).encode() + b"\0")
        return digest.hexdigest()


def _csv(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, lineterminator="\n")


@functools.cache
def _code() -> str:
    """A hash of this folder's sources and of the version that draws."""
    digest = hashlib.sha256(version("matplotlib").encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_drawings(
    drawings: Iterable[Drawing], folder: Path, workers: int = 1, skipped: list[str] | None = None
) -> list[Path]:
    """Write each drawing as CSV, PDF and PNG and return their paths; files of an unchanged figure stay.

    Args:
        drawings: taken one by one, so that making tables and drawing them go on at once.
        folder: where the files go.
        workers: processes that draw; with more than one, the program's main module must be importable.
        skipped: takes the reasons of figures that their numbers do not allow; None raises them.

    Raises:
        RecordError: a folder that cannot be written.
    """
    known = _known(folder)
    marks: dict[str, Any] = {}
    paths: list[list[Path]] = []
    with _Workers(workers) as pool:
        for drawing in drawings:
            mark, place = drawing.mark(), len(paths)
            found = _unchanged(known.get(drawing.stem), mark, folder)
            paths.append(found)
            marks[drawing.stem] = {"mark": mark}
            if not found:
                pool.add(place, drawing, folder)
        for place, written in pool.results():
            paths[place], reasons = written
            for reason in reasons:
                noted(skipped)(None, reason)
    paths = [files for files in paths if files]
    for files in paths:
        marks[files[0].stem]["files"] = {path.name: _digest(path) for path in files}
    _keep(folder, {**known, **{stem: mark for stem, mark in marks.items() if "files" in mark}})
    return [path for files in paths for path in files]


def _written(drawing: Drawing, folder: Path) -> Written:
    """The files of a drawing, and in one line each what its numbers do not allow: a part of them, or all."""
    try:
        return _saved(drawing, folder), []
    except (OSError, KvqError):
        raise  # of the folder
    except Exception as error:
        reasons: list[str] = []
        sound = _sound(drawing, reasons)
        if sound is not None:
            return _saved(sound, folder), reasons
        return [], [f"figure {drawing.stem}: cannot be drawn, {why(error)}"]


def _sound(drawing: Drawing, reasons: list[str]) -> Drawing | None:
    """The drawing without the lines or the methods that break it, which `reasons` names; None where nothing is left."""
    column = next((name for name in _NAMES if name in drawing.table), None)
    if column is None:
        return None
    odd = _of_another_kind(drawing.table)
    rest = drawing.table[~odd]

    def drawn(names: list[str]) -> Drawing:
        part = replace(drawing, table=rest[rest[column].isin(names)].infer_objects())
        if (made := part.figure()) is not None:
            png_of(made)
        return part

    found: list[str] = []
    names = list(dict.fromkeys(rest[column]))
    sound = made_of(names, drawn, lambda name: f"figure {drawing.stem}: {name}", "drawing", noted(found))
    if odd.any():
        whose = ", ".join(dict.fromkeys(drawing.table[column][odd]))
        found.append(f"figure {drawing.stem}: {whose}: {odd.sum()} lines hold no number where the others do")
    reasons += found if sound is not None else []
    return sound


def _of_another_kind(table: pd.DataFrame) -> pd.Series:
    """Which lines hold a text, a list or a mapping in a column where most hold a number, or the other way round."""
    odd = pd.Series(False, index=table.index)
    for name in (name for name, kind in table.dtypes.items() if kind.kind == "O"):
        kinds = table[name].map(lambda value: "number" if isinstance(value, int | float) else type(value).__name__)
        odd |= kinds != kinds.mode()[0]
    return odd


def _saved(drawing: Drawing, folder: Path) -> list[Path]:
    numbers = drawing.numbers()
    return save(drawing.draw and drawing.draw(numbers, *drawing.arguments), numbers, folder, drawing.stem)


class _Workers:
    """Draws in this process while there are few figures, else in a pool of processes."""

    def __init__(self, workers: int) -> None:
        self._workers = min(workers, _MOST_WORKERS)
        self._waiting: list[tuple[int, Drawing, Path]] = []
        self._pool: ProcessPoolExecutor | None = None
        self._given: list[tuple[int, Future[Written]]] = []

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, place: int, drawing: Drawing, folder: Path) -> None:
        self._waiting.append((place, drawing, folder))
        many = drawing.derive is not None or len(self._waiting) >= _FEWEST_FOR_WORKERS
        if self._workers > 1 and (self._pool or many):
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self._workers, spawn, initializer=collect_seldom)
            with apart():
                self._given += [(place, self._pool.submit(_written, made, into)) for place, made, into in self._waiting]
            self._waiting.clear()

    def results(self) -> Iterator[tuple[int, Written]]:
        for place, drawing, folder in self._waiting:
            yield place, _written(drawing, folder)
        for place, future in self._given:
            yield place, future.result()


def _unchanged(known: Any, mark: str, folder: Path) -> list[Path]:
    """The files of a figure whose mark is known, if they are there as they were written; else none."""
    try:
        if known["mark"] != mark:
            return []
        files = {folder / Path(name).name: digest for name, digest in known["files"].items()}
        if any(_digest(path) != digest for path, digest in files.items()):
            return []
        for path in files:
            os.utime(path)  # newer than the records, as a figure that is drawn again
        return list(files)
    except (KeyError, TypeError, AttributeError, OSError):
        return []


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _known(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / MARKS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        stem: mark for stem, mark in found.items() if isinstance(mark, dict) and isinstance(mark.get("files"), dict)
    }


def _keep(folder: Path, marks: Mapping[str, Any]) -> None:
    kept = {stem: mark for stem, mark in marks.items() if all((folder / name).is_file() for name in mark["files"])}
    write_files("figures", folder, {MARKS: json.dumps(kept, indent=0, sort_keys=True) + "\n"})
