"""Figures of perplexity: by window, position, width and text of calibration; of engines; as papers print it."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.comparisons import Comparisons, loss_change
from kvq.report.figures.drawing import (
    below,
    dress,
    handle,
    level,
    panels,
    register_figure,
    rows_named,
    titled,
)
from kvq.report.figures.style import MOST_LINES, colour, legend_columns, lines_of, marker, symlog
from kvq.report.labels import label, method_of, model_name
from kvq.report.tables.layout import Table
from kvq.results import Record, Store, run_key
from kvq.results.metrics import METRICS
from kvq.results.noise import NOISE_RULE
from kvq.results.presets import part_of

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
"""Metrics of an engine that are drawn, and how the legend calls them."""
# Methods of a figure one column wide; how far apart the first and the last of a width are drawn, in bits.
_FEW, _ASIDE = 6, 0.3
_MEASURED = ("bits_per_element", "delta_nll", "delta_nll_se")
COLUMNS = ("model", "dataset", "method", "bits", "calibrated_on", "shifted", *_MEASURED, "shift", "shift_se")
_NAMED = {"none": "not calibrated"}
_FEWEST_WIDTHS = 3
_NEAR = 0.1
"""Methods without calibration are shown up to this many bits above the calibrated ones."""


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


def agreement_table(table: Table) -> pd.DataFrame | None:
    """One line per run, full precision first, with the metrics of `KINDS`; None: no run was compared."""
    done = [row for row in table.rows if "agreement_kl" in row.record.metrics]
    lines = [
        {"method": row.name, "bits": row.bits} | {name: row.record.metrics.get(name) for name in KINDS} for row in done
    ]
    return pd.DataFrame(lines, columns=["method", "bits", *KINDS]) if lines else None


@register_figure("agreement", "Engine and preset: {where}", lambda table, _: agreement_table(table), of="table")
def agreement_figure(numbers: pd.DataFrame) -> Figure:
    """A row per method, a mark per kind of KL, on a logarithmic axis; what is 0 there stands at the left edge."""
    made, axis = panels(1, 1.2 + 0.22 * len(numbers))
    known = numbers[list(KINDS)].astype(float)
    positive = known.where(known > 0)
    least = float(positive.min().min()) / 2 if positive.notna().any().any() else 1e-9
    for index, (name, words) in enumerate(KINDS.items()):
        values = known[name].clip(lower=least)
        axis.plot(values, range(len(numbers)), marker(index), linestyle="", color=colour(index), label=words)
    axis.set_xscale("log")
    rows_named(axis, [run_name(row.method, row.bits) for row in numbers.itertuples()])
    dress(axis, "mean KL (nats/token)", grid="x")
    axis.legend(loc="upper left", bbox_to_anchor=(-0.3, -0.25), ncols=1)
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
        axis.axhline(0, linewidth=0.6, color="0.5")
        dress(axis, words, "loss over full precision (nats/token)", whole=whole)
    else:
        axis.set_yscale("log")
        dress(axis, words, "mean KL (nats/token)", whole=whole)
    below(made, axis, 2)
    return made


@register_figure("positions", "Loss by position: {where}", lambda table, _: places_table(table, "position"), of="table")
def positions_figure(numbers: pd.DataFrame) -> Figure:
    """A line per method with standard errors, each stretch at its first position."""
    return places_figure(numbers, "first position of the stretch (token)")


def valley_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """Runs by method and bits: ΔNLL to full precision with its error, and the paired change from the width before.

    `valley`: the loss is higher than at the next smaller width beyond noise, all steps tested together.
    """
    lines: list[dict[str, Any]] = []
    wanted = [record for record in records if record.bits.isdecimal() and "delta_nll" in record.metrics]
    wanted.sort(key=lambda r: (label(r), int(r.bits)))
    steps = {after.key: before for before, after in itertools.pairwise(wanted) if label(before) == label(after)}
    tested = Comparisons(store.samples_of).family([(after, steps[after.key]) for after in wanted if after.key in steps])
    for record in wanted:
        before, change = steps.get(record.key), (math.nan, math.nan)
        if before is not None:
            change = loss_change(record, before, store)
        found = {name: record.metrics.get(name, math.nan) for name in ("delta_nll", "delta_nll_se", "delta_perplexity")}
        worse = before is not None and change[0] > 0 and tested.differs((record.key, before.key))
        step = {"step": change[0], "step_se": change[1], "valley": worse}
        lines.append({"method": label(record), "bits": int(record.bits), **found, **step})
    return pd.DataFrame(lines)


def widths_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """`valley_table` of runs at `_FEWEST_WIDTHS` widths or more; else empty."""
    table = valley_table(records, store)
    return table if not table.empty and table["bits"].nunique() >= _FEWEST_WIDTHS else pd.DataFrame()


@register_figure("widths", "More bits, less loss? {where}", widths_table, of="all", task="ppl", note=NOISE_RULE)
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


def shift_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """Runs of perplexity by text and method, one line for each text that it was calibrated on ("none": on no text).

    `shift`: of a run calibrated on another text than it is tested on, its loss over that of the same method calibrated
    on the text of the test, in nats per token, paired by windows. Empty where no method is calibrated on two texts.
    """
    runs = [r for r in records if r.task == "ppl" and r.status == "done" and "delta_nll" in r.metrics]
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(runs, key=lambda r: (r.model, r.dataset, label(r), r.bits, r.key)):
        groups[_without_text(record)].append(record)
    pairs = [group for group in groups.values() if len({_text(record) for record in group}) > 1]
    places = {_place(record) for group in pairs for record in group}
    most = max((record.metrics["bits_per_element"] for group in pairs for record in group), default=0.0) + _NEAR
    small = [run for run in runs if run.metrics["bits_per_element"] <= most]
    lines: list[dict[str, Any]] = []
    for group in groups.values():
        first = group[0]
        fits = first.metrics["bits_per_element"] <= most and _place(first) in places
        reference = fits and _text(first) == "none" and not _is_variant(first, small)
        if group not in pairs and not reference:
            continue
        own = next((record for record in group if _text(record) == record.dataset), None)
        names = min((label(record) for record in group), key=len)
        for record in group:
            shifted = _text(record) not in ("none", record.dataset)
            cost, error = loss_change(record, own, store) if shifted and own is not None else (math.nan, math.nan)
            line = (record.model, record.dataset, names, record.bits, _text(record), shifted)
            measured = [record.metrics.get(name, math.nan) for name in _MEASURED]
            lines.append(dict(zip(COLUMNS, (*line, *measured, cost, error), strict=True)))
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _is_variant(record: Record, runs: Sequence[Record]) -> bool:
    """Whether the method that it varies is among runs of the same text, at the same bits."""
    plain = method_of(record.method)
    others = (other for other in runs if label(other) == plain and other.bits == record.bits)
    return label(record) != plain and any(_place(other) == _place(record) for other in others)


def _text(record: Record) -> str:
    calibration = record.config.get("method", {}).get("calibration")
    return "none" if calibration is None else str(calibration["dataset"])


def _without_text(record: Record) -> str:
    """A hash of a run's settings without the text that it was calibrated on."""
    method = dict(record.config["method"])
    if "calibration" in method:
        left_out = ("dataset", "fingerprint")
        method["calibration"] = {n: value for n, value in method["calibration"].items() if n not in left_out}
    return run_key({**record.config, "method": method})


