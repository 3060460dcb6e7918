"""Figures by kind, found by `register_figure`; a drawing's files and `index.md`.

And what figures share: grids of panels, the words of axes, legends, lines and ranges, heat maps.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm import tqdm

from kvq.errors import KvqError
from kvq.report.command import line, write_files
from kvq.report.figures.style import colour, drawable, figure, marker, plain_text, save, style
from kvq.report.tables.formats import escape_markdown

INDEX = "index.md"
_BEGIN = (
    "Drawn from the records by `make figures`, each with its numbers; changes here are overwritten. A checkout",
    "has this list and the figures that pages show. Tables are in [tables](../tables/index.md).",
)
Draw = Callable[..., Figure]
Names = Mapping[Any, str]
Numbers = pd.DataFrame | Mapping[tuple[str, str], pd.DataFrame]
"""The numbers of a figure, or of several by what stands for `{name}` in their files' names and `{what}` in titles."""


@dataclass(frozen=True)
class Kind:
    """A kind of figure, as `register_figure` describes it."""

    stem: str
    title: str
    numbers: Callable[..., Numbers | None]
    draw: Draw | None
    of: Literal["table", "records", "runs", "all", "first", "each"]
    task: str
    note: str

    @property
    def name(self) -> str:
        """How the names of its figures begin."""
        return self.stem.partition("{")[0].rstrip("-")


KINDS: list[Kind] = []
"""Every kind in the order of the index: that in which its module was imported."""


def register_figure(
    stem: str,
    title: str,
    numbers: Callable[..., Numbers | None],
    of: Literal["table", "records", "runs", "all", "first", "each"] = "runs",
    task: str = "",
    note: str = "",
) -> Callable[[Draw], Draw]:
    """Make a decorator that registers a kind of figure and makes the function `titled`, which draws the numbers.

    Args:
        stem: how the names of its files begin, which is their heading in the index; {run} and {name} as in `title`.
        title: {run}, {where}, {model}, {machine} stand for what they name of a run (`kvq.report.figures.every`),
            {layer} for the first layer of the numbers, {name} and {what} for the keys of `Numbers`.
        numbers: makes the table that is drawn; no figure of an empty one.
        of: what `numbers` is given: `table`, a table of runs (`kvq.report.tables.layout.Table`); `records`, all runs
            that are done; else those of one task and protocol: the `runs` of methods together, `all` with full
            precision's, the `first` alone, or `each` of a method. The store comes second.
        task: of the runs; of a `table` empty for all tasks.
        note: a sentence below the heading.
    """

    def register(draw: Draw) -> Draw:
        made = titled(draw)
        KINDS.append(Kind(stem, title, numbers, made, of, task, note))
        return made

    return register


def register_numbers(stem: str, numbers: Callable[..., Numbers | None]) -> None:
    """Register numbers of all runs that are written as CSV and not drawn."""
    KINDS.append(Kind(stem, stem, numbers, None, "records", "", ""))


@dataclass(frozen=True)
class Drawing:
    """One figure: the names of its files without their ending, its title, its numbers, its kind."""

    stem: str
    title: str
    table: pd.DataFrame
    kind: Kind

    def figure(self) -> Figure | None:
        """Make the figure; None: there are only numbers."""
        return None if self.kind.draw is None else self.kind.draw(self.table, self.title)


def write_drawings(drawings: Iterable[Drawing], folder: Path, skipped: list[str]) -> list[Path]:
    """Write each drawing as CSV, PDF and PNG, and `index.md`; return their paths.

    Args:
        drawings: taken one by one.
        folder: where the files go.
        skipped: takes the figures that cannot be drawn, with the reason.
    """
    paths: list[Path] = []
    drawn: list[Drawing] = []
    for drawing in tqdm(drawings, "figures", unit="", leave=False, disable=None):
        try:
            paths += save(drawing.figure(), drawing.table, folder, drawing.stem)
            drawn.append(drawing)
        except KvqError:
            raise  # of the folder
        except Exception as error:
            skipped.append(f"figure {drawing.stem}: {line(error)}")
    return paths + write_files("figures", folder, {INDEX: _index(drawn)})


def _index(drawings: Sequence[Drawing]) -> str:
    lines = ["# Figures", "", *_BEGIN]
    for kind in KINDS:
        drawn = sorted((drawing for drawing in drawings if drawing.kind is kind), key=lambda one: one.stem)
        if not drawn:
            continue
        lines += ["", f"## {kind.name}", "", *([kind.note, ""] if kind.note else [])]
        for drawing in drawn:
            endings = ("csv",) if kind.draw is None else ("png", "pdf", "csv")
            files = ", ".join(f"[{ending.upper()}]({drawing.stem}.{ending})" for ending in endings)
            lines.append(f"- {escape_markdown(drawing.title)} (`{drawing.stem}`): {files}")
    return "\n".join(lines) + "\n"


def drawn_figures(folder: Path) -> list[str]:
    """Stems of the figures that the index of a folder lists as drawn; none without an index."""
    try:
        return sorted(re.findall(r"\[PNG\]\((.+?)\.png\)", (folder / INDEX).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []


GREY = "#999999"
_CHARACTERS_PER_INCH = 16
"""Of a title, on average."""


def titled(draw: Draw) -> Draw:
    """Make of a function of numbers one of numbers and a title, in the style of all figures and with plain names."""

    @functools.wraps(draw)
    def made(numbers: pd.DataFrame, title: str) -> Figure:
        with style():
            found = draw(drawable(numbers))
            across = int(_CHARACTERS_PER_INCH * found.get_figwidth())
            lines = [line for part in title.split("\n") for line in textwrap.wrap(plain_text(part), across)]
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
    for row, name in zip(axes, rows[1].values(), strict=True):
        row[0].set_ylabel(name)
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
