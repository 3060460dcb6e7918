"""A figure of `task=engine`: KL of the engine, of its preset, and between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from kvq.report.figures.style import colour, figure, marker, style
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
"""Metrics that are drawn, and how the legend calls them."""


def agreement_table(table: Table) -> pd.DataFrame | None:
    """One line per run, full precision first, with the metrics of `KINDS`; None: no run was compared."""
    done = [row for row in table.rows if "agreement_kl" in row.record.metrics]
    lines = [
        {"method": row.name, "bits": row.bits} | {name: row.record.metrics.get(name) for name in KINDS} for row in done
    ]
    return pd.DataFrame(lines, columns=["method", "bits", *KINDS]) if lines else None


def agreement_figure(numbers: pd.DataFrame, title: str) -> Figure:
    """A row per method, a mark per kind of KL, on a logarithmic axis; what is 0 there stands at the left edge."""
    with style():
        made = figure(1, 1.2 + 0.22 * len(numbers))
        axis = made.subplots()
        known = numbers[list(KINDS)].astype(float)
        positive = known.where(known > 0)
        least = float(positive.min().min()) / 2 if positive.notna().any().any() else 1e-9
        for index, (name, words) in enumerate(KINDS.items()):
            values = known[name].clip(lower=least)
            axis.plot(values, range(len(numbers)), marker(index), linestyle="", color=colour(index), label=words)
        axis.set_xscale("log")
        labels = [f"{row.method} {row.bits}".removesuffix(" fixed") for row in numbers.itertuples()]
        axis.set_yticks(range(len(numbers)), labels)
        axis.invert_yaxis()
        axis.grid(axis="x", linewidth=0.3)
        axis.set_xlabel("mean KL (nats/token)")
        axis.legend(loc="upper left", bbox_to_anchor=(-0.3, -0.25), ncols=1)
        made.suptitle(title, fontsize=8)
    return made
