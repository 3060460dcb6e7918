"""Figures of `task=distribution` by channel: covariances, moments through NSN, magnitudes by token and channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvq.report.figures.error import rows_of
from kvq.report.figures.style import colour, evenly_spread, figure, marker, style, whole_numbers
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDES = ("key", "value")
STAGES = ("input", "NSN", "NSN+Hadamard")
_LAYERS = 4  # columns of the scatter; of more layers, that many evenly spread
_TOKENS = 64  # rows of the images of magnitudes


def covariances_table(record: Record, store: Store) -> pd.DataFrame:
    """Per side, layer and head, behind NSN: Frobenius norm of the covariances off the diagonal, least and largest."""
    rows = rows_of(record, store, "lemma")
    return rows[["side", "layer", "head", "gamma", "covariance_min", "covariance_max"]].reset_index(drop=True)


def covariances_figure(table: pd.DataFrame, title: str) -> Figure:
    """The norm by layer, mean over heads (NSNQuant, Figure 6), and the range of covariances by head (its Figure 7)."""
    with style():
        made = figure(2, 2.6)
        norms, ranges = made.subplots(1, 2)
        for index, side in enumerate(SIDES):
            part = table[table["side"] == side].sort_values(["layer", "head"])
            means = part.groupby("layer")["gamma"].mean()
            norms.plot(means.index, means, marker(index) + "-", color=colour(index), label=f"{side}s")
            heads = part["head"].max() + 1
            places = part["layer"] + part["head"] / heads
            shift = (index - 0.5) * 0.3 / heads
            ranges.vlines(
                places + shift,
                part["covariance_min"],
                part["covariance_max"],
                color=colour(index),
                linewidth=3,
                label=f"{side}s",
            )
        norms.set_ylabel("Frobenius norm off the diagonal")
        norms.set_ylim(bottom=0)
        ranges.set_ylabel("least to largest covariance")
        ranges.axhline(0, color="black", linewidth=0.6)
        norms.set_xlabel("layer (mean over heads)")
        ranges.set_xlabel("layer (a bar for each head)")
        for axis in (norms, ranges):
            whole_numbers(axis)
            axis.grid(linewidth=0.3)
            axis.legend(loc="best")
        made.suptitle(title, fontsize=8)
    return made


def ranges_table(record: Record, store: Store) -> pd.DataFrame:
    """Per side, head and channel of the first layer, behind NSN: least and largest covariance; empty: not kept."""
    rows = rows_of(record, store, "ranges")
    if rows.empty:
        return rows
    rows["channel"] = rows["lowest"].map(lambda values: list(range(len(values))))
    table = rows.explode(["channel", "lowest", "highest"], ignore_index=True)
    names = ["side", "layer", "head", "channel", "lowest", "highest"]
    return table[names].astype({"channel": int, "lowest": float, "highest": float})


def ranges_figure(table: pd.DataFrame, title: str) -> Figure:
    """Range of each channel's covariances with the others, head after head: keys above, values below.

    As NSNQuant's Figure 7 draws them.
    """
    with style():
        made = figure(2, 3.2)
        axes = made.subplots(2, 1, sharex=True, sharey=True)
        channels = int(table["channel"].max()) + 1
        for index, (axis, side) in enumerate(zip(axes, SIDES, strict=True)):
            part = table[table["side"] == side]
            axis.vlines(
                part["head"] * channels + part["channel"],
                part["lowest"],
                part["highest"],
                color=colour(index),
                linewidth=0.8,
            )
            for head in range(1, int(table["head"].max()) + 1):
                axis.axvline(head * channels - 0.5, color="#999999", linewidth=0.6, linestyle="--")
            axis.axhline(0, color="black", linewidth=0.6)
            axis.set_ylabel(f"{side}s: least to\nlargest covariance")
        axes[-1].set_xlabel("channel, head after head")
        made.suptitle(title, fontsize=8)
    return made


def moments_table(record: Record, store: Store) -> pd.DataFrame:
    """Per side, layer, head, stage and channel: mean and deviation over the tokens of the first window."""
    rows = rows_of(record, store, "moments").drop(columns=["kind"], errors="ignore")
    rows["channel"] = rows["mean"].map(lambda values: list(range(len(values))))
    table = rows.explode(["channel", "mean", "deviation"], ignore_index=True)
    names = ["side", "layer", "head", "stage", "channel", "mean", "deviation"]
    return table[names].astype({"channel": int, "mean": float, "deviation": float})


def scattered(table: pd.DataFrame) -> pd.DataFrame:
    """The channels behind NSN and the Hadamard rotation, in some layers."""
    layers = evenly_spread(sorted(table["layer"].unique()), _LAYERS)
    return table[(table["stage"] == STAGES[-1]) & table["layer"].isin(layers)].reset_index(drop=True)


def scatter_figure(table: pd.DataFrame, title: str) -> Figure:
    """A point for each channel, deviation over mean (NSNQuant, Figures 12 and 13); lines cross at those of N(0, 1)."""
    layers = sorted(table["layer"].unique())
    with style():
        made = figure(2, 3.4)
        axes = made.subplots(2, len(layers), sharex=True, sharey=True, squeeze=False)
        for row, side in zip(axes, SIDES, strict=True):
            for axis, layer in zip(row, layers, strict=True):
                axis.axhline(1, color="#999999", linewidth=0.6)
                axis.axvline(0, color="#999999", linewidth=0.6)
                here = table[(table["side"] == side) & (table["layer"] == layer)]
                for head, part in here.groupby("head"):
                    points = {"s": 5, "linewidths": 0, "alpha": 0.6, "rasterized": True, "label": f"head {head}"}
                    axis.scatter(part["mean"], part["deviation"], color=colour(head), marker=marker(head), **points)
                axis.grid(linewidth=0.3)
            row[0].set_ylabel(f"{side}s: deviation")
        for top, bottom, layer in zip(axes[0], axes[-1], layers, strict=True):
            top.set_title(f"layer {layer}")
            bottom.set_xlabel("mean of a channel")
        if table["head"].nunique() <= 8:
            handles = axes[0, 0].get_legend_handles_labels()
            made.legend(*handles, loc="outside lower center", ncols=8, markerscale=2)
        made.suptitle(title, fontsize=8)
    return made


def one_head(table: pd.DataFrame) -> pd.DataFrame:
    """The channels of the first head of the first layer, at every stage."""
    return table[(table["layer"] == table["layer"].min()) & (table["head"] == 0)].reset_index(drop=True)


def steps_figure(table: pd.DataFrame, title: str) -> Figure:
    """Mean ± deviation of each channel as it comes, behind NSN, and rotated (what NSNQuant's Figure 3 illustrates)."""
    with style():
        made = figure(2, 3.4)
        axes = made.subplots(2, len(STAGES), sharex=True, squeeze=False)
        for index, side in enumerate(SIDES):
            for axis, stage in zip(axes[index], STAGES, strict=True):
                part = table[(table["side"] == side) & (table["stage"] == stage)].sort_values("channel")
                low, high = part["mean"] - part["deviation"], part["mean"] + part["deviation"]
                axis.fill_between(part["channel"], low, high, step="mid", color=colour(index), alpha=0.5, linewidth=0)
                axis.step(part["channel"], part["mean"], where="mid", color=colour(index), linewidth=0.8)
                if stage != STAGES[0]:
                    for edge in (-1, 1):
                        axis.axhline(edge, color="black", linestyle="--", linewidth=0.6)
            axes[index, 0].set_ylabel(f"{side}s:\nmean ± deviation")
        for axis, words in zip(axes[0], ("as they come", "behind NSN", "behind NSN and Hadamard"), strict=True):
            axis.set_title(words)
        for axis in axes[-1]:
            axis.set_xlabel("channel")
        made.suptitle(title, fontsize=8)
    return made


def magnitudes_table(record: Record, store: Store) -> pd.DataFrame:
    """A line per side and kept token, a column per channel: magnitudes; keys before RoPE, of one head of one layer."""
    rows = rows_of(record, store, "vector")
    parts = []
    for side in SIDES:
        part = rows[rows["side"] == side] if not rows.empty else rows
        if part.empty:
            return pd.DataFrame()
        part = part.iloc[evenly_spread(list(range(len(part))), _TOKENS)]
        values = np.abs(np.array(part["values"].tolist(), dtype=np.float64))
        columns = pd.DataFrame(values, columns=[f"channel {index}" for index in range(values.shape[1])]).round(3)
        parts.append(pd.concat([part[["side", "layer", "position"]].reset_index(drop=True), columns], axis=1))
    return pd.concat(parts, ignore_index=True)


def magnitudes_figure(table: pd.DataFrame, title: str) -> Figure:
    """Keys and values as images, tokens over channels, each on its own scale (OScaR, Figure 2)."""
    with style():
        made = figure(2, 2.8)
        for axis, side in zip(made.subplots(1, 2), SIDES, strict=True):
            part = table[table["side"] == side]
            values = part.filter(like="channel ").to_numpy(dtype=float)
            image: Any = axis.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
            made.colorbar(image, ax=axis, label=f"|{side}|")
            ticks = evenly_spread(list(range(len(part))), 5)
            axis.set_yticks(ticks, [str(part["position"].iloc[tick]) for tick in ticks])
            axis.set_xlabel("channel")
            axis.set_title(f"{side}s{', before RoPE' if side == 'key' else ''}")
            axis.set_ylabel("position (token)")
        made.suptitle(title, fontsize=8)
    return made
