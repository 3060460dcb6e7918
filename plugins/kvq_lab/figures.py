"""Figures of the tasks of this plugin: texts, shares, costs of single layers, drift, turns, searches; closed forms."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml

from kvq.codecs.lloyd_max import density
from kvq.report.figures import drawing as draw
from kvq.report.figures.error import bars
from kvq.report.figures.loss import run_name
from kvq.report.labels import named
from kvq.results import Record, Store, run_key
from kvq.results.metrics import metric_of
from kvq.results.presets import in_words
from kvq_lab.search import dominated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvq.report.tables.layout import Table

_MARKED = 8  # tokens between two markers of a line


def survival_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run and number of tokens.

    `share` of texts that are full precision's so far, by Kaplan and Meier (a text that ends without a difference is
    censored there), `low` and `high` its 95% interval (log-log), `kl` the mean distance of the step after so many
    tokens, in nats.
    """
    curves = [_estimate_survival(record, store.samples_of(record)) for record in records]
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame()


def _estimate_survival(record: Record, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    from scipy.stats import CensoredData, ecdf

    left = [row["first"] + 1 for row in rows if row["first"] is not None]
    kept = [len(row["same"]) for row in rows if row["first"] is None]
    places = np.arange(max(len(row["same"]) for row in rows) + 1)
    survival = ecdf(CensoredData(uncensored=left, right=kept)).sf
    share = survival.evaluate(places)
    low, high = share, share
    if left:
        with warnings.catch_warnings(action="ignore"):  # where all or none are left, there is no interval
            interval = survival.confidence_interval(0.95, method="log-log")
        low, high = (np.nan_to_num(side.evaluate(places), nan=1.0) for side in (interval.low, interval.high))
    distances = [[row["kl"][place] for row in rows if place < len(row["kl"])] for place in places]
    kl = [float(np.mean(here)) if here else float("nan") for here in distances]
    return pd.DataFrame({"method": named(record), "tokens": places, "share": share, "low": low, "high": high, "kl": kl})


@draw.register_figure("trajectory", "Greedy texts beside full precision's: {where}", survival_table, task="trajectory")
def survival_figure(table: pd.DataFrame) -> Figure:
    """Two panels: the share of texts by tokens, with its interval, and the distance by step, a mean over 8 steps."""
    made, axes = draw.panels(2, 3.2, 1, 2)
    looks = draw.lines_of(table["method"])
    for method, part in table.groupby("method", sort=False):
        look: dict[str, Any] = {**looks[str(method)]._asdict(), "markersize": 3, "markevery": _MARKED}
        part = part.reset_index(drop=True)
        axes[0].step(part["tokens"], part["share"], where="post", label=method, **look)
        tint = {"color": look["color"], "alpha": 0.06, "linewidth": 0}
        axes[0].fill_between(part["tokens"], part["low"], part["high"], step="post", **tint)
        axes[1].plot(part["tokens"], part["kl"].rolling(8, min_periods=1).mean(), **look)
    axes[0].set_ylim(0, 1.02)
    axes[1].set_yscale("log")
    draw.dress(axes[0], "tokens written", "texts that are full precision's", "y")
    draw.dress(axes[1], "tokens of full precision's text", "KL of the next token (nats)", "y")
    draw.legend_below(made, axes[0], 4)
    return made


_SHARES = yaml.safe_load(Path(__file__).with_name("shares.yaml").read_text(encoding="utf-8"))


def shares_table(records: Sequence[Record], _: Store) -> pd.DataFrame:
    """One line per run and quantity in `shares.yaml` for its task: `mean`, and `min` and `max` one standard error away.

    NaN where a run lacks a metric that others have.
    """
    lines = []
    for record in records:
        metrics = record.metrics
        for name, words in _SHARES.get(record.task, {}).items():
            if any(name in other.metrics for other in records):
                mean, error = metrics.get(name, float("nan")), metrics.get(f"{name}_se", 0.0)
                values = {"mean": mean, "min": mean - error, "max": mean + error}
                bits = metrics.get("bits_per_element", float("nan"))
                lines.append({"method": named(record), "bits_per_element": bits, "quantity": words, **values})
    return pd.DataFrame(lines, columns=["method", "bits_per_element", "quantity", "mean", "min", "max"])


for _task, _title in (
    ("tools", "Tool calls"),
    ("speculate", "Drafts from a method's cache"),
    ("reuse", "A prefix that is stored and sent"),
):
    draw.register_figure(_task, f"{_title}: {{where}}", shares_table, of="all", task=_task)(bars)


def part_losses(table: Table, _: Store, index: str, metric: str) -> pd.DataFrame | None:
    """One line per run and part, from metrics `<metric>[<index>=<number>]`, such as a turn; None: no run has any."""
    place, lines = re.compile(rf"{metric}\[{index}=(\d+)\]"), []
    for row in table.rows:
        metrics = row.record.metrics
        for start in sorted(int(found[1]) for name in metrics if (found := place.fullmatch(name))):
            value, se = (metrics.get(f"{name}[{index}={start}]") for name in (metric, f"{metric}_se"))
            lines.append({"method": row.name, "bits": row.bits, "first": start, metric: value, "se": se})
    return pd.DataFrame(lines) if lines else None


def draw_part_losses(numbers: pd.DataFrame) -> Figure:
    """Loss over full precision by turn, or KL (log axis) by part of a text: a line per method with standard errors."""
    drift = "kl_mean" in numbers
    runs = {run_name(*run): part for run, part in numbers.groupby(["method", "bits"], sort=False)}
    made, axis = draw.panels(1, 2.4 + 0.08 * len(runs))
    for name, look in draw.lines_of(runs).items():
        error = runs[name]["se"].astype(float).fillna(0.0)
        own: dict[str, Any] = {**look._asdict(), "capsize": 1.5, "markersize": 3.5, "label": name}
        axis.errorbar(runs[name]["first"], runs[name]["kl_mean" if drift else "delta_nll"], error, **own)
    if drift:
        axis.set_yscale("log")
        draw.dress(axis, "tokens written up to the end of the part", "mean KL (nats/token)")
    else:
        draw.draw_level(axis)
        draw.dress(axis, "turn", "loss over full precision (nats/token)", whole=True)
    draw.legend_below(made, axis, 2)
    return made


for _stem, _title, _index, _metric in (
    ("drift", "Distance by tokens written", "part", "kl_mean"),
    ("turns", "Loss by turn", "turn", "delta_nll"),
):
    _numbers = partial(part_losses, index=_index, metric=_metric)
    draw.register_figure(_stem, f"{_title}: {{where}}", _numbers, of="table")(draw_part_losses)

_LEAST = 1e-6
"""KL below which a colour tells nothing apart."""


def costs_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run, side (or head of it) and layer: KL when it alone is quantized, in nats per token."""
    lines = []
    for record in records:
        for row in store.samples_of(record):
            if "side" in row:
                lines.append((named(record), f"{row['side']}s", row["layer"], row["kl_mean"]))
            elif "head" in row:
                side, layer = row["of"]
                lines.append((named(record), f"{side}s, head {row['head']}", layer, row["kl_mean"]))
    return pd.DataFrame(lines, columns=["method", "side", "layer", "kl"])


@draw.register_figure("sensitivity", "Quantized alone: {where}", costs_table, task="sensitivity")
def costs_figure(table: pd.DataFrame) -> Figure:
    """A line of cells for the keys, one for the values of each run and one for each head; layers from left to right."""
    from matplotlib.colors import LogNorm

    sides = sorted(table["side"].unique(), key=lambda side: (side.partition(",")[0], len(side), side))
    rows = [(method, side) for method in dict.fromkeys(table["method"]) for side in sides]
    once = table.drop_duplicates(["method", "side", "layer"])  # of two runs with one label, the first
    grid = once.pivot(index=["method", "side"], columns="layer", values="kl").reindex(rows)
    most = max(float(table["kl"].max()), 10 * _LEAST)
    scale = LogNorm(max(min(float(table["kl"].min()), most / 10), most / 10**4, _LEAST), most)
    made, axis = draw.panels(2, 0.9 + 0.17 * len(rows))
    image = draw.draw_heat(axis, grid.clip(lower=scale.vmin), norm=scale, cmap="viridis")
    axis.set_yticks(range(len(rows)), [f"{method}, {side}" for method, side in rows], fontsize=6)
    step = max(1, grid.shape[1] // 15)
    axis.set_xticks(range(0, grid.shape[1], step), [str(layer) for layer in grid.columns[::step]])
    draw.hide_frame(axis)
    axis.set_xlabel("layer")
    made.colorbar(image, ax=axis, label="KL (nats/token)", extend="min", pad=0.01)
    return made


def sums_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run and set of sides and layers: the sum of the KL of its parts, and its own."""
    lines = []
    for record in records:
        rows = store.samples_of(record)
        single = {(row["side"], row["layer"]): row["kl_mean"] for row in rows if "side" in row}
        for row in rows:
            if "layers" in row:
                parts = [single[side, layer] for side, layers in row["layers"].items() for layer in layers]
                point = {"set": row["item"], "places": len(parts), "sum": sum(parts), "kl": row["kl_mean"]}
                lines.append({"method": named(record), **point})
    return pd.DataFrame(lines, columns=["method", "set", "places", "sum", "kl"])


@draw.register_figure("sums", "Do costs of layers add up? {where}", sums_table, task="sensitivity")
def sums_figure(table: pd.DataFrame) -> Figure:
    """A point for each set of layers: the sum of its parts' KL along x, its own KL along y; equal on the line."""
    made, axis = draw.panels(2, 3.2)
    for index, (method, part) in enumerate(table.groupby("method", sort=False)):
        draw.draw_points(axis, part["sum"], part["kl"], index, str(method))
    low, high = (getattr(table[["sum", "kl"]].to_numpy(), kind)() for kind in ("min", "max"))
    axis.plot([low, high], [low, high], color=draw.GREY, linewidth=0.8, zorder=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    draw.dress(axis, "sum of the KL of the parts (nats/token)", "KL of the set (nats/token)", "both")
    draw.legend_below(made, axis, 2)
    return made


_OF_TRIALS = ("sampler", "seed", "trial", "hypervolume", "words", "frontier")
_APART = ("sampler", "seed", "verdict", "winners")
"""What searches of one figure may differ in: what measures their winners afterwards changes no trial."""


def read_searches(store: Store) -> dict[str, list[Mapping[str, Any]]]:
    """The searches of a results folder, grouped by a digest of axes, overrides and settings except `_APART`."""
    searches: dict[str, list[Mapping[str, Any]]] = {}
    for path in sorted((store.root / "searches").glob("*.json")):
        if (one := _read_search(path)) is not None:
            settings = {name: value for name, value in one["settings"].items() if name not in _APART}
            shared = {"axes": one["axes"], "fixed": one["fixed"], "settings": settings}
            searches.setdefault(run_key(shared)[:8], []).append(one)
    return searches


def _read_search(path: Path) -> Mapping[str, Any] | None:
    """The content of a search's JSON file; None: the file is no JSON or not a search's."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return content if {"axes", "fixed", "settings", "trials", "hypervolume"} <= content.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def search_table(searches: list[Mapping[str, Any]]) -> pd.DataFrame:
    """One line per trial: sampler, seed, its number, its values, whether it is on the frontier of all, hypervolume."""
    lines = []
    for search in searches:
        settings = search["settings"]
        for number, (trial, volume) in enumerate(zip(search["trials"], search["hypervolume"], strict=True), 1):
            values = dict.fromkeys(settings["objectives"], np.nan)  # of a trial that failed
            values |= dict(zip(settings["objectives"], trial["values"] or [], strict=False))
            point = {"sampler": settings["sampler"], "seed": settings["seed"], "trial": number, "hypervolume": volume}
            lines.append({**point, "words": " ".join(trial["words"]), **values})
    table = pd.DataFrame(lines)
    objectives = searches[0]["settings"]["objectives"]
    done = table.dropna(subset=objectives)
    table.loc[done.index, "frontier"] = [not beaten for beaten in dominated(done[objectives].to_numpy().tolist())]
    return table


def search_title(search: Mapping[str, Any]) -> str:
    """What the trials of a search share: model, text and settings of the task."""
    fixed = dict(word.partition("=")[::2] for word in search["fixed"])
    asked = {name.removeprefix("task."): value for name, value in fixed.items() if name.startswith("task.")}
    words = [in_words(name, value) for name, value in asked.items() if name != "batch_size"]
    text = " on ".join(value for name in ("model", "dataset") if (value := fixed.get(name)))
    return ", ".join(["Searches", *([text] if text else []), *words])


def search_tables(_: Sequence[Record], store: Store) -> dict[tuple[str, str], pd.DataFrame]:
    """The trials of searches that differ only in sampler and seed, of two objectives or more."""
    tables = {}
    for name, searches in read_searches(store).items():
        objectives, numbers = searches[0]["settings"]["objectives"], search_table(searches)
        if len(objectives) > 1 and not numbers.dropna(subset=objectives).empty:
            tables[name, search_title(searches[0])] = numbers
    return tables


@draw.register_figure("search-{name}", "{what}", search_tables, of="records")
def search_figure(table: pd.DataFrame) -> Figure:
    """Trials and the frontier of all of them on the left; on the right hypervolume, a line for each seed."""
    first, second = [name for name in table.columns if name not in _OF_TRIALS][:2]
    made, axes = draw.panels(2, 3.0, 1, 2)
    done = table.dropna(subset=[first, second])
    for index, (sampler, part) in enumerate(table.groupby("sampler", sort=True)):
        finished = part.dropna(subset=[first, second])
        draw.draw_points(axes[0], finished[second], finished[first], index, str(sampler), s=14)
        for place, (_, line) in enumerate(part.groupby("seed")):
            look = {"color": draw.colour(index), "linestyle": draw.dash(index), "linewidth": 0.9}
            label = str(sampler) if place == 0 else None
            axes[1].step(line["trial"], line["hypervolume"], where="post", label=label, **look)
    free = done[done["frontier"].astype(bool)].drop_duplicates([first, second]).sort_values(second)
    axes[0].plot(free[second], free[first], color="black", linewidth=0.7, zorder=0)
    axes[0].set_yscale("log")
    draw.dress(axes[0], metric_of(second).title, metric_of(first).title, "both")
    draw.dress(axes[1], "trials", "hypervolume (share of the box)", "y", whole=True)
    draw.legend_below(made, axes[1], 4)
    return made


_SHARED = (1, 2, 4, 6, 7, 8, 16, 32)
_TARGET = 4  # bits whose bound without shared KV heads is asked for


def least_bits(shared: float, most: float, factor: float = 1.0) -> float:
    """The fewest bits b with `shared` · √3π/2 · 4⁻ᵇ <= `most`, for `shared` query heads of each KV head.

    `factor` 1/2: as KVQuant++ prints it (section 7), against its own condition, which has the factor 1.
    """
    return factor * float(np.log(np.sqrt(3) * np.pi / 2 * shared / most) / np.log(4))


def marginal_tables(records: Sequence[Record], _: Store) -> dict[tuple[str, str], pd.DataFrame]:
    """Closed forms of KVQuant++: densities at 8 and 64 dimensions, and least bits over query heads of a KV head."""
    if not any(record.method.startswith("kvquant_plus_plus") for record in records):
        return {}
    at, lines = np.linspace(-1, 1, 401), []
    for dim in (8, 64):
        curves = {"unit vector": density(at, dim), "Gaussian": dim**0.5 * density(at * dim**0.5, np.inf)}
        lines += [{"panel": f"d = {dim}", "curve": curve, "x": at, "y": y} for curve, y in curves.items()]
    most = np.sqrt(3) * np.pi / 2 * 4.0**-_TARGET
    for curve, factor in (("as derived", 1.0), ("as printed", 0.5)):
        y = [least_bits(shared, most, factor) for shared in _SHARED]
        lines.append({"panel": "least bits", "curve": curve, "x": np.array(_SHARED), "y": np.array(y)})
    title = f"KVQuant++: density of a coordinate, and least bits for the bound of {_TARGET} bits"
    return {("kvquant-plus-plus", title): pd.concat([pd.DataFrame(line) for line in lines], ignore_index=True)}


@draw.register_figure("sphere-marginal-{name}", "{what}", marginal_tables, of="records")
def marginal_figure(table: pd.DataFrame) -> Figure:
    """A panel for each dimension, and one for the least bits by KVQuant++'s formula and by its derivation."""
    names = list(dict.fromkeys(table["panel"]))
    made, axes = draw.panels(len(names), 2.4, 1, len(names))
    for axis, name in zip(axes, names, strict=True):
        part = table[table["panel"] == name]
        for index, (curve, line) in enumerate(part.groupby("curve", sort=False)):
            look = {"color": draw.colour(index), "linestyle": draw.dash(index), "linewidth": 1}
            axis.plot(line["x"], line["y"], label=str(curve), **look)
        x, y = ("query heads of a KV head", "bits") if name == "least bits" else (f"coordinate, {name}", "density")
        draw.dress(axis, x, y, "both")
        axis.legend()
    return made
