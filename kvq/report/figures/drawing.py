"""What figures are made of: their look, kinds that `register_figure` names, files, an index, shared parts."""

from __future__ import annotations

import functools
import io
import itertools
import math
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm import tqdm

from kvq.errors import KvqError
from kvq.report.command import line, write_files
from kvq.report.labels import FIRST, colour_of, method_of
from kvq.report.tables.formats import escape_markdown, plain_cell

COLUMN = 3.4
"""Inches of one column of a two-column paper; a figure is one or two wide."""
SERIES = ("#264653", "#8AB17D", "#E9C46A", "#7D8597", "#B5838D", "#A98467", "#C8B6E2", "#ADB5BD")
"""Colours of what is no method: parts of memory, sides, stages, texts. None is a method's (`kvq.report.labels`)."""
MOST_LINES = 16
"""Most lines of a figure; its CSV has all."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_DPI = 160
_STYLE = matplotlib.rc_params_from_file(Path(__file__).parent / "kvq.mplstyle", use_default_template=False)
# No dates and versions, so that the same records give the same bytes.
_METADATA: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None, "Producer": None}, "png": {"Software": None}}
INDEX = "index.md"
_BEGIN = (
    "Drawn from the records by `make figures`, each with its numbers; changes here are overwritten. A checkout",
    "has this list and the figures that pages show. Tables are in [tables](../tables/index.md).",
)
Draw = Callable[..., Figure]
Names = Mapping[Any, str]
Numbers = pd.DataFrame | Mapping[tuple[str, str], pd.DataFrame]
"""The numbers of a figure, or of several by what stands for `{name}` in their files' names and `{what}` in titles."""
KINDS: list[Kind] = []
"""Every kind in the order of the index: that in which its module was imported."""
GREY = "#999999"


def style() -> AbstractContextManager[None]:
    """A context manager: matplotlib's settings of all figures hold within its block."""
    return matplotlib.rc_context(_STYLE)


def colour(index: int) -> str:
    """The colour of a series that is no method; they repeat after eight."""
    return SERIES[index % len(SERIES)]


def marker(index: int) -> str:
    """The marker of the series of this index; they repeat after eight."""
    return MARKERS[index % len(MARKERS)]


def dash(index: int) -> Any:
    """The dashes of the series of this index; they repeat after four."""
    return _DASHES[index % len(_DASHES)]


class Line(NamedTuple):
    """How a run is drawn: its method's colour and dashes, a marker that no other of its colour has."""

    color: str
    linestyle: Any
    marker: str


def lines_of(labels: Iterable[str]) -> dict[str, Line]:
    """A look for each label: a method's variants and bits share its colour; if two have the same, other dashes."""
    names = sorted(set(labels))
    hues = {method: colour_of(method) for method in sorted({method_of(name) for name in names})}
    apart: dict[str, Iterator[int]] = defaultdict(itertools.count)
    dashes = {method: (method not in FIRST) + next(apart[hue]) for method, hue in hues.items()}
    used: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return {
        name: Line(hues[method], dash(dashes[method]), marker(next(used[hues[method]])))
        for name, method in ((name, method_of(name)) for name in names)
    }


def legend_columns(names: Sequence[str], columns: int) -> int:
    """How many columns of a legend with these names fit a figure `columns` columns wide."""
    return max(1, int(COLUMN * columns / (0.42 + 0.062 * max(map(len, names), default=1))))


def scale_losses(axis: Any, losses: pd.Series) -> None:
    """Make the axis along y logarithmic, for these losses; linear near 0, where noise turns signs."""
    sizes = losses.abs()
    if sizes.any():
        # A power of ten, so that the ticks of the linear part are those of the logarithmic one.
        small = max(float(sizes[sizes > 0].min()), 1e-4)
        axis.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(small)))


def evenly_spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items at equal steps, from the first to the last, each once; all where there are no more."""
    if len(items) <= count:
        return list(items)
    return list(dict.fromkeys(items[int(i)] for i in np.linspace(0, len(items) - 1, count)))


def plain_text(text: str) -> str:
    """Text of records as figures show it: no formula, and no character without a glyph."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text).replace("$", r"\$")


def image_of(made: Figure, kind: str = "png") -> bytes:
    """A figure as the bytes of a PNG or PDF file; the same figure gives the same bytes."""
    file = io.BytesIO()
    with style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # names that leave axes no room
        made.savefig(file, format=kind, dpi=_DPI, metadata=_METADATA[kind])
    made.set_layout_engine("none")  # laid out once for all its files
    return file.getvalue()


def save(made: Figure, numbers: pd.DataFrame, folder: Path, stem: str) -> list[Path]:
    """Write the numbers of a figure as `stem`.csv, the figure as .pdf and .png; return paths."""
    plain = numbers.rename(columns=plain_cell)
    for name in plain.select_dtypes(exclude="number"):
        plain[name] = plain[name].map(plain_cell)
    files = {"csv": plain.to_csv(index=False, lineterminator="\n").encode()}
    files |= {kind: image_of(made, kind) for kind in ("pdf", "png")}
    return write_files("figures", folder, {f"{stem}.{kind}": content for kind, content in files.items()})


@dataclass(frozen=True)
class Kind:
    """A kind of figure, as `register_figure` describes it."""

    stem: str
    title: str
    numbers: Callable[..., Numbers | None]
    draw: Draw
    of: Literal["table", "records", "runs", "all", "first", "each"]
    task: str
    note: str

    @property
    def name(self) -> str:
        """How the names of its figures begin."""
        return self.stem.partition("{")[0].rstrip("-")


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


