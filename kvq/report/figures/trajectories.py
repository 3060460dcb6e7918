"""Figures of `task=trajectory`: texts that are still full precision's, and the distance at each step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvq.report.figures.plots import below, dress, panels, titled
from kvq.report.figures.style import colour
from kvq.report.labels import named
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEVEL = 0.95


def survival_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run and number of tokens.

    `share` of texts that are full precision's so far, by Kaplan and Meier (a text that ends without a difference is
    censored there), `low` and `high` its 95% interval (log-log), `kl` the mean distance of the step after so many
    tokens, in nats.
    """
    return pd.DataFrame([line for record in records for line in _lines(record, store.samples_of(record))])


def _lines(record: Record, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    from scipy.stats import CensoredData, ecdf

    left = [row["first"] + 1 for row in rows if row["first"] is not None]
    kept = [len(row["same"]) for row in rows if row["first"] is None]
    places = np.arange(max(len(row["same"]) for row in rows) + 1)
    survival = ecdf(CensoredData(uncensored=left, right=kept)).sf
    share = survival.evaluate(places)
    low, high = share, share
    if left:
        with warnings.catch_warnings(action="ignore"):  # where all or none are left, there is no interval
            interval = survival.confidence_interval(_LEVEL, method="log-log")
        low, high = (np.nan_to_num(side.evaluate(places), nan=1.0) for side in (interval.low, interval.high))
    distances = [[row["kl"][place] for row in rows if place < len(row["kl"])] for place in places]
    return [
        {
            "method": named(record),
            "tokens": int(place),
            "share": float(share[place]),
            "low": float(low[place]),
            "high": float(high[place]),
            "kl": float(np.mean(distances[place])) if distances[place] else float("nan"),
        }
        for place in places
    ]


@titled
def survival_figure(table: pd.DataFrame) -> Figure:
    """Two panels: the share of texts by tokens, with its interval, and the distance by step, a mean over 8 steps."""
    made, axes = panels(2, 3.2, 1, 2)
    for index, (method, part) in enumerate(table.groupby("method", sort=False)):
        look: dict[str, Any] = {"color": colour(index)}
        part = part.reset_index(drop=True)
        axes[0].step(part["tokens"], part["share"], where="post", label=method, **look)
        axes[0].fill_between(part["tokens"], part["low"], part["high"], step="post", alpha=0.08, linewidth=0, **look)
        axes[1].plot(part["tokens"], part["kl"].rolling(8, min_periods=1).mean(), **look)
    axes[0].set_ylim(0, 1.02)
    axes[1].set_yscale("log")
    dress(axes[0], "tokens written", "texts that are full precision's", "y")
    dress(axes[1], "tokens of full precision's text", "KL of the next token (nats)", "y")
    below(made, axes[0], 4)
    return made
