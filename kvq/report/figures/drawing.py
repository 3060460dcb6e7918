"""Drawings: a table, the function that makes a figure of it, their files and `index.md`; an unchanged one stays.

And what figures share: grids of panels, the words of axes, legends, lines and ranges, heat maps.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml
from tqdm import tqdm

from kvq.errors import KvqError
from kvq.report.command import made_of, noted, why, write_files
from kvq.report.figures.style import png_of, save
from kvq.report.tables.formats import escape_markdown
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvq.report.figures.style import colour, figure, marker, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = ".drawn.json"
"""What each figure of a folder was drawn from, and the files that came of it."""
INDEX = "index.md"
_KINDS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "kinds.yaml").read_text(encoding="utf-8"))
_BEGIN = (
    "Drawn from the records by `make figures`, each with its numbers; changes here are overwritten. A checkout",
    "has this list and the figures that pages show. Tables are in [tables](../tables/index.md).",
)
_RULES = dict.fromkeys(("pareto", "engines"), f"{FRONTIER_RULE} {NOISE_RULE}") | {"widths": NOISE_RULE}


@dataclass(frozen=True)
class Drawing:
    """One figure.

    Attributes:
        stem: the files' name without its ending.
        table: the numbers, or what `derive` makes them of.
        draw: makes the figure of the numbers and `arguments`; None: only the numbers are written.
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
            text = part if isinstance(part, str) else part.to_csv(index=False, lineterminator="\n")
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()


@functools.cache
def _code() -> str:
    """A hash of this folder's files and of the version that draws."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.*"))]
    return hashlib.sha256(b"".join([version("matplotlib").encode(), *sources])).hexdigest()


def drawn(stem: str, table: pd.DataFrame, draw: Callable[..., Figure], *arguments: str | pd.DataFrame) -> list[Drawing]:
    """The drawing of a table, its title the last argument; none of an empty table."""
    return [] if table.empty else [Drawing(stem, table, draw, arguments)]


def write_drawings(drawings: Iterable[Drawing], folder: Path, skipped: list[str] | None = None) -> list[Path]:
    """Write each drawing as CSV, PDF and PNG and return their paths; files of an unchanged figure stay.

    Args:
        drawings: taken one by one.
        folder: where the files go.
        skipped: takes the reasons of figures that their numbers do not allow; None raises them.

    Raises:
        RecordError: a folder that cannot be written.
    """
    known = _known(folder)
    marks: dict[str, dict[str, Any]] = dict(known)
    paths: list[Path] = []
    for drawing in tqdm(drawings, "figures", unit="", leave=False, disable=None):
        mark = drawing.mark()
        files = _unchanged(known.get(drawing.stem), mark, folder) or _written(drawing, folder, noted(skipped))
        if files:
            marks[drawing.stem] = {"mark": mark, "files": {path.name: _digest(path) for path in files}}
        paths += files
    kept = {stem: mark for stem, mark in marks.items() if all((folder / name).is_file() for name in mark["files"])}
    write_files("figures", folder, {MARKS: json.dumps(kept, indent=0, sort_keys=True) + "\n"})
    return paths


def _written(drawing: Drawing, folder: Path, skip: Callable[[object, str], None]) -> list[Path]:
    """The files of a drawing; `skip` takes what its numbers do not allow: some lines or methods of it, or all."""
    try:
        return _saved(drawing, folder)
    except (OSError, KvqError):
        raise  # of the folder
    except Exception as error:
        reasons: list[str] = []
        if (sound := _sound(drawing, reasons)) is None:
            reasons = [f"figure {drawing.stem}: cannot be drawn, {why(error)}"]
    for reason in reasons:
        skip(None, reason)
    return [] if sound is None else _saved(sound, folder)


def _saved(drawing: Drawing, folder: Path) -> list[Path]:
    numbers = drawing.numbers()
    return save(drawing.draw and drawing.draw(numbers, *drawing.arguments), numbers, folder, drawing.stem)


def _sound(drawing: Drawing, reasons: list[str]) -> Drawing | None:
    """Leave out the rows or methods that cannot be drawn and name them in `reasons`; None where nothing is left."""
    column = next((name for name in ("method", "variant") if name in drawing.table), None)
    if column is None or drawing.table.empty:
        return None
    odd = pd.Series(False, index=drawing.table.index)  # a text or a list where most lines hold a number, or the reverse
    for name in (name for name, kind in drawing.table.dtypes.items() if kind.kind == "O"):
        kinds = drawing.table[name].map(lambda one: "number" if isinstance(one, int | float) else type(one).__name__)
        odd |= kinds != kinds.mode()[0]
    rest = drawing.table[~odd]

    def part_of(names: list[str]) -> Drawing:
        part = replace(drawing, table=rest[rest[column].isin(names)].infer_objects())
        if (made := part.figure()) is not None:
            png_of(made)
        return part

    what = f"figure {drawing.stem}: "
    names = list(dict.fromkeys(rest[column]))
    sound = made_of(names, part_of, lambda name: f"{what}{name}", "drawing", noted(reasons))
    if odd.any():
        whose = ", ".join(dict.fromkeys(drawing.table[column][odd]))
        reasons.append(f"{what}{whose}: {odd.sum()} lines hold no number where the others do")
    return sound


def _unchanged(known: Any, mark: str, folder: Path) -> list[Path]:
    """The files of a figure whose mark is known, if they are there as they were written; else none."""
    with suppress(KeyError, TypeError, AttributeError, OSError):
        files = {folder / Path(name).name: digest for name, digest in known["files"].items()}
        if known["mark"] != mark or any(_digest(path) != digest for path, digest in files.items()):
            return []
        for path in files:
            os.utime(path)  # newer than the records, as a figure that is drawn again
        return list(files)
    return []


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _known(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((folder / MARKS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    marks = found.items() if isinstance(found, dict) else ()
    return {stem: mark for stem, mark in marks if isinstance(mark, dict) and isinstance(mark.get("files"), dict)}


def drawn_figures(folder: Path) -> list[str]:
    """Stems of the figures that the index of a folder lists as drawn; none without an index."""
    try:
        return sorted(re.findall(r"\[PNG\]\((.+?)\.png\)", (folder / INDEX).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []


def kinds() -> tuple[str, ...]:
    """The prefixes of figures' names, in the order of the page."""
    return tuple(_KINDS)


