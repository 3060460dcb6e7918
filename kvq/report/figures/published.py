"""A paper's numbers as a drawing, with ours where there are records: perplexity by method and text.

NSNQuant's Figure 1a draws its Table 2 for one model in this form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.figures.plots import GREY, handle, panels, titled
from kvq.report.figures.style import colour
from kvq.report.tables.experiment_files import Filled
from kvq.report.tables.experiments import Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = ("model", "stand_in", "dataset", "method", "published", "measured", "stale")
_FULL = ("FP16", "BF16", "16-bit")


def published_table(filled: Filled, model: str) -> pd.DataFrame:
    """One line per text and method of a paper's model, and of each stand-in that was run: both numbers, or one.

    `measured` is empty where there is no record, `published` of every stand-in.
    """
    own = [cell for cell in filled.cells if cell.asked.labels.get("model") == model]
    lines = list(_lines(own, model, ""))
    for name, cells in filled.stand_ins.items():
        lines += _lines([cell for cell in cells if cell.value is not None], name, name)
    return pd.DataFrame(lines, columns=list(_COLUMNS))


def _lines(cells: Iterable[Shown], model: str, stand_in: str) -> Iterator[tuple[Any, ...]]:
    for cell in cells:
        if cell.published is None and cell.value is None:
            continue
        labels = cell.asked.labels
        dataset = _dataset(cell) if stand_in else labels.get("dataset", "")
        printed = None if cell.published is None else cell.published.value
        yield model, stand_in, dataset, labels.get("method", ""), printed, cell.value, cell.stale


def _dataset(cell: Shown) -> str:
    """The text of a stand-in's run, which is not the one that the paper's label names."""
    words = (word.partition("=") for run in cell.asked.runs for word in run.command.split())
    return next((text for name, _, text in words if name == "dataset"), "")


@titled
def published_figure(table: pd.DataFrame, source: str) -> Figure:
    """A panel for each model and text: perplexity by method, hollow as `source` prints it, filled as measured here."""
    groups = list(table.groupby(["stand_in", "model", "dataset"], sort=False))
    rows, methods = (len(groups) + 1) // 2, list(dict.fromkeys(table["method"]))
    made, axes = panels(2, 0.9 + rows * (0.5 + 0.16 * len(methods)), rows, 2, sharey=True, squeeze=False)
    for axis, ((stand_in, model, dataset), part) in zip(axes.flat, groups, strict=False):
        _panel(axis, part, methods)
        axis.set_title(f"{model}{' (stand-in)' if stand_in else ''}, {dataset}")
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis in axes.flat[max(len(groups) - 2, 0) : len(groups)]:
        axis.set_xlabel("perplexity (dashed: full precision)")
    hollow = {"marker": "D", "fillstyle": "none", "linestyle": ""}
    shown = [handle(f"published: {source}", color=colour(0), **hollow)]
    if table["measured"].notna().any():
        shown.append(handle("measured here", color=colour(5), marker="o", linestyle=""))
    made.legend(handles=shown, loc="outside lower right", ncols=2)
    return made


def _panel(axis: Any, part: pd.DataFrame, methods: Sequence[str]) -> None:
    places = {method: -place for place, method in enumerate(methods)}
    height = part["method"].map(places)
    axis.set_xscale("log")
    axis.scatter(part["published"], height, s=28, marker="D", facecolors="none", edgecolors=colour(0), linewidths=1)
    axis.scatter(part["measured"], height, s=14, marker="o", color=colour(5))
    full = part[part["method"].isin(_FULL)]
    for value in full["measured"].fillna(full["published"]):
        axis.axvline(value, color=GREY, linewidth=0.8, linestyle="--")
    axis.set_yticks(list(places.values()), list(places))
    low, high = part[["published", "measured"]].min().min(), part[["published", "measured"]].max().max()
    ticks = [tick for tick in (5, 6, 8, 10, 15, 20, 30, 50, 100, 200, 500, 1000) if low * 0.95 <= tick <= high * 1.05]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.grid(axis="y", color="#EEEEEE", linewidth=0.6)
