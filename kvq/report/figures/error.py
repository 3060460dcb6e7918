"""Figures of errors: by stage, layer and position, on synthetic keys, on states that are known."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from kvq.report.figures import drawing as draw
from kvq.report.labels import named
from kvq.results import Record, Store

_PANELS = {
    "rel_mse": "squared error\n(relative)",
    "weight_kl": "KL of weights\n(nats/query)",
    "output_error": "error of output\n(relative)",
}
_ARM = ["side", "arm", "rope"]
_NONE = ("value", "weight_kl")  # values leave the weights as they are
_PLANES_ACROSS = 3
_DARK = 0.55  # colours up to here on the scale are dark
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


def rows_of(record: Record, store: Store, kind: str) -> pd.DataFrame:
    """The samples of one kind of a run."""
    return pd.DataFrame([row for row in store.samples_of(record) if row["kind"] == kind])


def labelled_rows(records: Sequence[Record], store: Store, kind: str) -> pd.DataFrame:
    """The samples of one kind of several runs, each with the name of its method."""
    found = [pd.DataFrame()]
    for record in records:
        if not (rows := rows_of(record, store, kind)).empty:
            rows.insert(0, "method", named(record))
            found.append(rows.drop(columns="kind"))
    return pd.concat(found, ignore_index=True)


def steps_table(record: Record, store: Store) -> pd.DataFrame:
    """Errors by side, arm and where RoPE was, means over layers and heads."""
    return rows_of(record, store, "error").groupby([*_ARM, "complete"], sort=False)[[*_PANELS]].mean().reset_index()


@draw.register_figure(
    "error-steps-{run}", "{run} bits on {model}: error by stages", steps_table, of="each", task="error"
)
def steps_figure(table: pd.DataFrame) -> Figure:
    """Bars for every choice of stages: error of keys and values, of the weights and of the output."""
    shown = table[table["side"] != "both"]
    arms = [(side, arm) for side in ("key", "value") for arm in dict.fromkeys(shown[shown["side"] == side]["arm"])]
    measured = shown.drop_duplicates(_ARM).set_index(_ARM)[[*_PANELS]].to_dict("index")
    made, axes = draw.panels(2, 1.1 + 0.24 * len(arms), 1, 3, sharey=True)
    for axis, (quantity, name) in zip(axes, _PANELS.items(), strict=True):
        for index, rope in enumerate(("after", "before")):
            known = [measured.get((side, arm, rope), {}) if (side, quantity) != _NONE else {} for side, arm in arms]
            values = [one.get(quantity, math.nan) for one in known]
            places = [place + 0.2 * (2 * index - 1) for place in range(len(arms))]
            axis.barh(places, values, 0.38, color=draw.colour(index), label=f"quantized {rope} RoPE")
        axis.set_xlim(left=0)
        draw.dress(axis, name, grid="x")
    axes[0].set_yticks(range(len(arms)), [f"{side}: {arm}" for side, arm in arms])
    axes[0].set_ylim(len(arms) - 0.4, -0.6)
    draw.legend_below(made, axes[0], 2)
    return made


def plane_table(records: Sequence[Record], store: Store, quantity: str) -> pd.DataFrame:
    """One quantity by lowness of sinks and size of outlier channels, one line per run and pair; empty without it."""
    rows = labelled_rows(records, store, "plane")
    return rows[["method", "lowness", "outliers", quantity]] if quantity in rows else pd.DataFrame()


def planes_figure(table: pd.DataFrame) -> Figure:
    """A panel per method: the error (last column) as colour, lowness of sinks (x), size of outlier channels (y)."""
    quantity, methods = table.columns[-1], list(dict.fromkeys(table["method"]))
    columns = min(_PLANES_ACROSS, len(methods))
    lines = math.ceil(len(methods) / columns)
    scale = LogNorm(max(float(table[quantity].min()), 1e-4), max(float(table[quantity].max()), 2e-4))
    made, axes = draw.tile_panels(1 if columns < _PLANES_ACROSS else 2, 1.0 + 1.1 * lines, len(methods), columns)
    for index, (axis, method) in enumerate(zip(axes, methods, strict=True)):
        part = table[table["method"] == method]
        part = part.drop_duplicates(["outliers", "lowness"])  # of two runs with one label, the first
        grid = part.pivot(index="outliers", columns="lowness", values=quantity)
        image = draw.draw_heat(axis, grid, norm=scale, origin="lower")
        for (row, column), value in np.ndenumerate(grid.to_numpy(dtype=float)):
            if not math.isnan(value):
                ink = "white" if scale(value) < _DARK else "black"
                said = (f"{value:.2f}" if value < 9.995 else f"{value:.0f}").removeprefix("0")  # in three characters
                axis.text(column, row, said, ha="center", va="center", fontsize=5, color=ink)
        lowest = index + columns >= len(methods)
        axis.set_xticks(range(grid.shape[1]), [f"{name:g}" if lowest else "" for name in grid.columns])
        axis.set_yticks(range(grid.shape[0]), [f"{name:g}" if index % columns == 0 else "" for name in grid.index])
        draw.hide_frame(axis)
        axis.set_title(f"{method} bits", loc="left", fontsize=7)
    made.supxlabel("sink's norm: times smaller", fontsize=8)
    made.supylabel("outlier channels: mean / deviation", fontsize=8)
    size = min(1.0, 3 / (1.1 * lines))
    made.colorbar(image, ax=list(made.axes), label="relative squared error per token", shrink=size)
    return made


for _quantity, _title in (
    ("neighbour_apart_error", "Error of a sink's neighbours, relative to what sets keys apart"),
    ("sink_error", "Error of the sinks, relative to their norm"),
):
    draw.register_figure(
        f"synthetic-{_quantity}",
        f"{_title}; sinks {{sinks}} outlier channels",
        functools.partial(plane_table, quantity=_quantity),
        task="synthetic",
    )(planes_figure)


def bars_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """Mean, least and most of each run's quantities over draws or layers; reductions in percent, ranked if it ranks."""
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


