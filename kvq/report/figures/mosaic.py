"""Many small heat maps of one shape on one pair of axes: a hundred panels cost little more than one, and line up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from kvq.report.figures.style import COLUMN, FONTS, figure, powers_of_ten

if TYPE_CHECKING:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.path import Path

# In cells of a panel.
_BETWEEN = 0.6
_CELL = 0.155
"""Inches of a cell's height."""
_TITLE = 0.19
"""Inches of a title above a panel."""
_MOST_PANELS_ACROSS = 4
# Points of a cell's text; a colour this far up the scale or less is dark.
_SIZE, _DARK = 5, 0.55
_LEFT_OF_CELLS = 1.0
"""Inches beside the panels: labels and the colour bar."""


class CellText(NamedTuple):
    """A text on a cell, by the cell's middle, and whether the cell is dark."""

    x: float
    y: float
    words: str
    dark: bool


class Look(NamedTuple):
    """What the panels share: scale, texts of axes and bar, and the text of a cell (None: no text)."""

    scale: LogNorm
    x: str
    y: str
    bar: str
    text: Callable[[float], str] | None = None


def mosaic(panels: Sequence[tuple[str, pd.DataFrame]], look: Look, title: str, down: bool) -> Figure:
    """Panels (title, values by row and column) in reading order.

    Args:
        panels: their rows and columns together are those of every panel; what one lacks stays empty.
        look: what they share.
        title: of the figure.
        down: whether rows are counted from the top, as a haystack's depths are, or from below, as on an axis.
    """
    rows = sorted({row for _, grid in panels for row in grid.index}, reverse=not down)
    columns = sorted({column for _, grid in panels for column in grid.columns})
    across = min(_MOST_PANELS_ACROSS, len(panels), max(1, math.ceil(len(panels) ** 0.5)))
    lines = math.ceil(len(panels) / across)
    gap = _TITLE / _CELL
    height = lines * (len(rows) + gap) * _CELL
    made = figure(2 if across > 2 else 1, height + 1.0)
    axis = made.subplots()
    x, y = _edges(len(columns), across, _BETWEEN), _edges(len(rows), lines, gap)
    texts: list[CellText] = []
    values = np.full((len(y) - 1, len(x) - 1), np.nan)
    for index, (name, grid) in enumerate(panels):
        line, place = divmod(index, across)
        cells = grid.reindex(index=rows, columns=columns).to_numpy(dtype=float)
        left, top = place * (len(columns) + 1), line * (len(rows) + 1)
        values[top : top + len(rows), left : left + len(columns)] = cells
        if look.text is not None:
            texts += _cell_texts(cells, float(x[left]), float(y[top]), look)
        size = min(8.0, 130 * _panel_inches(across) / max(len(name), 1))
        axis.text(x[left], y[top] - 0.12, name, va="bottom", ha="left", fontsize=size)
    image = axis.pcolormesh(x, y, np.ma.masked_invalid(values), norm=look.scale)
    axis.set_ylim(y[-1], -gap)
    if texts:
        _write(axis, texts)
    middles = [
        [line * (count + between) + place + 0.5 for line in range(times) for place in range(count)]
        for count, between, times in ((len(columns), _BETWEEN, across), (len(rows), gap, lines))
    ]
    axis.set_xticks(middles[0], [f"{column:g}" for column in columns] * across, rotation=90, fontsize=6)
    axis.set_yticks(middles[1], [f"{row:g}" for row in rows] * lines, fontsize=6)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_xlabel(look.x)
    axis.set_ylabel(look.y)
    bar = made.colorbar(image, ax=axis, label=look.bar, shrink=min(1.0, 4 / height), anchor=(0.0, 1.0))
    powers_of_ten(bar.ax.yaxis)
    made.suptitle(title, fontsize=8)
    return made


def _panel_inches(across: int) -> float:
    return ((COLUMN * (2 if across > 2 else 1)) - _LEFT_OF_CELLS) / across


def _edges(cells: int, panels: int, between: float) -> np.ndarray:
    """Edges of the cells of panels that stand in a row, and of what is between them."""
    starts = np.arange(panels) * (cells + between)
    return (starts[:, None] + np.arange(cells + 1)).ravel()


def _cell_texts(cells: np.ndarray, left: float, top: float, look: Look) -> list[CellText]:
    """The texts of a panel's cells."""
    assert look.text is not None
    return [
        CellText(left + column + 0.5, top + row + 0.5, look.text(value), bool(look.scale(value) < _DARK))
        for (row, column), value in np.ndenumerate(cells)
        if not math.isnan(value)
    ]


def _write(axis: Any, texts: Sequence[CellText]) -> None:
    """Texts as outlines in one artist: a thousand of matplotlib's own take a second."""
    from matplotlib.collections import PathCollection
    from matplotlib.transforms import Affine2D

    made = PathCollection(
        [_outline(text.words) for text in texts],
        offsets=[(text.x, text.y) for text in texts],
        offset_transform=axis.transData,
        facecolors=["white" if text.dark else "black" for text in texts],
        linewidths=0,
    )
    made.set_transform(Affine2D().scale(1 / 72) + axis.figure.dpi_scale_trans)
    made.set_in_layout(False)
    axis.add_collection(made, autolim=False)


@functools.lru_cache(maxsize=4096)
def _outline(words: str) -> Path:
    """The outline of a text in points, its middle at (0, 0)."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    font = FontProperties(family=list(FONTS))
    found = TextPath((0, 0), words, size=_SIZE, prop=font)
    height = TextPath((0, 0), "0", size=_SIZE, prop=font).get_extents().y1
    middle = (found.get_extents().x0 + found.get_extents().x1) / 2
    return Path(found.vertices - [middle, height / 2], found.codes)
