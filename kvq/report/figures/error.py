"""Figures of errors by stage and layer and on known states, and of what runs take: bytes by part, tokens per second."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
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
PARTS = ("codes", "scales", "norms", "shift", "other", "residual")
PAPERS = (("nsn, 3 bits", 5.09), ("OScaR, 2 bits", 5.3))
"""Published compression against 16 bits: nsn's README (2,048 tokens), OScaR's abstract (128K tokens)."""
REFERENCES = {"dynamic": "full precision", "preallocated": "full precision, one buffer"}
_GIB = 2**30
_RATES = {"peak_bytes": "peak memory above the weights (GiB)", "tokens_per_second": "tokens per second"}
_PEAKS = ("prefill_peak_bytes", "decode_peak_bytes")


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
        if quantity in _ERRORS and part["min"].min() > 0 and part["max"].max() > 50 * part["min"].min():  # wide
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


@draw.register_figure(
    "memory", "Bytes of the cache: {model}", functools.partial(labelled_rows, kind="bytes"), of="all", task="memory"
)
def memory_figure(table: pd.DataFrame) -> Figure:
    """Left: bits per element by part at the longest length stored; right: compression by length, and papers'."""
    looks = draw.lines_of(list(dict.fromkeys(table["method"])))
    made, axes = draw.panels(2, 1.4 + 0.3 * max(len(looks), 5), 1, 2, width_ratios=(1, 1.2))
    legend: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.05, -0.2), "columnspacing": 1}
    stored = table[table["measured"]]
    length = int((stored if not stored.empty else table)["tokens"].max())
    here = table[table["tokens"] == length].groupby("method", sort=False)[[*PARTS, "fp16"]].sum()
    bits = 16 * here[[*PARTS]].div(here["fp16"], axis=0)
    left = bits.cumsum(axis=1) - bits
    for index, part in enumerate(PARTS):
        if bits[part].any():
            axes[0].barh(range(len(here)), bits[part], 0.7, left=left[part], color=draw.colour(index), label=part)
    draw.name_rows(axes[0], list(here.index))
    axes[0].set_xlabel(f"bits per element at {length:,} tokens")
    axes[0].legend(ncols=3, handlelength=1, **legend)
    lines = (
        table.groupby(["method", "tokens", "measured"], sort=False)[["total", "residual", "fp16"]].sum().reset_index()
    )
    for method in dict.fromkeys(table["method"]):
        look = looks[method]
        own = lines[lines["method"] == method].sort_values("tokens")
        ratio = own["fp16"] / own["total"]
        axes[1].plot(own["tokens"], ratio, color=look.color, linestyle=look.linestyle)
        for measured, fill in ((True, look.color), (False, "white")):
            some = own["measured"] == measured
            axes[1].plot(own["tokens"][some], ratio[some], look.marker, color=look.color, markerfacecolor=fill)
    for (name, value), dashes in zip(PAPERS, ("--", ":"), strict=True):
        axes[1].axhline(value, color="black", linestyle=dashes, linewidth=0.8, label=f"published: {name}, {value}x")
    ticks = sorted(table["tokens"].unique())
    draw.scale_by_two(axes[1], ticks, [f"{tick // 1024}K" if tick % 1024 == 0 else str(tick) for tick in ticks])
    axes[1].set_ylim(bottom=0)
    draw.dress(axes[1], "context (tokens; hollow: from the layout)", "compression against fp16 (x)", grid="both")
    handles: list[Any] = [draw.handle(method, **look._asdict(), markersize=4) for method, look in looks.items()]
    axes[1].legend(handles=handles + axes[1].get_legend_handles_labels()[0], ncols=2, **legend)
    return made


def throughput_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """Medians of rate and peak (None: unknown) per subject and batch; `fits`: false for the first that did not."""
    lines: list[dict[str, Any]] = []
    for index, record in enumerate(records):
        rows, tokens = store.samples_of(record), record.config["task"]["new_tokens"]
        for subject in dict.fromkeys(row["subject"] for row in rows):
            name = named(record) if subject == "method" else REFERENCES.get(subject)
            if name is None or (subject != "method" and index):
                continue
            mine = [row for row in rows if row["subject"] == subject]
            lines += [
                {"method": name, "batch": batch, **_rates_of([row for row in mine if row["batch"] == batch], tokens)}
                for batch in sorted({row["batch"] for row in mine})
            ]
    return pd.DataFrame(lines)


def _rates_of(rows: Sequence[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Medians of tokens per second and of peak bytes over the repeats of one batch, each of so many new tokens."""
    if not all(row["fits"] for row in rows):
        return {"fits": False, "tokens_per_second": None, "peak_bytes": None}
    rates = [row["batch"] * tokens / (row["prefill_seconds"] + row["decode_seconds"]) for row in rows]
    peaks = [max(known) for row in rows if (known := [p for p in map(row.get, _PEAKS) if p is not None])]
    peak = statistics.median(peaks) if peaks else None
    return {"fits": True, "tokens_per_second": statistics.median(rates), "peak_bytes": peak}


@draw.register_figure(
    "throughput", "Throughput and memory by batch: {model} on {machine}", throughput_table, of="all", task="throughput"
)
def throughput_figure(table: pd.DataFrame) -> Figure:
    """Peak memory and tokens per second by batch (NSNQuant, Figures 4 and 8); cross: does not fit; one batch: bars."""
    batches = sorted(table["batch"].unique())
    if len(batches) == 1:
        table = table.drop_duplicates("method")  # of two runs with one label, the first
        looks = draw.lines_of(list(table["method"]))
        made, axes = draw.panels(2, 0.7 + 0.2 * len(looks), 1, 2, sharey=True)
        for axis, (column, words) in zip(axes, _RATES.items(), strict=True):
            values = table.set_index("method")[column].astype(float) / (_GIB if column == "peak_bytes" else 1)
            axis.barh(range(len(looks)), [values[name] for name in looks], color=[one.color for one in looks.values()])
            draw.dress(axis, f"{words}, {batches[0]} requests at once", grid="x")
        draw.name_rows(axes[0], list(looks))
        return made
    made, (peaks, rates) = draw.panels(2, 3, 1, 2)
    for method, look in draw.lines_of(list(dict.fromkeys(table["method"]))).items():
        part = table[table["method"] == method].sort_values("batch")
        fits = part[part["fits"]]
        rates.plot(fits["batch"], fits["tokens_per_second"], **look._asdict(), label=method)
        peaks.plot(fits["batch"], fits["peak_bytes"].astype(float) / _GIB, **look._asdict())
        for batch in part["batch"][~part["fits"].astype(bool)][:1]:
            rates.plot([batch], [0], "x", color=look.color, clip_on=False)
    for axis, words in zip((peaks, rates), _RATES.values(), strict=True):
        draw.scale_by_two(axis, batches, [str(batch) for batch in batches])
        axis.set_ylim(bottom=0)
        draw.dress(axis, "requests at once", words, grid="both")
    draw.legend_below(made, rates, 3)
    return made
