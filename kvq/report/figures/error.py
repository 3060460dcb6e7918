"""Figures of `task=error` and `task=synthetic`: errors by stage, layer and position, and on synthetic keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvq.report.figures.style import colour, figure, lines_of, powers_of_ten, style, whole_numbers
from kvq.report.labels import named
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (
    ("rel_mse", "squared error (relative)"),
    ("weight_kl", "KL of weights (nats/query)"),
    ("output_error", "error of output (relative)"),
)
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
    names = ["side", "arm", "rope", "complete"]
    quantities = [name for name, _ in _PANELS]
    return rows.groupby(names, sort=False)[quantities].mean().reset_index()


def steps_figure(table: pd.DataFrame, title: str) -> Figure:
    """Bars for every choice of stages: error of keys and values, of the weights and of the output."""
    with style():
        shown = table[table["side"] != "both"]
        arms = [(side, arm) for side in ("key", "value") for arm in dict.fromkeys(shown[shown["side"] == side]["arm"])]
        measured = shown.drop_duplicates(_ARM).set_index(_ARM)[[name for name, _ in _PANELS]].to_dict("index")
        made = figure(2, 1.1 + 0.24 * len(arms))
        axes = made.subplots(1, 3, sharey=True)
        for axis, (quantity, name) in zip(axes, _PANELS, strict=True):
            for index, rope in enumerate(("after", "before")):
                values = []
                for side, arm in arms:
                    skip = side == "value" and quantity == "weight_kl"
                    values.append(math.nan if skip else measured.get((side, arm, rope), {}).get(quantity, math.nan))
                places = [place + 0.2 * (2 * index - 1) for place in range(len(arms))]
                axis.barh(places, values, 0.38, color=colour(index), label=f"quantized {rope} RoPE")
            axis.set_xlabel(name.replace(" (", "\n("))
            axis.set_xlim(left=0)
            axis.grid(axis="x", linewidth=0.3)
        axes[0].set_yticks(range(len(arms)), [f"{side}: {arm}" for side, arm in arms])
        axes[0].set_ylim(len(arms) - 0.4, -0.6)
        made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        made.suptitle(title, fontsize=8)
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
            names = {"method": named(record), "side": side, "rope": rope}
            lines.append({**names, "by": "layer", "place": layer, "rel_mse": part["rel_mse"].mean()})
        bins = rows_of(record, store, "positions")
        for (side, rope), part in bins.groupby(["side", "rope"], sort=False):
            names = {"method": named(record), "side": side, "rope": rope}
            means = [sum(column) / len(column) for column in zip(*part["rel_mse"], strict=True)]
            for (start, end), value in zip(part["bins"].iloc[0], means, strict=True):
                lines.append({**names, "by": "position", "place": (start + end) / 2, "rel_mse": value})
    return pd.DataFrame(lines, columns=["method", "side", "rope", "by", "place", "rel_mse"])


def places_figure(table: pd.DataFrame, title: str) -> Figure:
    """Keys above, values below; by layer left, by position right; dashed: keys quantized before RoPE."""
    with style():
        made = figure(2, 4.2)
        axes = made.subplots(2, 2, sharey="row")
        looks = lines_of(table["method"])
        for line, side in zip(axes, ("key", "value"), strict=True):
            for axis, by in zip(line, ("layer", "position"), strict=True):
                for method, look in looks.items():
                    for rope, dashes in (("after", "-"), ("before", "--")):
                        wanted = (table["method"] == method) & (table["side"] == side) & (table["by"] == by)
                        part = table[wanted & (table["rope"] == rope)]
                        if not part.empty:
                            name = method if rope == "after" else f"{method}, before RoPE"
                            axis.plot(
                                part["place"],
                                part["rel_mse"],
                                dashes,
                                color=look.color,
                                marker=look.marker,
                                label=name,
                            )
                axis.set_xlabel("layer" if by == "layer" else "position (token)")
                axis.set_ylim(bottom=0)
                axis.grid(linewidth=0.3)
            whole_numbers(line[0])
            line[0].set_ylabel(f"{side}s: relative squared error")
        made.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
        made.suptitle(title, fontsize=8)
    return made


def plane_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """The cells of every run of `task=synthetic`."""
    return labelled_rows(records, store, "plane")


def plane_figure(table: pd.DataFrame, quantity: str, title: str) -> Figure:
    """One panel per method: error over sink lowness (right: lower) and the size of outlier channels (up: larger)."""
    from matplotlib.colors import LogNorm

    methods = list(dict.fromkeys(table["method"]))
    columns = min(_PLANES_ACROSS, len(methods))
    lines = math.ceil(len(methods) / columns)
    scale = LogNorm(max(float(table[quantity].min()), 1e-4), max(float(table[quantity].max()), 2e-4))
    with style():
        made = figure(1 if columns < _PLANES_ACROSS else 2, 1.0 + 1.1 * lines)
        axes = made.subplots(lines, columns, squeeze=False)
        for index, axis in enumerate(axes.flat):
            if index >= len(methods):
                axis.remove()
                continue
            part = table[table["method"] == methods[index]]
            grid = part.pivot(index="outliers", columns="lowness", values=quantity)
            image = axis.imshow(grid.to_numpy(dtype=float), norm=scale, aspect="auto", origin="lower")
            for (row, column), value in np.ndenumerate(grid.to_numpy(dtype=float)):
                if not math.isnan(value):
                    ink = "white" if scale(value) < _DARK else "black"
                    axis.text(column, row, _short(value), ha="center", va="center", fontsize=5, color=ink)
            lowest = index + columns >= len(methods)
            axis.set_xticks(range(grid.shape[1]), [f"{name:g}" if lowest else "" for name in grid.columns])
            axis.set_yticks(range(grid.shape[0]), [f"{name:g}" if index % columns == 0 else "" for name in grid.index])
            axis.tick_params(length=0, labelsize=6)
            axis.spines[:].set_visible(False)
            axis.set_title(f"{methods[index]} bits", loc="left", fontsize=7)
        made.supxlabel("sink's norm: times smaller", fontsize=8)
        made.supylabel("outlier channels: mean / deviation", fontsize=8)
        bar = made.colorbar(
            image, ax=list(made.axes), label="relative squared error per token", shrink=min(1.0, 3 / (1.1 * lines))
        )
        powers_of_ten(bar.ax.yaxis)
        made.suptitle(title, fontsize=8)
    return made


def _short(value: float) -> str:
    """An error in three characters."""
    return (f"{value:.2f}" if value < 9.995 else f"{value:.0f}").removeprefix("0")
