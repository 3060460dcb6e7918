"""Figures of `task=modality`: token norms of text and of images, by position and by layer (OScaR, Figures 19-21)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.figures.error import rows_of
from kvq.report.figures.style import colour, figure, marker, style, whole_numbers
from kvq.report.figures.tni import SIDES
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BOX = ("least", "lower", "median", "upper", "largest")
_COLOURS = {"text": colour(0), "image": colour(1), "video": colour(4), "audio": colour(5), "all": "#999999"}
_SHOWN = {
    "variation": "deviation / mean",
    "relative": "median / median of all",
    "max_over_median": "largest / median",
}


def tokens_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per side, layer and position of the first prompt: its modality, the norms' quartiles over heads."""
    parts = []
    for _, row in rows_of(record, store, "tokens").iterrows():
        part = pd.DataFrame(dict(zip(_BOX, row["norms"], strict=True)))
        part.insert(0, "modality", [name for name, count in row["spans"] for _ in range(int(count))])
        part.insert(0, "position", range(len(part)))
        part.insert(0, "layer", int(row["layer"]))
        part.insert(0, "side", row["side"])
        parts.append(part)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def tokens_figure(table: pd.DataFrame, title: str) -> Figure:
    """Norms of every token, a column per layer: median, quartiles and extremes over heads, in the modality's colour."""
    with style():
        layers = sorted(table["layer"].unique())
        made = figure(2, 4.4)
        axes = made.subplots(3, len(layers), sharex=True, sharey="row", squeeze=False)
        for row, side in zip(axes, SIDES, strict=True):
            for axis, layer in zip(row, layers, strict=True):
                part = table[(table["side"] == side) & (table["layer"] == layer)]
                for name in part["modality"].unique():
                    _token_boxes(axis, part[part["modality"] == name], name)
            row[0].set_ylabel(f"{side} norm")
            row[0].set_ylim(bottom=0)
        for axis, layer in zip(axes[0], layers, strict=True):
            axis.set_title(f"layer {layer}")
        _legend(made, list(table["modality"].unique()))
        made.supxlabel("position (token)", fontsize=8)
        made.suptitle(title, fontsize=8)
    return made


def _token_boxes(axis: Any, part: pd.DataFrame, name: str) -> None:
    """A thin line from the least to the largest head, a thick one between the quartiles, a point at the median."""
    hue = _COLOURS[name]
    axis.vlines(part["position"], part["least"], part["largest"], color=hue, linewidth=0.5, alpha=0.35)
    axis.vlines(part["position"], part["lower"], part["upper"], color=hue, linewidth=1.2, alpha=0.7)
    axis.plot(part["position"], part["median"], ".", color=hue, markersize=2)


def _legend(made: Figure, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_COLOURS[name], linewidth=3, label=f"{name} tokens") for name in names]
    made.legend(handles=handles, loc="outside lower right", ncols=len(handles))


def layers_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per side, layer and modality, `all` tokens among them: spreads of norms, means over prompts."""
    rows = rows_of(record, store, "modality")
    if rows.empty:
        return rows
    kept = [*_SHOWN, "max_over_min", "median_over_min", "tokens"]
    return rows.groupby(["side", "layer", "modality"], sort=False)[kept].mean().reset_index()


def layers_figure(table: pd.DataFrame, title: str) -> Figure:
    """By layer and modality: spread of norms, median norm over that of all tokens, largest norm over the median."""
    with style():
        made = figure(2, 4.6)
        axes = made.subplots(len(_SHOWN), 3, sharex=True, sharey="row", squeeze=False)
        names = list(dict.fromkeys(table["modality"]))
        for row, (quantity, text) in zip(axes, _SHOWN.items(), strict=True):
            for axis, side in zip(row, SIDES, strict=True):
                for index, name in enumerate(names):
                    part = table[(table["side"] == side) & (table["modality"] == name)]
                    if quantity == "relative" and name == "all":
                        continue  # 1 by its definition
                    axis.plot(
                        part["layer"], part[quantity], f"{marker(index)}-", color=_COLOURS[name], label=f"{name} tokens"
                    )
                if quantity == "relative":
                    axis.axhline(1, color="#999999", linewidth=0.6)
            row[0].set_ylabel(text)
        for axis, side in zip(axes[0], SIDES, strict=True):
            axis.set_title(f"{side} norms")
            whole_numbers(axis)
        axes[0, 0].legend(loc="best")
        made.supxlabel("layer", fontsize=8)
        made.suptitle(title, fontsize=8)
    return made
