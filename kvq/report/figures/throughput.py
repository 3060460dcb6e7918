"""Figures of `task=throughput`: tokens per second and peak memory by batch, beside full precision."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.figures.error import named
from kvq.report.figures.style import Line, figure, lines_of, style
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = {"dynamic": "full precision", "preallocated": "full precision, one buffer"}
_GIB = 2**30
_PANELS = ("peak memory above the weights (GiB)", "tokens per second")
_PEAKS = ("prefill_peak_bytes", "decode_peak_bytes")


def throughput_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per subject and batch that fits: medians of tokens per second and of the peak in bytes (None: unknown).

    References are those timed beside the first run. `fits` is false, without numbers, for the first batch that did not.
    """
    lines: list[dict[str, Any]] = []
    for index, record in enumerate(records):
        rows, tokens = store.samples_of(record), record.config["task"]["new_tokens"]
        for subject in dict.fromkeys(row["subject"] for row in rows):
            name = named(record) if subject == "method" else REFERENCES.get(subject)
            if name is None or (subject != "method" and index):
                continue
            mine = [row for row in rows if row["subject"] == subject]
            lines += [
                {"method": name, "batch": batch, **_numbers([row for row in mine if row["batch"] == batch], tokens)}
                for batch in sorted({row["batch"] for row in mine})
            ]
    return pd.DataFrame(lines)


def _numbers(rows: Sequence[dict[str, Any]], tokens: int) -> dict[str, Any]:
    if not all(row["fits"] for row in rows):
        return {"fits": False, "tokens_per_second": None, "peak_bytes": None}
    rates = [row["batch"] * tokens / (row["prefill_seconds"] + row["decode_seconds"]) for row in rows]
    peaks = [max(known) for row in rows if (known := [p for p in map(row.get, _PEAKS) if p is not None])]
    peak = statistics.median(peaks) if peaks else None
    return {"fits": True, "tokens_per_second": statistics.median(rates), "peak_bytes": peak}


def throughput_figure(table: pd.DataFrame, title: str) -> Figure:
    """Peak memory above the weights and tokens per second, by batch; a cross: the first batch that does not fit.

    As NSNQuant's figures 4 and 8 draw them.
    """
    looks = lines_of(list(dict.fromkeys(table["method"])))
    if table["batch"].nunique() == 1:
        return _bars(table, looks, title)
    with style():
        made = figure(2, 3)
        peaks, rates = made.subplots(1, 2)
        for method, look in looks.items():
            part = table[table["method"] == method].sort_values("batch")
            fits = part[part["fits"]]
            rates.plot(fits["batch"], fits["tokens_per_second"], **look._asdict(), label=method)
            peaks.plot(fits["batch"], fits["peak_bytes"].astype(float) / _GIB, **look._asdict())
            for batch in part["batch"][~part["fits"].astype(bool)][:1]:
                rates.plot([batch], [0], "x", color=look.color, clip_on=False)
        batches = sorted(table["batch"].unique())
        for axis, words in zip((peaks, rates), _PANELS, strict=True):
            axis.set_xscale("log", base=2)
            axis.set_xticks(batches, [str(batch) for batch in batches])
            axis.minorticks_off()
            axis.set_xlabel("requests at once")
            axis.set_ylabel(words)
            axis.set_ylim(bottom=0)
            axis.grid(linewidth=0.3)
        made.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        made.suptitle(title, fontsize=8)
    return made


def _bars(table: pd.DataFrame, looks: Mapping[str, Line], title: str) -> Figure:
    """The two panels of runs that were measured at one batch alone: a bar for each; none where it does not fit."""
    methods = list(looks)
    with style():
        made = figure(2, 0.7 + 0.2 * len(methods))
        panels = made.subplots(1, 2, sharey=True)
        for axis, column, words in zip(panels, ("peak_bytes", "tokens_per_second"), _PANELS, strict=True):
            values = table.set_index("method")[column].astype(float) / (_GIB if column == "peak_bytes" else 1)
            axis.barh(range(len(methods)), [values[name] for name in methods], color=[looks[n].color for n in methods])
            axis.set_xlabel(words)
            axis.grid(axis="x", linewidth=0.3)
        panels[0].set_yticks(range(len(methods)), methods)
        panels[0].invert_yaxis()
        made.suptitle(f"{title}; {table['batch'].iloc[0]} requests at once", fontsize=8)
    return made
