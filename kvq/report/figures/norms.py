"""Figures of `task=tni` and `task=modality`: token norms by position, layer and modality, ranges, bounds and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.report.figures import drawing as draw
from kvq.report.figures.error import rows_of
from kvq.results import Record, Store

SIDES = ("query", "key", "value")
_LAYERS = 4  # columns of the figure by layer; of more layers, that many evenly spread
_LOW = 0.5  # a token whose median norm is below so much of the others' stands apart in colour
_BOX = ("least", "lower", "median", "upper", "largest")
_SERIES = (("text", 0), ("image", 1), ("video", 4), ("audio", 5))
_COLOURS = {name: draw.colour(index) for name, index in _SERIES} | {"all": draw.GREY}


def norms_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per side, layer, head and kept position: the norm."""
    lines = [
        (row["side"], row["layer"], head, position, norm)
        for _, row in rows_of(record, store, "positions").iterrows()
        for index, position in enumerate(row["positions"])
        for head, norm in enumerate(row["norms"][index])
    ]
    return pd.DataFrame(lines, columns=["side", "layer", "head", "position", "norm"])


def _lay_out_norms(table: pd.DataFrame, layers: Sequence[int]) -> tuple[Figure, Any, list[tuple[Any, ...]]]:
    """Lay out panels for norms: a row for each of queries, keys and values, a column for each layer."""
    sides, names = {side: f"{side} norm" for side in SIDES}, {layer: f"layer {layer}" for layer in layers}
    found = draw.multiples(4.4, table, ("side", sides), ("layer", names), sharex=True, sharey="row")
    found[0].supxlabel("position (token)", fontsize=8)
    return found


@draw.register_figure(
    "tni-layers", "Token norms by layer, a box over heads: {where}", norms_table, of="first", task="tni"
)
def layers_figure(table: pd.DataFrame) -> Figure:
    """Norms by layer, each token a box over its heads, of another colour where low (OScaR's figure 3)."""
    kept = sorted(table["position"].unique())
    chosen = [*kept[:8], *draw.evenly_spread(kept[8:], 4)]  # the first positions, and some of the others up to the last
    made, axes, parts = _lay_out_norms(table, draw.evenly_spread(sorted(table["layer"].unique()), _LAYERS))
    for axis, _, _, part in parts:
        data = [part[part["position"] == position]["norm"].to_numpy() for position in chosen]
        thin, marks = {"linewidth": 0.6}, {"medianprops": {"color": "black"}, "flierprops": {"markersize": 2}}
        drawn = axis.boxplot(data, widths=0.6, patch_artist=True, boxprops=thin, whiskerprops=thin, **marks)
        usual = float(part["norm"].median())
        for box, line, values in zip(drawn["boxes"], drawn["medians"], data, strict=True):
            low = float(np.median(values)) < _LOW * usual
            box.set_facecolor(draw.colour(0) if low else draw.colour(7))
            if low:  # its box is too thin for its colour to be seen
                box.set(edgecolor=draw.colour(0), linewidth=2)
                line.set_color(draw.colour(0))
    for row in axes:
        row[0].set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xticks(range(1, len(chosen) + 1), [str(position) for position in chosen], rotation=90, fontsize=6)
    return made


def groups_table(record: Record, store: Store) -> pd.DataFrame:
    """Ranges by stage, groups with their bound, spread and error, and the sinks' groups with and without them."""
    found = [rows_of(record, store, kind) for kind in ("range", "group", "without")]
    return pd.concat([part for part in found if not part.empty], ignore_index=True)


@draw.register_figure(
    "tni-groups-{run}", "{run} bits on {model}: ranges, bounds and errors", groups_table, "each", "tni"
)
def groups_figure(table: pd.DataFrame) -> Figure:
    """Ranges through the stages; error of key groups by bound and norm spread; the sinks' groups without them."""
    made, axes = draw.panels(2, 4.6, 2, 2)
    layout: Any = made.get_layout_engine()
    layout.set(rect=(0.02, 0, 0.98, 1))  # it forgets the wider tick labels below
    _draw_stages(axes[0, 0], table[table["kind"] == "range"])
    keys = table[(table["kind"] == "group") & (table["side"] == "key")]
    for axis, name, text in (
        (axes[0, 1], "bound", "step bound R/(2(2^b-1))"),
        (axes[1, 0], "norm_deviation", "deviation of token norms"),
    ):
        if name not in keys or keys[name].isna().all():
            axis.set_axis_off()
            continue
        for index, (layer, part) in enumerate(keys.groupby("layer")):
            look = {"s": 5, "color": draw.colour(index), "alpha": 0.7}
            axis.scatter(part[name], part["error"], label=f"layer {layer:g}", **look)
        draw.dress(axis, f"{text} of the group (key units)", "RMS error (key units)")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    if handles and len(handles) <= 8:
        axes[1, 0].legend(handles, labels, loc="best", handletextpad=0.1)
    _draw_without(axes[1, 1], table[table["kind"] == "without"])
    return made


