"""Figures of `task=error` and `task=synthetic`: errors by stage, layer and position, and on synthetic keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvq.report.figures.plots import bare, below, dress, heat, panels, titled, wrapped
from kvq.report.figures.style import colour, figure, lines_of, powers_of_ten
from kvq.report.labels import named
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = {
    "rel_mse": "squared error\n(relative)",
    "weight_kl": "KL of weights\n(nats/query)",
    "output_error": "error of output\n(relative)",
}
_ARM = ["side", "arm", "rope"]
_PLANES_ACROSS = 3
_DARK = 0.55  # colours up to here on the scale are dark


def rows_of(record: Record, store: Store, kind: str) -> pd.DataFrame:
    """The samples of one kind of a run."""
    return pd.DataFrame([row for row in store.samples_of(record) if row["kind"] == kind])


def labelled_rows(records: Sequence[Record], store: Store, kind: str) -> pd.DataFrame:
    """The samples of one kind of several runs, behind the name of each run's method."""
    found = []
    for record in records:
        rows = rows_of(record, store, kind)
        if not rows.empty:
            rows.insert(0, "method", named(record))
            found.append(rows.drop(columns="kind"))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def steps_table(record: Record, store: Store) -> pd.DataFrame:
    """Errors by side, arm and where RoPE was, means over layers and heads."""
    rows = rows_of(record, store, "error")
    return rows.groupby([*_ARM, "complete"], sort=False)[[*_PANELS]].mean().reset_index()


@titled
def steps_figure(table: pd.DataFrame) -> Figure:
    """Bars for every choice of stages: error of keys and values, of the weights and of the output."""
    shown = table[table["side"] != "both"]
    arms = [(side, arm) for side in ("key", "value") for arm in dict.fromkeys(shown[shown["side"] == side]["arm"])]
    measured = shown.drop_duplicates(_ARM).set_index(_ARM)[[*_PANELS]].to_dict("index")
    made, axes = panels(2, 1.1 + 0.24 * len(arms), 1, 3, sharey=True)
    for axis, (quantity, name) in zip(axes, _PANELS.items(), strict=True):
        for index, rope in enumerate(("after", "before")):
            values = [
                math.nan
                if (side, quantity) == ("value", "weight_kl")
                else measured.get((side, arm, rope), {}).get(quantity, math.nan)
                for side, arm in arms
            ]
            places = [place + 0.2 * (2 * index - 1) for place in range(len(arms))]
            axis.barh(places, values, 0.38, color=colour(index), label=f"quantized {rope} RoPE")
        axis.set_xlim(left=0)
        dress(axis, name, grid="x")
    axes[0].set_yticks(range(len(arms)), [f"{side}: {arm}" for side, arm in arms])
    axes[0].set_ylim(len(arms) - 0.4, -0.6)
    below(made, axes[0], 2)
    return made


def places_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """Relative errors of complete methods by layer and by stretch of positions, keys and values."""
    lines = []
    for record in records:
        rows = rows_of(record, store, "error")
        if rows.empty:
            continue
        rows = rows[rows["complete"] & (rows["side"] != "both")]
        for (side, rope, layer), part in rows.groupby(["side", "rope", "layer"], sort=False):
            lines.append((named(record), side, rope, "layer", layer, part["rel_mse"].mean()))
        bins = rows_of(record, store, "positions")
        for (side, rope), part in bins.groupby(["side", "rope"], sort=False):
            means = [sum(column) / len(column) for column in zip(*part["rel_mse"], strict=True)]
            for (start, end), value in zip(part["bins"].iloc[0], means, strict=True):
                lines.append((named(record), side, rope, "position", (start + end) / 2, value))
    return pd.DataFrame(lines, columns=["method", "side", "rope", "by", "place", "rel_mse"])


@titled
def places_figure(table: pd.DataFrame) -> Figure:
    """Keys above, values below; by layer left, by position right; dashed: keys quantized before RoPE."""
    made, axes = panels(2, 4.2, 2, 2, sharey="row")
    looks = lines_of(table["method"])
    for line, side in zip(axes, ("key", "value"), strict=True):
        for axis, by in zip(line, ("layer", "position"), strict=True):
            here = table[(table["side"] == side) & (table["by"] == by)]
            for method, look in looks.items():
                for rope, dashes, words in (("after", "-", ""), ("before", "--", ", before RoPE")):
                    part = here[(here["method"] == method) & (here["rope"] == rope)]
                    if not part.empty:
                        style = {"color": look.color, "marker": look.marker, "label": f"{method}{words}"}
                        axis.plot(part["place"], part["rel_mse"], dashes, **style)
            axis.set_ylim(bottom=0)
            dress(axis, "layer" if by == "layer" else "position (token)", grid="both", whole=by == "layer")
        line[0].set_ylabel(f"{side}s: relative squared error")
    made.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    return made


def plane_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """The cells of every run of `task=synthetic`."""
    return labelled_rows(records, store, "plane")


@titled
def plane_figure(table: pd.DataFrame, quantity: str) -> Figure:
    """One panel per method: error over sink lowness (right: lower) and the size of outlier channels (up: larger)."""
    from matplotlib.colors import LogNorm

    methods = list(dict.fromkeys(table["method"]))
    columns = min(_PLANES_ACROSS, len(methods))
    lines = math.ceil(len(methods) / columns)
    scale = LogNorm(max(float(table[quantity].min()), 1e-4), max(float(table[quantity].max()), 2e-4))
    made = figure(1 if columns < _PLANES_ACROSS else 2, 1.0 + 1.1 * lines)
    axes = wrapped(made, len(methods), columns)
    for index, (axis, method) in enumerate(zip(axes, methods, strict=True)):
        part = table[table["method"] == method]
        grid = part.pivot(index="outliers", columns="lowness", values=quantity)
        image = heat(axis, grid, norm=scale, origin="lower")
        for (row, column), value in np.ndenumerate(grid.to_numpy(dtype=float)):
            if not math.isnan(value):
                ink = "white" if scale(value) < _DARK else "black"
                axis.text(column, row, _short(value), ha="center", va="center", fontsize=5, color=ink)
        lowest = index + columns >= len(methods)
        axis.set_xticks(range(grid.shape[1]), [f"{name:g}" if lowest else "" for name in grid.columns])
        axis.set_yticks(range(grid.shape[0]), [f"{name:g}" if index % columns == 0 else "" for name in grid.index])
        bare(axis)
        axis.set_title(f"{method} bits", loc="left", fontsize=7)
    made.supxlabel("sink's norm: times smaller", fontsize=8)
    made.supylabel("outlier channels: mean / deviation", fontsize=8)
    size = min(1.0, 3 / (1.1 * lines))
    bar = made.colorbar(image, ax=list(made.axes), label="relative squared error per token", shrink=size)
    powers_of_ten(bar.ax.yaxis)
    return made


def _short(value: float) -> str:
    """An error in three characters."""
    return (f"{value:.2f}" if value < 9.995 else f"{value:.0f}").removeprefix("0")
