"""Figures of `task=random_states` and `task=model_states`: errors on known states, by configuration and by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.figures.error import labelled_rows
from kvq.report.figures.plots import GREY, below, dress, level, titled, wrapped
from kvq.report.figures.style import colour, figure, legend_columns, lines_of
from kvq.report.labels import named
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ERRORS = {
    "key_mse": "squared error\nof keys",
    "value_mse": "squared error\nof values",
    "key_ip_error": "squared error of\nkeys' inner products",
    "key_tier_error": "relative error\nin the first tier",
    "key_demoted_error": "relative error\nafter a tier down",
    "key_promoted_error": "relative error\nafter a tier up",
}
_REDUCTIONS = {
    "key_mse_reduction": "keys: less error (%)",
    "value_mse_reduction": "values: less error (%)",
    "key_ranking_error_reduction": "keys, ranking query:\nless error (%)",
    "key_held_out_error_reduction": "keys, held-out queries:\nless error (%)",
}
_RANKED = ("key_ranking_error_reduction", "key_held_out_error_reduction")
_ACROSS = 3
_WIDE = 50
"""Errors are on a logarithmic axis where the largest is so many times the least."""


def bars_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run and quantity: its mean over draws or layers, the least and the most, and the bits stored.

    Reductions are in percent of the error of `task.against`; those weighted by attention where a method ranks tokens.
    """
    ranks = any("plan" in (record.config.get("method") or {}) for record in records)
    lines: list[dict[str, Any]] = []
    for record in records:
        rows = pd.DataFrame(store.samples_of(record))
        for name in [*_ERRORS, *(name for name in _REDUCTIONS if ranks or name not in _RANKED)]:
            if name in rows:
                scale = 100 if name in _REDUCTIONS else 1
                line = {"method": named(record), "bits_per_element": record.metrics.get("bits_per_element", math.nan)}
                values = {kind: scale * getattr(rows[name], kind)() for kind in ("mean", "min", "max")}
                lines.append({**line, "quantity": name, **values})
    return pd.DataFrame(lines, columns=["method", "bits_per_element", "quantity", "mean", "min", "max"])


@titled
def bars_figure(table: pd.DataFrame) -> Figure:
    """A bar for each run, a panel for each quantity; whiskers: the least and the most over draws or layers."""
    bits = table.drop_duplicates("method").set_index("method")["bits_per_element"]
    methods, quantities = list(bits.index), list(dict.fromkeys(table["quantity"]))
    looks = lines_of(methods)
    names = [name if math.isnan(bits[name]) else f"{name} ({bits[name]:.2f})" for name in methods]
    made = figure(2, 0.5 + math.ceil(len(quantities) / _ACROSS) * (0.65 + 0.17 * len(methods)))
    axes = wrapped(made, len(quantities), _ACROSS, sharey=True)
    for axis, quantity in zip(axes, quantities, strict=True):
        part = table[table["quantity"] == quantity].set_index("method")
        for place, method in enumerate(methods):
            if method in part.index:
                mean, least, most = (float(part.loc[method, kind]) for kind in ("mean", "min", "max"))
                axis.barh(place, mean, 0.7, color=looks[method].color)
                axis.plot([least, most], [place, place], color="black", linewidth=0.8)
        if quantity in _ERRORS and part["min"].min() > 0 and part["max"].max() > _WIDE * part["min"].min():
            axis.set_xscale("log")
        else:
            axis.axvline(0, color=GREY, linewidth=0.6)
        dress(axis, (_ERRORS | _REDUCTIONS)[quantity], grid="x")
    axes[0].set_yticks(range(len(methods)), names)
    axes[0].set_ylim(len(methods) - 0.4, -0.6)
    return made


def layers_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run and layer: by what percent its errors are below those of `task.against`; empty for one layer.

    The other method itself, which differs nowhere, is left out.
    """
    rows = labelled_rows([record for record in records if record.baseline_key is not None], store, "states")
    columns = [name for name in _REDUCTIONS if name in rows]
    if columns:
        rows = rows[rows.groupby("method")[columns].transform(lambda values: (values != 0).any()).any(axis=1)]
    if not columns or rows["place"].nunique() < 2:
        return pd.DataFrame()
    found = rows[["method", "place", *columns]].rename(columns={"place": "layer"})
    return found.assign(**{name: 100 * found[name] for name in columns}).reset_index(drop=True)


@titled
def layers_figure(table: pd.DataFrame) -> Figure:
    """Bars by layer, one for each run; a panel for each quantity, keys by the ranking query and by held-out queries."""
    columns = [name for name in _REDUCTIONS if name in table]
    methods = list(dict.fromkeys(table["method"]))
    width, across = 0.8 / len(methods), legend_columns(methods, 2)
    made = figure(2, 1.7 * math.ceil(len(columns) / 2) + 0.7 + 0.15 * math.ceil(len(methods) / across))
    axes = wrapped(made, len(columns), 2, sharex=True)
    for axis, name in zip(axes, columns, strict=True):
        for place, method in enumerate(methods):
            part = table[table["method"] == method]
            at = part["layer"] + width * (place - (len(methods) - 1) / 2)
            axis.bar(at, part[name], width, color=colour(place), label=method)
        level(axis)
        dress(axis, "layer", _REDUCTIONS[name], grid="y", whole=True)
    below(made, axes[0], across)
    return made


def states_of(task: Mapping[str, Any]) -> str:
    """The drawn states of a task, and what errors are compared with."""
    parts = [f"{task.get('tokens')} {task.get('states')} tokens of {task.get('head_dim')} channels"]
    if task.get("states") == "drifting":
        parts.append(f"drift {task.get('drift'):g}" + (f", jumps {task['jumps']}" if task.get("jumps") else ""))
    return ", ".join([*parts, *beside(task)])


def beside(task: Mapping[str, Any]) -> list[str]:
    """The method that errors are compared with, in words."""
    if not task.get("against"):
        return []
    bits = f" at {task['against_bits']} bits" if task.get("against_bits") else ""
    return [f"beside {task['against']}{bits}"]
