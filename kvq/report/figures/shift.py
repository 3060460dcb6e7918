"""Loss of calibrated methods by the text that they were calibrated on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.comparisons import loss_change
from kvq.report.figures.style import colour, figure, marker, style, symlog
from kvq.report.labels import label
from kvq.report.palette import method_of
from kvq.results import Record, Store, run_key
from kvq.results.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEASURED = ("bits_per_element", "delta_nll", "delta_nll_se")
COLUMNS = ("model", "dataset", "method", "bits", "calibrated_on", "shifted", *_MEASURED, "shift", "shift_se")
_NAMED = {"none": "not calibrated"}
_NEAR = 0.1
"""Methods without calibration are shown up to this many bits above the calibrated ones."""


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
        beside = fits and _text(first) == "none" and not _is_variant(first, small)
        if group not in pairs and not beside:
            continue
        own = next((record for record in group if _text(record) == record.dataset), None)
        names = min((label(record) for record in group), key=len)
        for record in group:
            shifted = _text(record) not in ("none", record.dataset)
            cost, error = loss_change(record, own, store) if shifted and own is not None else (math.nan, math.nan)
            line = (record.model, record.dataset, names, record.bits, _text(record), shifted)
            measured = [
                record.metrics.get(name, math.nan) for name in ("bits_per_element", "delta_nll", "delta_nll_se")
            ]
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
    """Names a run but for the text that it was calibrated on."""
    method = dict(record.config["method"])
    if "calibration" in method:
        left_out = ("dataset", "fingerprint")
        method["calibration"] = {n: value for n, value in method["calibration"].items() if n not in left_out}
    return run_key({**record.config, "method": method})


def _place(record: Record) -> str:
    return run_key({name: record.config.get(name) for name in ("model", "dataset", "task", "seed")})


def shift_figure(table: pd.DataFrame, title: str) -> Figure:
    """ΔNLL of each method, a panel for each text: a mark per text that it was calibrated on, hollow: not the tested.

    Methods by measured bits (in brackets), the fewest on top.
    """
    texts = sorted(set(table["calibrated_on"]), key=lambda text: (text == "none", text))
    tested = list(dict.fromkeys(table["dataset"]))
    names = table["method"] + " " + table["bits"]
    row = names.str.strip() + table["bits_per_element"].map(" ({:.2f})".format)
    ordered = table.assign(row=row).sort_values(["bits_per_element", "row"], kind="stable")
    rows = list(dict.fromkeys(ordered["row"]))
    with style():
        made = figure(2, 1.0 + 0.17 * len(rows))
        axes = made.subplots(1, len(tested), squeeze=False, sharey=True, sharex=True)[0]
        for axis, dataset in zip(axes, tested, strict=True):
            for line in ordered[ordered["dataset"] == dataset].to_dict("records"):
                beside = 0.0 if line["calibrated_on"] == "none" else 0.16 * (1 if line["shifted"] else -1)
                text = texts.index(line["calibrated_on"])
                axis.errorbar(
                    line["delta_nll"],
                    rows.index(line["row"]) + beside,
                    xerr=0 if math.isnan(line["delta_nll_se"]) else line["delta_nll_se"],
                    fmt=marker(text),
                    color=colour(text),
                    markerfacecolor="white" if line["shifted"] else colour(text),
                    elinewidth=0.8,
                )
            axis.set_title(f"tested on {dataset}")
            axis.set_xlabel(METRICS["delta_nll"].title)
            axis.grid(linewidth=0.3)
        symlog(axes[0], table["delta_nll"], "x")
        axes[0].set_yticks(range(len(rows)), rows)
        axes[0].invert_yaxis()
        labels = [_NAMED.get(text, f"calibrated on {text}") for text in texts]
        for index, label in enumerate(labels):
            axes[0].plot([], [], marker(index), color=colour(index), label=label)
        made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(texts))
        made.suptitle(title, fontsize=8)
    return made