def bars(table: pd.DataFrame) -> Figure:
    """A bar for each run, a panel for each quantity, with whiskers: the least and the most, or the standard error."""
    bits = table.drop_duplicates("method").set_index("method")["bits_per_element"]
    methods, quantities = list(bits.index), list(dict.fromkeys(table["quantity"]))
    looks = draw.lines_of(methods)
    names = [name if math.isnan(bits[name]) else f"{name} ({bits[name]:.2f})" for name in methods]
    height = 0.5 + math.ceil(len(quantities) / _ACROSS) * (0.65 + 0.17 * len(methods))
    made, axes = draw.tile_panels(2, height, len(quantities), _ACROSS, sharey=True)
    for axis, quantity in zip(axes, quantities, strict=True):
        part = table[table["quantity"] == quantity].drop_duplicates("method").set_index("method")
        for place, method in enumerate(methods):
            if method in part.index:
                mean, least, most = (float(part.loc[method, kind]) for kind in ("mean", "min", "max"))
                axis.barh(place, mean, 0.7, color=looks[method].color)
                axis.plot([least, most], [place, place], color="black", linewidth=0.8)
        if quantity in _ERRORS and part["min"].min() > 0 and part["max"].max() > _WIDE * part["min"].min():
            axis.set_xscale("log")
        else:
            axis.axvline(0, color=draw.GREY, linewidth=0.6)
        draw.dress(axis, (_ERRORS | _REDUCTIONS).get(quantity, quantity), grid="x")
    axes[0].set_yticks(range(len(methods)), names)
    axes[0].set_ylim(len(methods) - 0.4, -0.6)
    return made


bars_figure = draw.register_figure("states-drawn", "Drawn states: {states}", bars_table, task="random_states")(bars)


def layers_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """By what percent errors are below those of `task.against`, per other run and layer; empty for one layer."""
    rows = labelled_rows([record for record in records if record.baseline_key is not None], store, "states")
    columns = [name for name in _REDUCTIONS if name in rows]
    if columns:
        rows = rows[rows.groupby("method")[columns].transform(lambda values: (values != 0).any()).any(axis=1)]
    if not columns or rows["place"].nunique() < 2:
        return pd.DataFrame()
    found = rows[["method", "place", *columns]].rename(columns={"place": "layer"})
    return found.assign(**{name: 100 * found[name] for name in columns}).reset_index(drop=True)


@draw.register_figure(
    "states-layers", "Errors on a block of states: {block}", layers_table, of="all", task="model_states"
)
def layers_figure(table: pd.DataFrame) -> Figure:
    """Bars by layer, one for each run; a panel for each quantity, keys by the ranking query and by held-out queries."""
    columns = [name for name in _REDUCTIONS if name in table]
    methods = list(dict.fromkeys(table["method"]))
    width, across = 0.8 / len(methods), draw.legend_columns(methods, 2)
    height = 1.7 * math.ceil(len(columns) / 2) + 0.7 + 0.15 * math.ceil(len(methods) / across)
    made, axes = draw.tile_panels(2, height, len(columns), 2, sharex=True)
    for axis, name in zip(axes, columns, strict=True):
        for place, method in enumerate(methods):
            part = table[table["method"] == method]
            at = part["layer"] + width * (place - (len(methods) - 1) / 2)
            axis.bar(at, part[name], width, color=draw.colour(place), label=method)
        draw.draw_level(axis)
        draw.dress(axis, "layer", _REDUCTIONS[name], grid="y", whole=True)
    draw.legend_below(made, axes[0], across)
    return made


def name_states(task: Mapping[str, Any]) -> str:
    """The drawn states of `task=random_states` in words, from its settings, and what errors are compared with."""
    parts = [f"{task.get('tokens')} {task.get('states')} tokens of {task.get('head_dim')} channels"]
    if task.get("states") == "drifting":
        parts.append(f"drift {task.get('drift'):g}" + (f", jumps {task['jumps']}" if task.get("jumps") else ""))
    return ", ".join([*parts, *name_rival(task)])


def name_rival(task: Mapping[str, Any]) -> list[str]:
    """The method that a task's errors are compared with (`task.against`), in words; empty where there is none."""
    bits = f" at {task['against_bits']} bits" if task.get("against_bits") else ""
    return [f"beside {task['against']}{bits}"] if task.get("against") else []
