"""Figures of `task=sensitivity`: costs of each layer's keys and values alone, and sums against costs of sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvq.report.figures.plots import GREY, bare, below, dress, heat, panels, points, titled
from kvq.report.figures.style import powers_of_ten
from kvq.report.labels import named
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 1e-6
"""KL below which a colour tells nothing apart."""
_DECADES = 4


def costs_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run, side and layer: KL to full precision when it alone is quantized, in nats per token."""
    lines = [
        {"method": named(record), "side": f"{row['side']}s", "layer": row["layer"], "kl": row["kl_mean"]}
        for record in records
        for row in store.samples_of(record)
        if "side" in row
    ]
    return pd.DataFrame(lines, columns=["method", "side", "layer", "kl"])


@titled
def costs_figure(table: pd.DataFrame) -> Figure:
    """A line of cells for the keys and one for the values of each run; layers from left to right."""
    from matplotlib.colors import LogNorm

    rows = [(method, side) for method in dict.fromkeys(table["method"]) for side in ("keys", "values")]
    grid = table.pivot(index=["method", "side"], columns="layer", values="kl").reindex(rows)
    most = max(float(table["kl"].max()), 10 * _LEAST)
    scale = LogNorm(max(min(float(table["kl"].min()), most / 10), most / 10**_DECADES, _LEAST), most)
    made, axis = panels(2, 0.9 + 0.17 * len(rows))
    image = heat(axis, grid.clip(lower=scale.vmin), norm=scale, cmap="viridis")
    axis.set_yticks(range(len(rows)), [f"{method}, {side}" for method, side in rows], fontsize=6)
    step = max(1, grid.shape[1] // 15)
    axis.set_xticks(range(0, grid.shape[1], step), [str(layer) for layer in grid.columns[::step]])
    bare(axis)
    axis.set_xlabel("layer")
    powers_of_ten(made.colorbar(image, ax=axis, label="KL (nats/token)", extend="min", pad=0.01).ax.yaxis)
    return made


def sums_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run and set of sides and layers: the sum of the KL of its parts, and its own."""
    lines = []
    for record in records:
        rows = store.samples_of(record)
        alone = {(row["side"], row["layer"]): row["kl_mean"] for row in rows if "side" in row}
        for row in rows:
            if "layers" in row:
                parts = [alone[side, layer] for side, layers in row["layers"].items() for layer in layers]
                own = {"set": row["item"], "places": len(parts), "sum": sum(parts), "kl": row["kl_mean"]}
                lines.append({"method": named(record), **own})
    return pd.DataFrame(lines, columns=["method", "set", "places", "sum", "kl"])


@titled
def sums_figure(table: pd.DataFrame) -> Figure:
    """Each set a point: the sum of its parts across, what it costs up; on the line both are the same."""
    made, axis = panels(2, 3.2)
    for index, (method, part) in enumerate(table.groupby("method", sort=False)):
        points(axis, part["sum"], part["kl"], index, str(method))
    low, high = (getattr(table[["sum", "kl"]].to_numpy(), kind)() for kind in ("min", "max"))
    axis.plot([low, high], [low, high], color=GREY, linewidth=0.8, zorder=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    dress(axis, "sum of the KL of the parts (nats/token)", "KL of the set (nats/token)", "both")
    below(made, axis, 2)
    return made
