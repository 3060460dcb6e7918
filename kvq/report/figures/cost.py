"""Figures of what runs take: bytes by part, tokens per second, tables of calibrations."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvq.report.figures import drawing as draw
from kvq.report.figures.error import labelled_rows
from kvq.report.labels import named
from kvq.results import Record, Store

PARTS = ("codes", "scales", "norms", "shift", "other", "residual")
PAPERS = (("nsn, 3 bits", 5.09), ("OScaR, 2 bits", 5.3))
"""Published compression against 16 bits: nsn's README (2,048 tokens), OScaR's abstract (128K tokens)."""
REFERENCES = {"dynamic": "full precision", "preallocated": "full precision, one buffer"}
_GIB = 2**30
_RATES = {"peak_bytes": "peak memory above the weights (GiB)", "tokens_per_second": "tokens per second"}
_PEAKS = ("prefill_peak_bytes", "decode_peak_bytes")


@draw.register_figure(
    "memory", "Bytes of the cache: {model}", functools.partial(labelled_rows, kind="bytes"), of="all", task="memory"
)
def memory_figure(table: pd.DataFrame) -> Figure:
    """Left: bits per element by part at the longest length stored; right: compression by length."""
    looks = draw.lines_of(list(dict.fromkeys(table["method"])))
    made, axes = draw.panels(2, 1.4 + 0.3 * max(len(looks), 5), 1, 2, width_ratios=(1, 1.2))
    legend: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.05, -0.2), "columnspacing": 1}
    _draw_parts(axes[0], table)
    axes[0].legend(ncols=3, handlelength=1, **legend)
    _draw_compression(axes[1], table, looks)
    handles: list[Any] = [draw.handle(method, **look._asdict(), markersize=4) for method, look in looks.items()]
    axes[1].legend(handles=handles + axes[1].get_legend_handles_labels()[0], ncols=2, **legend)
    return made


def _draw_parts(axis: Any, table: pd.DataFrame) -> None:
    """Stacked bars of bits per element, one for each method: the parts of its cache at the longest length stored."""
    stored = table[table["measured"]]
    length = int((stored if not stored.empty else table)["tokens"].max())
    here = table[table["tokens"] == length].groupby("method", sort=False)[[*PARTS, "fp16"]].sum()
    bits = 16 * here[[*PARTS]].div(here["fp16"], axis=0)
    left = bits.cumsum(axis=1) - bits
    for index, part in enumerate(PARTS):
        if bits[part].any():
            axis.barh(range(len(here)), bits[part], 0.7, left=left[part], color=draw.colour(index), label=part)
    draw.name_rows(axis, list(here.index))
    axis.set_xlabel(f"bits per element at {length:,} tokens")


def _draw_compression(axis: Any, table: pd.DataFrame, looks: Mapping[str, draw.Line]) -> None:
    """Lines of compression against fp16 by length, one for each method, and the compression that papers print."""
    names = ["method", "tokens", "measured"]
    lines = table.groupby(names, sort=False)[["total", "residual", "fp16"]].sum().reset_index()
    for method in dict.fromkeys(table["method"]):
        look = looks[method]
        part = lines[lines["method"] == method].sort_values("tokens")
        ratio = part["fp16"] / part["total"]
        axis.plot(part["tokens"], ratio, color=look.color, linestyle=look.linestyle)
        for measured, fill in ((True, look.color), (False, "white")):
            some = part["measured"] == measured
            axis.plot(part["tokens"][some], ratio[some], look.marker, color=look.color, markerfacecolor=fill)
    for (name, value), dashes in zip(PAPERS, ("--", ":"), strict=True):
        axis.axhline(value, color="black", linestyle=dashes, linewidth=0.8, label=f"published: {name}, {value}x")
    ticks = sorted(table["tokens"].unique())
    draw.scale_by_two(axis, ticks, [f"{tick // 1024}K" if tick % 1024 == 0 else str(tick) for tick in ticks])
    axis.set_ylim(bottom=0)
    draw.dress(axis, "context (tokens; hollow: from the layout)", "compression against fp16 (x)", grid="both")


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
        return _draw_bars(table)
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


def _draw_bars(table: pd.DataFrame) -> Figure:
    """A bar for each run; none where it does not fit."""
    table = table.drop_duplicates("method")  # of two runs with one label, the first
    looks = draw.lines_of(list(table["method"]))
    made, axes = draw.panels(2, 0.7 + 0.2 * len(looks), 1, 2, sharey=True)
    for axis, (column, words) in zip(axes, _RATES.items(), strict=True):
        values = table.set_index("method")[column].astype(float) / (_GIB if column == "peak_bytes" else 1)
        axis.barh(range(len(looks)), [values[name] for name in looks], color=[look.color for look in looks.values()])
        draw.dress(axis, f"{words}, {table['batch'].iloc[0]} requests at once", grid="x")
    draw.name_rows(axes[0], list(looks))
    return made
