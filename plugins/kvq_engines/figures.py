"""A figure of how far an engine's cache format and kvq's preset of it agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from kvq.report.figures.drawing import colour, dress, marker, name_rows, panels, register_figure
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