def _draw_stages(axis: Any, ranges: pd.DataFrame) -> None:
    """Mean range of groups by stage, keys and values, each mark with its stage's name."""
    for index, side in enumerate(("key", "value")):
        means = ranges[ranges["side"] == side].groupby("stage", sort=False)["relative_range"].mean()
        axis.plot(range(len(means)), means, "os"[index] + "-", color=draw.colour(index), label=f"{side}s")
        for place, (stage, mean) in enumerate(means.items()):
            up = place % 2 == 0  # in turns, so that neighbours do not overlap
            aside: dict[str, Any] = {"va": "bottom" if up else "top", "xytext": (0, 5 if up else -5)}
            look = {"ha": "center", "fontsize": 6, "color": draw.colour(index)}
            axis.annotate(stage, (place, mean), textcoords="offset points", **aside, **look)
    draw.dress(axis, "stage (0: as they come)", "mean group range R / RMS")
    axis.margins(x=0.2, y=0.25)
    axis.set_xticks(range(ranges.groupby("side")["stage"].nunique().max()))
    axis.legend(loc="best")


def _draw_without(axis: Any, table: pd.DataFrame) -> None:
    """Bars by layer: error of keys in groups with the lowest tokens, with these in the group and without."""
    part = table[table["side"] == "key"] if not table.empty else table
    if part.empty:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no tokens share a scale", ha="center", va="center", transform=axis.transAxes)
        return
    layers = part["layer"].to_numpy(dtype=float)
    for index, (name, text) in enumerate((("with_sinks", "with the lowest tokens"), ("without_sinks", "without"))):
        axis.bar(layers + 0.4 * index - 0.2, part[name], 0.38, color=draw.colour(index), label=text)
    draw.dress(axis, "layer", "error of the others in\ntheir groups, relative", whole=True)
    axis.set_ylim(top=1.35 * float(part[["with_sinks", "without_sinks"]].to_numpy().max()))
    axis.legend(loc="upper right", ncols=2)


def modality_tokens_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per side, layer and position of the first prompt: its modality, the norms' quartiles over heads."""
    parts = [pd.DataFrame()]
    for _, row in rows_of(record, store, "tokens").iterrows():
        about = {"side": row["side"], "layer": int(row["layer"]), "position": range(len(row["norms"][0]))}
        about["modality"] = [name for name, count in row["spans"] for _ in range(int(count))]
        parts.append(pd.DataFrame(about | dict(zip(_BOX, row["norms"], strict=True))))
    return pd.concat(parts, ignore_index=True)


@draw.register_figure(
    "modality-tokens",
    "Token norms by modality, from the least to the largest head: {where}",
    modality_tokens_table,
    of="first",
    task="modality",
)
def modality_tokens_figure(table: pd.DataFrame) -> Figure:
    """Norms of tokens by layer and modality: range, quartiles and median over heads (OScaR, Figures 19-21)."""
    made, axes, parts = _lay_out_norms(table, sorted(table["layer"].unique()))
    for axis, _, _, here in parts:
        for name in here["modality"].unique():
            part, hue = here[here["modality"] == name], _COLOURS[name]
            axis.vlines(part["position"], part["least"], part["largest"], color=hue, linewidth=0.5, alpha=0.35)
            axis.vlines(part["position"], part["lower"], part["upper"], color=hue, linewidth=1.2, alpha=0.7)
            axis.plot(part["position"], part["median"], ".", color=hue, markersize=2)
    for row in axes:
        row[0].set_ylim(bottom=0)
    names = table["modality"].unique()
    handles = [draw.handle(f"{name} tokens", color=_COLOURS[name], linewidth=3) for name in names]
    made.legend(handles=handles, loc="outside lower right", ncols=len(handles))
    return made