def _place(record: Record) -> str:
    return run_key({name: record.config.get(name) for name in ("model", "dataset", "task", "seed")})


def shifts(records: Sequence[Record], store: Store) -> dict[tuple[str, str], pd.DataFrame]:
    """`shift_table` of each model and protocol, by what tells the figures apart."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[run_key({name: record.config.get(name) for name in ("task", "model", "seed")})].append(record)
    found = {}
    for key, group in groups.items():
        scoring = part_of(group[0].config, "task").get("scoring")
        protocol = ", scoring ".join(filter(None, [model_name(group[0].model), scoring and str(scoring)]))
        found[f"{group[0].model}-{key[:6]}", protocol] = shift_table(group, store)
    return found


@register_figure("calibration-shift-{name}", "Calibrated on another text (hollow): {what}", shifts, of="records")
def shift_figure(table: pd.DataFrame) -> Figure:
    """ΔNLL of each method, a panel for each text: a mark per text that it was calibrated on, hollow: not the tested.

    Methods by measured bits (in brackets), the fewest on top.
    """
    texts = sorted(set(table["calibrated_on"]), key=lambda text: (text == "none", text))
    tested = list(dict.fromkeys(table["dataset"]))
    names = table["method"] + " " + table["bits"]
    row = names.str.strip() + table["bits_per_element"].map(" ({:.2f})".format)
    ordered = table.assign(row=row).sort_values(["bits_per_element", "row"], kind="stable")
    rows = list(dict.fromkeys(ordered["row"]))
    made, axes = panels(2, 1.0 + 0.17 * len(rows), 1, len(tested), squeeze=False, sharey=True, sharex=True)
    for axis, dataset in zip(axes[0], tested, strict=True):
        for line in ordered[ordered["dataset"] == dataset].to_dict("records"):
            offset = 0.0 if line["calibrated_on"] == "none" else 0.16 * (1 if line["shifted"] else -1)
            text = texts.index(line["calibrated_on"])
            error = 0 if math.isnan(line["delta_nll_se"]) else line["delta_nll_se"]
            look: dict[str, Any] = {"fmt": marker(text), "color": colour(text), "elinewidth": 0.8}
            look["markerfacecolor"] = "white" if line["shifted"] else colour(text)
            axis.errorbar(line["delta_nll"], rows.index(line["row"]) + offset, xerr=error, **look)
        dress(axis, METRICS["delta_nll"].title, grid="both", title=f"tested on {dataset}")
    symlog(axes[0, 0], table["delta_nll"], "x")
    rows_named(axes[0, 0], rows)
    handles = [
        handle(_NAMED.get(text, f"calibrated on {text}"), marker=marker(i), color=colour(i), linestyle="")
        for i, text in enumerate(texts)
    ]
    made.legend(handles=handles, loc="outside lower center", ncols=len(texts))
    return made
