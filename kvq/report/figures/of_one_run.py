"""The figures of a single run, for Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from kvq.errors import RecordError
from kvq.report.figures.diagnostics import MAKERS
from kvq.report.figures.every import heat_map, needle_grid
from kvq.report.figures.style import colour, figure, style
from kvq.report.labels import label, model_name, named
from kvq.report.tables.layout import Row
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_figures(record: Record, store: Store) -> list[tuple[str, Figure]]:
    """Figures of a run that is done, each with a name; none where its samples cannot be read."""
    if record.status != "done":
        return []
    try:
        if record.task == "ppl":
            table = windows_table(record, store)
            return [] if table.empty else [("windows", windows_figure(table, _title(record)))]
        if record.task == "niah":
            grid = needle_grid([Row(record, label(record), record.bits)], store)
            return [] if grid.empty else [("needles", heat_map(grid, _title(record)))]
        made = MAKERS[record.task]([record], store) if record.task in MAKERS else []
        # Names without the run's label, so that W&B shows the same figure of several runs side by side.
        named = ((drawing.stem.removesuffix(f"-{named(record)}"), drawing.figure()) for drawing in made)
        return [(name, drawn) for name, drawn in named if drawn is not None]
    except (RecordError, KeyError):
        return []


def _title(record: Record) -> str:
    return f"{named(record)}: {model_name(record.model)}, {record.dataset}"


def windows_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per window of a perplexity run: loss, and KL divergence from full precision, in nats per token."""
    rows = [row for row in store.samples_of(record) if row.get("tokens")]
    lines = [
        {"window": row["window"], "nll": row["nll"] / row["tokens"], "kl": row.get("kl", 0.0) / row["tokens"]}
        for row in rows
    ]
    return pd.DataFrame(lines, columns=["window", "nll", "kl"])


def windows_figure(table: pd.DataFrame, title: str) -> Figure:
    """Loss and KL divergence by window of the text."""
    with style():
        made = figure(1, 2.6)
        axes = made.subplots(2, 1, sharex=True)
        for index, (axis, name, text) in enumerate(
            ((axes[0], "nll", "loss\n(nats/token)"), (axes[1], "kl", "KL\n(nats/token)"))
        ):
            axis.bar(table["window"], table[name], 0.8, color=colour(index))
            axis.set_ylabel(text)
        axes[1].set_xlabel("window")
        made.suptitle(title, fontsize=8)
    return made
