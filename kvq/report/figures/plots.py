"""What figures share: style and title, grids of panels, the words of axes, legends, lines and ranges, heat maps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvq.report.figures.style import colour, figure, marker, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY = "#999999"
Draw = Callable[..., "Figure"]
Names = Mapping[Any, str]


def titled(draw: Draw) -> Draw:
    """`draw` in the style of all figures; the last argument of what is returned is a title, which stands above."""

    @functools.wraps(draw)
    def made(*arguments: Any) -> Figure:
        with style():
            found = draw(*arguments[:-1])
            found.suptitle(arguments[-1], fontsize=8)
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
