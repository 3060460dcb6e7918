"""Figures of `task=tni`: norms by position, where they are low, ranges through a method's stages, bounds and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvq.report.figures.error import rows_of
from kvq.report.figures.style import colour, evenly_spread, figure, powers_of_ten, style, whole_numbers
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDES = ("query", "key", "value")
_BOXES = 20
_LAYERS = 4  # columns of the figure by layer; of more layers, that many evenly spread
_LOW = 0.5  # a token whose median norm is below so much of the others' stands apart in colour


def norms_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per side, layer, head and kept position: the norm, and its layer's relative norm and attention."""
    lines: list[dict[str, Any]] = []
    for _, row in rows_of(record, store, "positions").iterrows():
        for index, position in enumerate(row["positions"]):
            for head, norm in enumerate(row["norms"][index]):
                lines.append(
                    {
                        "side": row["side"],
                        "layer": row["layer"],
                        "head": head,
                        "position": position,
                        "norm": norm,
                        "relative_norm": row["relative"][index],
                        "attention": row["attention"][index],
                    }
                )
    return pd.DataFrame(lines)


def boxes_figure(table: pd.DataFrame, title: str) -> Figure:
    """Boxes over all layers and heads of the norm over its head's median, at the first and some later positions."""
    with style():
        made = figure(2, 4.4)
        axes = made.subplots(3, 1, sharex=True)
        chosen = _positions(table, 16, _BOXES - 16)
        for axis, side in zip(axes, SIDES, strict=True):
            part = table[table["side"] == side]
            medians = part.groupby(["layer", "head"])["norm"].transform("median")
            _boxes(axis, part.assign(share=part["norm"] / medians), "share", chosen)
            axis.axhline(1, color="#999999", linewidth=0.6)
            axis.set_ylabel(f"{side} norm /\nmedian of its head")
            axis.set_ylim(bottom=0)
        axes[-1].set_xticks(range(1, len(chosen) + 1), [str(position) for position in chosen])
        axes[-1].set_xlabel("position (token)")
        made.suptitle(title, fontsize=8)
    return made


def layers_figure(table: pd.DataFrame, title: str) -> Figure:
    """Norms as they are, a column per layer: each token a box over its heads, as OScaR's figure 3 draws them."""
    with style():
        chosen = _positions(table, 8, 4)
        layers = evenly_spread(sorted(table["layer"].unique()), _LAYERS)
        made = figure(2, 4.4)
        axes = made.subplots(3, len(layers), sharex=True, sharey="row", squeeze=False)
        for row, side in zip(axes, SIDES, strict=True):
            for axis, layer in zip(row, layers, strict=True):
                _boxes(axis, table[(table["side"] == side) & (table["layer"] == layer)], "norm", chosen)
            row[0].set_ylabel(f"{side} norm")
            row[0].set_ylim(bottom=0)
        for axis, layer in zip(axes[0], layers, strict=True):
            axis.set_title(f"layer {layer}")
        for axis in axes[-1]:
            axis.set_xticks(range(1, len(chosen) + 1), [str(position) for position in chosen], rotation=90, fontsize=6)
        made.supxlabel("position (token)", fontsize=8)
        made.suptitle(title, fontsize=8)
    return made


def _positions(table: pd.DataFrame, first: int, later: int) -> list[int]:
    """The first positions that were kept, and `later` more of them up to the last."""
    kept = sorted(table["position"].unique())
    return [*kept[:first], *evenly_spread(kept[first:], later)]


def _boxes(axis: Any, part: pd.DataFrame, quantity: str, positions: list[int]) -> None:
    """A box for each position, in another colour where its median is low among all positions'."""
    data = [part[part["position"] == position][quantity].to_numpy() for position in positions]
    drawn = axis.boxplot(
        data,
        widths=0.6,
        patch_artist=True,
        boxprops={"linewidth": 0.6},
        medianprops={"color": "black"},
        flierprops={"markersize": 2},
        whiskerprops={"linewidth": 0.6},
    )
    usual = float(part[quantity].median())
    for box, line, values in zip(drawn["boxes"], drawn["medians"], data, strict=True):
        low = float(np.median(values)) < _LOW * usual
        box.set_facecolor(colour(0) if low else colour(7))
        if low:  # its box is too thin for its colour to be seen
            box.set(edgecolor=colour(0), linewidth=2)
            line.set_color(colour(0))


