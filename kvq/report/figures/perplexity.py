"""Figures of perplexity: by window, position and width; as papers print it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvq.report.comparisons import Comparisons
from kvq.report.figures.drawing import below, dress, level, panels, register_figure, titled
from kvq.report.figures.style import MOST_LINES, colour, legend_columns, lines_of, symlog
from kvq.report.labels import label
from kvq.report.tables.layout import Table
from kvq.results import Record, Store
from kvq.results.metrics import METRICS
from kvq.results.noise import NOISE_RULE

# Methods of a figure one column wide; how far apart the first and the last of a width are drawn, in bits.
_FEW, _ASIDE = 6, 0.3
_FEWEST_WIDTHS = 3


def run_name(method: object, bits: object) -> str:
    """A run of a figure: its method and its bits, where they are not fixed by the method."""
    return f"{method} {bits}".removesuffix(" fixed")


def windows_table(record: Record, store: Store) -> pd.DataFrame:
    """One line per window of a perplexity run: loss, and KL divergence from full precision, in nats per token."""
    rows = [row for row in store.samples_of(record) if row.get("tokens")]
    lines = [(row["window"], row["nll"] / row["tokens"], row.get("kl", 0.0) / row["tokens"]) for row in rows]
    return pd.DataFrame(lines, columns=["window", "nll", "kl"])


@titled
def windows_figure(table: pd.DataFrame) -> Figure:
    """Loss and KL divergence by window of the text."""
    made, axes = panels(1, 2.6, 2, 1, sharex=True)
    for index, (axis, name, text) in enumerate(zip(axes, ("nll", "kl"), ("loss", "KL"), strict=True)):
        axis.bar(table["window"], table[name], 0.8, color=colour(index))
        axis.set_ylabel(f"{text}\n(nats/token)")
    axes[1].set_xlabel("window")
    return made


def places_table(table: Table, index: str, metric: str = "delta_nll") -> pd.DataFrame | None:
    """One line per run and value of a part's `index`, such as a stretch of positions; None: no run has any."""
    place, lines = re.compile(rf"{metric}\[{index}=(\d+)\]"), []
    for row in table.rows:
        metrics = row.record.metrics
        for start in sorted(int(found[1]) for name in metrics if (found := place.fullmatch(name))):
            value, se = (metrics.get(f"{name}[{index}={start}]") for name in (metric, f"{metric}_se"))
            lines.append({"method": row.name, "bits": row.bits, "first": start, metric: value, "se": se})
    return pd.DataFrame(lines) if lines else None


def places_figure(numbers: pd.DataFrame, words: str, whole: bool = False) -> Figure:
    """A line per method with standard errors."""
    [metric] = set(numbers.columns) & {"delta_nll", "kl_mean"}
    runs = {run_name(*run): part for run, part in numbers.groupby(["method", "bits"], sort=False)}
    made, axis = panels(1, 2.4 + 0.08 * len(runs))
    for name, look in lines_of(runs).items():
        error = runs[name]["se"].astype(float).fillna(0.0)
        own: dict[str, Any] = {**look._asdict(), "capsize": 1.5, "markersize": 3.5, "label": name}
        axis.errorbar(runs[name]["first"], runs[name][metric], error, **own)
    if metric == "delta_nll":
        level(axis)
    else:
        axis.set_yscale("log")
    named = {"delta_nll": "loss over full precision (nats/token)", "kl_mean": "mean KL (nats/token)"}
    dress(axis, words, named[metric], whole=whole)
    below(made, axis, 2)
    return made


def valley_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """Runs by method and bits: ΔNLL to full precision with its error, and the paired change from the width before.

    `valley`: the loss is higher than at the next smaller width beyond noise, all steps tested together. Empty for fewer
    widths than `_FEWEST_WIDTHS`.
    """
    lines: list[dict[str, Any]] = []
    wanted = [record for record in records if record.bits.isdecimal() and "delta_nll" in record.metrics]
    wanted.sort(key=lambda r: (label(r), int(r.bits)))
    steps = {after.key: before for before, after in itertools.pairwise(wanted) if label(before) == label(after)}
    if len({record.bits for record in wanted}) < _FEWEST_WIDTHS:
        return pd.DataFrame()
    comparisons = Comparisons(store.samples_of)
    tested = comparisons.family([(after, steps[after.key]) for after in wanted if after.key in steps])
    for record in wanted:
        before = steps.get(record.key)
        change = None if before is None else comparisons.delta_nll(record, before)
        found = {name: record.metrics.get(name, math.nan) for name in ("delta_nll", "delta_nll_se", "delta_perplexity")}
        step: dict[str, Any] = {"step": math.nan, "step_se": math.nan, "valley": False}
        if before is not None and change is not None:
            worse = change.value > 0 and tested.differs((record.key, before.key))
            step = {"step": change.value, "step_se": change.standard_error, "valley": worse}
        lines.append({"method": label(record), "bits": int(record.bits), **found, **step})
    return pd.DataFrame(lines)


@register_figure("widths", "More bits, less loss? {where}", valley_table, of="all", task="ppl", note=NOISE_RULE)
def valley_figure(table: pd.DataFrame) -> Figure:
    """ΔNLL by bits on a scale that is linear near 0; rings: higher than at one bit less, beyond noise.

    The `MOST_LINES` best methods are drawn; the CSV has all.
    """
    best = table.groupby("method", sort=False)["delta_nll"].min().nsmallest(MOST_LINES).index
    table = table[table["method"].isin(best)]
    looks = lines_of(table["method"])
    wide = 1 if len(looks) <= _FEW else 2
    columns = legend_columns(list(looks), wide)
    ring: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none", "color": "black"}
    made, axis = panels(wide, 2.4 + 0.15 * math.ceil(len(looks) / columns))
    for place, (method, part) in enumerate(table.groupby("method", sort=False)):
        aside = _ASIDE * (place - (len(looks) - 1) / 2) / len(looks)  # so that bars of one width can be told apart
        look = {**looks[str(method)]._asdict(), "elinewidth": 0.6, "capsize": 1.2, "markersize": 3}
        error = part["delta_nll_se"].fillna(0)
        axis.errorbar(part["bits"] + aside, part["delta_nll"], error, label=str(method), **look)
        worse = part[part["valley"]]
        axis.plot(worse["bits"] + aside, worse["delta_nll"], "o", **ring)
    symlog(axis, table["delta_nll"])
    level(axis)
    words = ("bits (ring: worse than one bit less, beyond noise)", METRICS["delta_nll"].title)
    dress(axis, *words, grid="both", whole=True)
    below(made, axis, columns, handlelength=2.6)
    return made
