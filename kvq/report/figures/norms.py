"""Figures of `task=tni` and `task=modality`: token norms by position, layer and modality."""

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
