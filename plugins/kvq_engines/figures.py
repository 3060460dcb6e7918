"""Figures of how far an engine's format and its preset agree, and of all pairs of a key and a value format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvq.report.figures.drawing import colour, draw_heat, dress, hide_frame, marker, name_rows, panels, register_figure
from kvq.report.figures.loss import run_name
from kvq.report.tables.layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "kl_mean": "engine to its full precision",
    "preset_kl": "preset to full precision in PyTorch",
    "agreement_kl": "between engine and preset",
    "agreement_kl_q8": "between, with queries in 8 bits",
    "preset_kl_self": "preset to itself after a rounding error",
    "agreement_kl_stored": "engine to PyTorch on its stored states",
}
"""Metrics of an engine that are drawn, and how the legend calls them."""


def agreement_table(table: Table) -> pd.DataFrame | None:
    """One line per run, full precision first, with the metrics of `KINDS`; None: no run was compared."""
    done = [row for row in table.rows if "agreement_kl" in row.record.metrics]
    lines = [
        {"method": row.name, "bits": row.bits} | {name: row.record.metrics.get(name) for name in KINDS} for row in done
    ]
    return pd.DataFrame(lines, columns=["method", "bits", *KINDS]) if lines else None


@register_figure("agreement", "Engine and preset: {where}", lambda table, _: agreement_table(table), of="table")
def agreement_figure(numbers: pd.DataFrame) -> Figure:
    """A row per method, a mark per kind of KL, on a logarithmic axis; what is 0 there stands at the left edge."""
    made, axis = panels(1, 1.2 + 0.22 * len(numbers))
    known = numbers[list(KINDS)].astype(float)
    positive = known.where(known > 0)
    least = float(positive.min().min()) / 2 if positive.notna().any().any() else 1e-9
    for index, (name, words) in enumerate(KINDS.items()):
        values = known[name].clip(lower=least)
        axis.plot(values, range(len(numbers)), marker(index), linestyle="", color=colour(index), label=words)
    axis.set_xscale("log")
    name_rows(axis, [run_name(row.method, row.bits) for row in numbers.itertuples()])
    dress(axis, "mean KL (nats/token)", grid="x")
    axis.legend(loc="upper left", bbox_to_anchor=(-0.3, -0.25), ncols=1)
    return made


PAIR_METRICS = {"delta_nll": "loss (nats/token)", "kl_p999": "KL, 99.9th percentile (nats)"}


def pairs_table(table: Table) -> pd.DataFrame | None:
    """One line per run of `KEYS+VALUES` (`method.values_of`), and of each of these formats for both; None: too few.

    Of a pair at several widths the first stands in the table.
    """
    rows = [row for row in table.rows if not row.variant]
    pairs = [row.record.method.split("+") for row in rows if "+" in row.record.method]
    if len(pairs) < 4:
        return None
    formats = {name for pair in pairs for name in pair}
    measured = [row.record for row in rows if "delta_nll" in row.record.metrics]
    lines = [
        {"keys": keys, "values": values or keys, "bits": record.metrics["effective_bits"]}
        | {name: record.metrics.get(name) for name in PAIR_METRICS}
        for record in measured
        for keys, _, values in [record.method.partition("+")]
        if {keys, values or keys} <= formats
    ]
    return pd.DataFrame(lines).drop_duplicates(["keys", "values"])


@register_figure("pairs", "Keys in one format, values in another: {where}", lambda one, _: pairs_table(one), of="table")
def pairs_figure(numbers: pd.DataFrame) -> Figure:
    """Two panels of cells, loss and tail: a row per key format and a column per value format, most bits first."""
    from matplotlib.colors import LogNorm

    order = numbers[numbers["keys"] == numbers["values"]].sort_values("bits", ascending=False)["keys"]
    names = list(dict.fromkeys(["fp16", *order, *numbers["keys"], *numbers["values"]]))
    engines = {name.partition("_")[0] for name in names if name != "fp16"}
    shared = f"{engines.pop()}_" if len(engines) == 1 else "engine/"
    short = [name.removeprefix(shared) for name in names]
    made, axes = panels(2, 1.3 + 0.2 * len(names) + 0.05 * max(map(len, short)), 1, len(PAIR_METRICS))
    for axis, (metric, title) in zip(axes, PAIR_METRICS.items(), strict=True):
        grid = numbers.pivot(index="keys", columns="values", values=metric).reindex(index=names, columns=names)
        cells = grid.to_numpy(dtype=float)
        scale = LogNorm(max(np.nanmax(cells) / 1000, 1e-4), np.nanmax(cells))
        draw_heat(axis, np.clip(cells, scale.vmin, None), norm=scale, cmap="viridis_r")
        for (row, column), value in np.ndenumerate(cells):
            if not np.isnan(value):
                ink = "white" if scale(max(value, scale.vmin)) > 0.4 else "black"
                axis.text(column, row, f"{value:.3f}", ha="center", va="center", fontsize=4.5, color=ink)
        axis.set_yticks(range(len(names)), short)
        axis.set_xticks(range(len(names)), short, rotation=90)
        hide_frame(axis)
        dress(axis, "values", "keys", title=title)
    return made