def heat_figure(table: pd.DataFrame, title: str) -> Figure:
    """Layer by position: relative norms (median over heads) of queries, keys and values, and the attention received."""
    from matplotlib.colors import LogNorm

    with style():
        made = figure(2, 3.6)
        axes = made.subplots(2, 2, sharex=True, sharey=True)
        ticks = None
        for axis, name in zip(axes.flat, (*SIDES, "attention"), strict=True):
            quantity = "attention" if name == "attention" else "relative_norm"
            part = table[table["side"] == ("key" if name == "attention" else name)]
            grid = part.groupby(["layer", "position"])[quantity].first().unstack()
            if name == "attention":
                scale = LogNorm(1e-4, 1)
                image = axis.imshow(grid.to_numpy().clip(1e-4), norm=scale, aspect="auto", cmap="cividis")
                powers_of_ten(made.colorbar(image, ax=axis, label="mean weight received").ax.yaxis)
            else:
                image = axis.imshow(grid.to_numpy(), vmin=0, vmax=2, aspect="auto", cmap="PuOr")
                made.colorbar(image, ax=axis, label="norm / median", extend="max")
            axis.set_title("attention" if name == "attention" else f"{name} norms")
            axis.set_yticks(
                range(len(grid.index)), [str(layer) for layer in grid.index] if len(grid.index) <= 12 else None
            )
            if ticks is None:
                ticks = sorted({0, 8, *np.linspace(15, grid.shape[1] - 1, 4).astype(int)} & set(range(grid.shape[1])))
            axis.set_xticks(ticks, [str(grid.columns[tick]) for tick in ticks])
        made.supxlabel("position (token; from 16 on logarithmic)", fontsize=8)
        made.supylabel("layer", fontsize=8)
        made.suptitle(title, fontsize=8)
    return made


def groups_table(record: Record, store: Store) -> pd.DataFrame:
    """Ranges by stage, groups with their bound, spread and error, and the sinks' groups with and without them."""
    found = [rows_of(record, store, kind) for kind in ("range", "group", "without")]
    return pd.concat([part for part in found if not part.empty], ignore_index=True)


def groups_figure(table: pd.DataFrame, title: str) -> Figure:
    """Ranges through the stages; error of key groups by bound and norm spread; the sinks' groups without them."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with style():
        made = figure(2, 4.6)
        axes = made.subplots(2, 2)
        layout = made.get_layout_engine()
        assert isinstance(layout, ConstrainedLayoutEngine)
        layout.set(rect=(0.02, 0, 0.98, 1))  # it forgets the wider tick labels below
        ranges = table[table["kind"] == "range"]
        for index, side in enumerate(("key", "value")):
            part = ranges[ranges["side"] == side]
            stages = list(dict.fromkeys(part["stage"]))
            means = [part[part["stage"] == stage]["relative_range"].mean() for stage in stages]
            axes[0, 0].plot(range(len(stages)), means, "os"[index] + "-", color=colour(index), label=f"{side}s")
            for place, (stage, mean) in enumerate(zip(stages, means, strict=True)):
                axes[0, 0].annotate(
                    stage,
                    (place, mean),
                    (0, -5 if place % 2 else 5),  # in turns, so that neighbours do not overlap
                    textcoords="offset points",
                    ha="center",
                    va="top" if place % 2 else "bottom",
                    fontsize=6,
                    color=colour(index),
                )
        axes[0, 0].set_xlabel("stage (0: as they come)")
        axes[0, 0].set_ylabel("mean group range R / RMS")
        axes[0, 0].margins(x=0.2, y=0.25)
        axes[0, 0].set_xticks(range(max(len(part["stage"].unique()) for _, part in ranges.groupby("side"))))
        axes[0, 0].legend(loc="best")
        groups = table[table["kind"] == "group"]
        keys = groups[groups["side"] == "key"]
        names = (
            (axes[0, 1], "bound", "step bound R/(2(2^b-1))"),
            (axes[1, 0], "norm_deviation", "deviation of token norms"),
        )
        for axis, name, text in names:
            if name in keys and keys[name].notna().any():
                for index, (layer, part) in enumerate(keys.groupby("layer")):
                    axis.scatter(
                        part[name], part["error"], s=5, color=colour(index), label=f"layer {layer:g}", alpha=0.7
                    )
                axis.set_xlabel(f"{text} of the group (key units)")
                axis.set_ylabel("RMS error (key units)")
            else:
                axis.set_axis_off()
        handles, labels = axes[1, 0].get_legend_handles_labels()
        if handles and len(handles) <= 8:
            axes[1, 0].legend(handles, labels, loc="best", handletextpad=0.1)
        _without(axes[1, 1], table[table["kind"] == "without"])
        made.suptitle(title, fontsize=8)
    return made


def _without(axis: Any, table: pd.DataFrame) -> None:
    part = table[table["side"] == "key"] if not table.empty else table
    if part.empty:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no tokens share a scale", ha="center", va="center", transform=axis.transAxes)
        return
    layers = part["layer"].to_numpy(dtype=float)
    for index, (name, text) in enumerate((("with_sinks", "with the lowest tokens"), ("without_sinks", "without"))):
        axis.bar(layers + 0.4 * index - 0.2, part[name], 0.38, color=colour(index), label=text)
    axis.set_xlabel("layer")
    whole_numbers(axis)
    axis.set_ylabel("error of the others in\ntheir groups, relative")
    axis.set_ylim(top=1.35 * float(part[["with_sinks", "without_sinks"]].to_numpy().max()))
    axis.legend(loc="upper right", ncols=2)
