"""A figure of `task=ppl` with `task.stretch`: loss over full precision by position in the window."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.figures.style import colour, figure, marker, style
from kvq.report.tables.layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOSS = re.compile(r"delta_nll\[position=(\d+)\]")


def positions_table(table: Table) -> pd.DataFrame | None:
    """One line per run and stretch of positions; None: no run has any."""
    lines = []
    for row in table.rows:
        metrics = row.record.metrics
        starts = sorted(int(found[1]) for name in metrics if (found := _LOSS.fullmatch(name)))
        for start in starts:
            loss, se = (metrics.get(f"{name}[position={start}]") for name in ("delta_nll", "delta_nll_se"))
            lines.append({"method": row.name, "bits": row.bits, "first": start, "delta_nll": loss, "se": se})
    return pd.DataFrame(lines) if lines else None


def positions_figure(numbers: pd.DataFrame, title: str) -> Figure:
    """A line per method with standard errors, each stretch at its first position."""
    with style():
        made = figure(1, 2.6)
        axis = made.subplots()
        for index, ((method, bits), part) in enumerate(numbers.groupby(["method", "bits"], sort=False)):
            label = f"{method} {bits}".removesuffix(" fixed")
            line: dict[str, Any] = {"color": colour(index), "marker": marker(index), "label": label, "capsize": 1.5}
            axis.errorbar(part["first"], part["delta_nll"], part["se"].astype(float).fillna(0.0), **line)
        axis.axhline(0, linewidth=0.6, color="0.5")
        axis.set_xlabel("first position of the stretch (token)")
        axis.set_ylabel("loss over full precision (nats/token)")
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2)
        made.suptitle(title, fontsize=8)
    return made