@dataclass(frozen=True)
class Drawing:
    """One figure: the names of its files without their ending, its title, its numbers, its kind."""

    stem: str
    title: str
    table: pd.DataFrame
    kind: Kind

    def figure(self) -> Figure:
        """Make the figure."""
        return self.kind.draw(self.table, self.title)


def write_drawings(drawings: Iterable[Drawing], folder: Path, skipped: list[str]) -> list[Path]:
    """Write each drawing as CSV, PDF and PNG, and `index.md`, a list by kind; `skipped` takes what cannot be drawn."""
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
    lines = ["# Figures", "", *_BEGIN]
    for kind in KINDS:
        own = sorted((drawing for drawing in drawn if drawing.kind is kind), key=lambda one: one.stem)
        lines += ["", f"## {kind.name}", "", *([kind.note, ""] if kind.note else [])] if own else []
        for drawing in own:
            files = ", ".join(f"[{ending.upper()}]({drawing.stem}.{ending})" for ending in ("png", "pdf", "csv"))
            lines.append(f"- {escape_markdown(drawing.title)} (`{drawing.stem}`): {files}")
    return paths + write_files("figures", folder, {INDEX: "\n".join(lines) + "\n"})


def titled(draw: Draw) -> Draw:
    """Make of a function of numbers one of numbers and a title, in the style of all; texts are cut to 60."""

    @functools.wraps(draw)
    def made(numbers: pd.DataFrame, title: str) -> Figure:
        texts = {
            str(name): numbers[name].map(lambda value: plain_text(value[:60]) if isinstance(value, str) else value)
            for name in numbers.select_dtypes(exclude="number")
        }
        with style():
            found = draw(numbers.assign(**texts))
            across = int(16 * found.get_figwidth())  # of a title, on average
            lines = [line for part in title.split("\n") for line in textwrap.wrap(plain_text(part), across)]
            found.suptitle("\n".join(lines), fontsize=8)
        return found

    return made


def panels(width: int, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure `width` columns wide and `height` inches high, and its axes: one, or an array of `rows` by `columns`."""
    made = Figure(figsize=(COLUMN * width, height), layout="constrained")
    return made, made.subplots(rows, columns, **options)


def tile_panels(width: int, height: float, count: int, across: int, **options: Any) -> tuple[Figure, list[Any]]:
    """As `panels`, a list of `count` axes in rows of `across`; the last row may have fewer."""
    made, axes = panels(width, height, math.ceil(count / across), min(across, count), squeeze=False, **options)
    for axis in axes.flat[count:]:
        axis.remove()
    return made, list(axes.flat[:count])


def multiples(
    height: float, table: pd.DataFrame, rows: tuple[str, Names], columns: tuple[str, Names], x: str = "", **options: Any
) -> tuple[Figure, Any, list[tuple[Any, Any, Any, pd.DataFrame]]]:
    """A figure two columns wide, its axes, and panels with their two values and lines, for each pair of values.

    `rows`, `columns`: a column of the table, and what rows of panels (from above) and columns of panels (from the left)
    are called by its values; `x`: what stands below each column of panels; `options`: of `Figure.subplots`.
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
    """Name a panel's axes, give it a title and a grid of x, y or both; `whole`: ticks along x at integers only."""
    axis.set(**{name: text for name, text in (("xlabel", x), ("ylabel", y), ("title", title)) if text})
    if whole:
        axis.xaxis.get_major_locator().set_params(integer=True)
    if grid:
        axis.grid(axis=grid, linewidth=0.3)


def draw_level(axis: Any, value: float = 0) -> None:
    """Draw a thin grey horizontal line at a value."""
    axis.axhline(value, color=GREY, linewidth=0.6)


def legend_below(made: Figure, axis: Any, columns: int, **more: Any) -> None:
    """Put the legend of a panel, `columns` wide, below all panels of the figure."""
    made.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, **more)


def name_rows(axis: Any, names: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a panel, the first on top."""
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()


def scale_by_two(axis: Any, ticks: Sequence[float], names: Sequence[str]) -> None:
    """Make the axis along x logarithmic to base 2, with these ticks only and their names."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, names)
    axis.minorticks_off()


def handle(name: str, **look: Any) -> Any:
    """Make an entry of a legend for what no axes have a label of."""
    return Line2D([], [], label=name, **look)


def draw_points(axis: Any, x: Any, y: Any, index: Any, label: str, **more: Any) -> None:
    """Draw points without edges, in colour and marker of the series of this index."""
    axis.scatter(x, y, color=colour(index), marker=marker(index), linewidths=0, alpha=0.6, label=label, **more)


def draw_ranges(
    axis: Any, places: Any, low: Any, high: Any, index: int, width: float, label: str = "", **more: Any
) -> None:
    """Draw a line `width` points wide from `low` to `high` at each place along x, in the colour of series `index`."""
    axis.vlines(places, low, high, color=colour(index), linewidth=width, label=label or None, **more)


def draw_heat(axis: Any, grid: pd.DataFrame | np.ndarray, **more: Any) -> Any:
    """Draw the numbers of a table as an image, the first row on top, and return it; `more`: as `imshow` takes it."""
    return axis.imshow(np.asarray(grid, dtype=float), aspect="auto", **more)


def hide_frame(axis: Any) -> None:
    """Take the frame and ticks from a panel of a heat map and make its names small."""
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, labelsize=6)
