"""Figures of what models write: needles found by length and depth, and texts beside full precision's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvq.report.figures.drawing import GREY, bare, below, dress, heat, panels, titled
from kvq.report.figures.style import COLUMN, lines_of, style
from kvq.report.labels import by_bits, named
from kvq.report.tables.layout import DASH, Row
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OUTCOMES = ("hit", "wrong_needle", "bit_mixing", "other")
# Inches: a panel across and up at least, a cell of it up, the names of methods, what stands above and below the panels.
_ACROSS, _UP, _CELL, _LETTER, _AROUND = 1.15, 0.55, 0.11, 0.062, 1.25


def needle_grid(rows: Sequence[Row], store: Store) -> pd.DataFrame:
    """Outcomes of every run by length (tokens) and depth: one line per cell, shares of its items."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        if row.record.status != "done":
            continue
        samples = [sample for sample in store.samples_of(row.record) if "skipped" not in sample]
        cells = sorted({(sample["length"], sample["depth"]) for sample in samples})
        for length, depth in cells:
            here = [sample["outcome"] for sample in samples if (sample["length"], sample["depth"]) == (length, depth)]
            shares = {outcome: here.count(outcome) / len(here) for outcome in _OUTCOMES}
            lines.append(
                {"method": row.name, "bits": row.bits, "length": length, "depth": depth, "items": len(here)} | shares
            )
    return pd.DataFrame(lines, columns=["method", "bits", "length", "depth", "items", *_OUTCOMES])


def heat_map(grid: pd.DataFrame, title: str) -> Figure:
    """A row of panels per method, a column per width: the share of needles found, depth (top: start) by length."""
    methods, widths = list(dict.fromkeys(grid["method"])), sorted(dict.fromkeys(grid["bits"]), key=by_bits)
    found = {
        (str(method), str(bits)): cells.pivot(index="depth", columns="length", values="hit")
        for (method, bits), cells in grid.groupby(["method", "bits"], sort=False)
    }
    if len(methods) > 1 and "fp16" in methods:  # it has one number for all widths
        methods.remove("fp16")
        share = float(grid[grid["method"] == "fp16"]["hit"].mean())
        title = f"{title}\nfull precision finds {100 * share:.1f}%"
        widths = [bits for bits in widths if any((method, bits) in found for method in methods)]
    with style():
        made = _grid_of(found, methods, widths)
        made.suptitle(title, fontsize=8)
    return made