class Noted:
    """Passes drawings on one by one and keeps their names and titles for the index."""

    def __init__(self, drawings: Iterable[Drawing]) -> None:
        self._drawings = drawings
        self.titles: dict[str, tuple[str, bool]] = {}

    def __iter__(self) -> Iterator[Drawing]:
        for drawing in self._drawings:
            self.titles[drawing.stem] = drawing.title, drawing.draw is not None
            yield drawing

    def write(self, folder: Path) -> Path:
        """Write the index and return its path.

        Raises:
            RecordError: a folder that cannot be written.
        """
        # One that could not be drawn has no files.
        self.titles = {stem: title for stem, title in self.titles.items() if (folder / f"{stem}.csv").is_file()}
        return write_files("figures", folder, {INDEX: self._page()})[0]

    def _page(self) -> str:
        lines = ["# Figures", "", *_BEGIN]
        by_kind: dict[str, list[str]] = {kind: [] for kind in (*_KINDS, "")}
        for stem in sorted(self.titles):
            by_kind[next(kind for kind in by_kind if stem.startswith(kind))].append(stem)
        for kind, stems in by_kind.items():
            if not stems:
                continue
            lines += ["", f"## {_KINDS.get(kind, 'Others')}", ""]
            if kind in _RULES:
                lines += [_RULES[kind], ""]
            for stem in stems:
                title, drawn = self.titles[stem]
                kinds = ("png", "pdf", "csv") if drawn else ("csv",)
                files = ", ".join(f"[{suffix.upper()}]({stem}.{suffix})" for suffix in kinds)
                lines.append(f"- {escape_markdown(title)} (`{stem}`): {files}")
        return "\n".join(lines) + "\n"


GREY = "#999999"
_CHARACTERS_PER_INCH = 16
"""Of a title, on average."""
Draw = Callable[..., "Figure"]
Names = Mapping[Any, str]


def titled(draw: Draw) -> Draw:
    """`draw` in the style of all figures; the last argument of what is returned is a title, which stands above."""

    @functools.wraps(draw)
    def made(*arguments: Any) -> Figure:
        with style():
            found = draw(*arguments[:-1])
            across = int(_CHARACTERS_PER_INCH * found.get_figwidth())
            lines = [line for part in arguments[-1].split("\n") for line in textwrap.wrap(part, across)]
            found.suptitle("\n".join(lines), fontsize=8)
        return found

    return made