def _grid_of(found: Mapping[tuple[str, str], pd.DataFrame], methods: Sequence[str], widths: Sequence[str]) -> Figure:
    """Rows are methods from above, columns widths; a dash stands for a pair that was not measured.

    `found`: (method, bits) -> share of needles found, by depth (rows) and length (columns).
    """
    from matplotlib.figure import Figure

    depths = max((len(panel.index) for panel in found.values()), default=1)
    names = _LETTER * max(map(len, methods), default=1)
    across = max(COLUMN, names + 1.1 + _ACROSS * len(widths))
    made = Figure(figsize=(across, _AROUND + len(methods) * max(_UP, _CELL * depths)), layout="constrained")
    axes = made.subplots(len(methods), len(widths), squeeze=False)
    image = None
    for column, bits in enumerate(widths):
        filled = [row for row, method in enumerate(methods) if (method, bits) in found]
        for row, method in enumerate(methods):
            axis, panel = axes[row, column], found.get((method, bits))
            if column == 0:
                axis.set_ylabel(method, rotation=0, ha="right", va="center", fontsize=7)
            if panel is None:
                axis.set(xticks=[], yticks=[])
                axis.spines[:].set_visible(False)
                axis.text(0.5, 0.5, DASH, ha="center", va="center", color=GREY, transform=axis.transAxes)
                continue
            image = heat(axis, panel, vmin=0, vmax=1, interpolation="nearest")
            bare(axis)
            lengths = [f"{length:g}" for length in panel.columns]
            axis.set_xticks(range(len(lengths)), lengths if row == filled[-1] else [""] * len(lengths), rotation=90)
            places = range(0, len(panel.index), max(1, (len(panel.index) - 1) // 2))
            axis.set_yticks(list(places), ["" if column else f"{panel.index[place]:g}" for place in places])
            if row == filled[0]:
                axis.set_title({"1": "1 bit"}.get(bits, f"{bits} bits" if bits.isdecimal() else bits), fontsize=7)
    made.supxlabel("length (tokens)", fontsize=7)
    if image is not None:
        made.colorbar(image, ax=axes, label="needles found, by depth", shrink=min(1.0, 3 / made.get_figheight()))
    return made


_LEVEL = 0.95
_MARKED = 8  # tokens between two markers of a line


def survival_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run and number of tokens.

    `share` of texts that are full precision's so far, by Kaplan and Meier (a text that ends without a difference is
    censored there), `low` and `high` its 95% interval (log-log), `kl` the mean distance of the step after so many
    tokens, in nats.
    """
    found = [_survival(record, store.samples_of(record)) for record in records]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def _survival(record: Record, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
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
    kl = [float(np.mean(here)) if here else float("nan") for here in distances]
    return pd.DataFrame({"method": named(record), "tokens": places, "share": share, "low": low, "high": high, "kl": kl})


@titled
def survival_figure(table: pd.DataFrame) -> Figure:
    """Two panels: the share of texts by tokens, with its interval, and the distance by step, a mean over 8 steps."""
    made, axes = panels(2, 3.2, 1, 2)
    looks = lines_of(table["method"])
    for method, part in table.groupby("method", sort=False):
        look: dict[str, Any] = {**looks[str(method)]._asdict(), "markersize": 3, "markevery": _MARKED}
        part = part.reset_index(drop=True)
        axes[0].step(part["tokens"], part["share"], where="post", label=method, **look)
        tint = {"color": look["color"], "alpha": 0.06, "linewidth": 0}
        axes[0].fill_between(part["tokens"], part["low"], part["high"], step="post", **tint)
        axes[1].plot(part["tokens"], part["kl"].rolling(8, min_periods=1).mean(), **look)
    axes[0].set_ylim(0, 1.02)
    axes[1].set_yscale("log")
    dress(axes[0], "tokens written", "texts that are full precision's", "y")
    dress(axes[1], "tokens of full precision's text", "KL of the next token (nats)", "y")
    below(made, axes[0], 4)
    return made


# By task: what a figure of its runs shows, in words.
_SHARES = {
    "tools": {
        "valid_json": "answers that\nare JSON",
        "schema_valid": "arguments that\nfit the schema",
        "accuracy": "right calls",
        "same_answers": "full precision's\nanswers",
    },
    "speculate": {
        "acceptance": "drafted tokens\nthat are kept",
        "tokens_per_forward": "tokens per forward\nof the target",
    },
    "reuse": {
        "sent_bits": "bits per element,\npacked",
        "zstd_bits": "bits per element,\nafter zstd",
        "delta_nll": "loss\n(nats/token)",
    },
}


def shares_table(records: Sequence[Record], _: Store) -> pd.DataFrame:
    """As `error.bars_table`: a line per run and quantity that its task's figure shows, from minus to plus its error.

    NaN where a run lacks what others have.
    """
    lines = []
    for record in records:
        found = record.metrics
        for name, words in _SHARES.get(record.task, {}).items():
            if any(name in other.metrics for other in records):
                mean, error = found.get(name, float("nan")), found.get(f"{name}_se", 0.0)
                values = {"mean": mean, "min": mean - error, "max": mean + error}
                bits = found.get("bits_per_element", float("nan"))
                lines.append({"method": named(record), "bits_per_element": bits, "quantity": words, **values})
    return pd.DataFrame(lines, columns=["method", "bits_per_element", "quantity", "mean", "min", "max"])