def panels(width: int, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure `width` columns wide and `height` inches high, and its axes: one, or an array of `rows` by `columns`."""
    made = figure(width, height)
    return made, made.subplots(rows, columns, **options)


def wrapped(made: Figure, count: int, across: int, **options: Any) -> list[Any]:
    """Make `count` axes, `across` to a row."""
    axes = made.subplots(math.ceil(count / across), min(across, count), squeeze=False, **options).flat
    for axis in axes[count:]:
        axis.remove()
    return list(axes[:count])


def multiples(
    height: float, table: pd.DataFrame, rows: tuple[str, Names], columns: tuple[str, Names], x: str = "", **options: Any
) -> tuple[Figure, Any, list[tuple[Any, Any, Any, pd.DataFrame]]]:
    """A figure two columns wide with a panel for each pair of two columns' values.

    Args:
        height: of the figure, in inches.
        table: its lines.
        rows: a column of the table, and what rows of panels are called by its values, from above.
        columns: the same for columns of panels, from the left.
        x: what stands below each column of panels.
        options: of `Figure.subplots`.

    Returns:
        The figure, its axes (rows, columns), and each panel with its two values and the lines that hold both.
    """
    made, axes = panels(2, height, len(rows[1]), len(columns[1]), squeeze=False, **options)
    for line, name in zip(axes, rows[1].values(), strict=True):
        line[0].set_ylabel(name)
    for top, bottom, name in zip(axes[0], axes[-1], columns[1].values(), strict=True):
        top.set_title(name)
        bottom.set_xlabel(x)
    pairs = zip(axes.flat, itertools.product(rows[1], columns[1]), strict=True)
    parts = [(axis, *pair, table[(table[rows[0]] == pair[0]) & (table[columns[0]] == pair[1])]) for axis, pair in pairs]
    return made, axes, parts


def dress(axis: Any, x: str = "", y: str = "", grid: str = "", title: str = "", whole: bool = False) -> None:
    """Name the axes.

    Args:
        axis: the panel.
        x: below it.
        y: left of it.
        grid: of which axis there are lines: x, y or both.
        title: above it.
        whole: ticks along x are at integers only.
    """
    if x:
        axis.set_xlabel(x)
    if y:
        axis.set_ylabel(y)
    if title:
        axis.set_title(title)
    if whole:
        axis.xaxis.get_major_locator().set_params(integer=True)
    if grid:
        axis.grid(axis=grid, linewidth=0.3)


def level(axis: Any, value: float = 0) -> None:
    """Draw a thin grey horizontal line at a value."""
    axis.axhline(value, color=GREY, linewidth=0.6)


def below(made: Figure, axis: Any, columns: int, **more: Any) -> None:
    """The legend of a panel, below all panels."""
    made.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, **more)


def rows_named(axis: Any, names: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a panel, the first on top."""
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()


def powers_of_two(axis: Any, ticks: Sequence[float], names: Sequence[str]) -> None:
    """A logarithmic axis along x with these ticks only."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, names)
    axis.minorticks_off()


def handle(name: str, **look: Any) -> Any:
    """Make an entry of a legend for what no axes have a label of."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=name, **look)


def points(axis: Any, x: Any, y: Any, index: Any, label: str, **more: Any) -> None:
    """Points without edges, of the series of this index."""
    axis.scatter(x, y, color=colour(index), marker=marker(index), linewidths=0, alpha=0.6, label=label, **more)


def ranges(axis: Any, places: Any, low: Any, high: Any, index: int, width: float, label: str = "", **more: Any) -> None:
    """A bar from `low` to `high` at each place, of the series of this index."""
    axis.vlines(places, low, high, color=colour(index), linewidth=width, label=label or None, **more)


def heat(axis: Any, grid: pd.DataFrame | np.ndarray, **more: Any) -> Any:
    """An image of a table, the first row on top."""
    return axis.imshow(np.asarray(grid, dtype=float), aspect="auto", **more)


def bare(axis: Any) -> None:
    """Take the frame and ticks from a panel of heat maps and make its names small."""
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, labelsize=6)
