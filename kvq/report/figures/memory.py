"""Figures of `task=memory`: bytes by part and compression by context length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvq.report.figures.error import labelled_rows
from kvq.report.figures.style import colour, figure, lines_of, style
from kvq.results import Record, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("codes", "scales", "norms", "shift", "other", "residual")
PAPERS = (("nsn, 3 bits", 5.09), ("OScaR, 2 bits", 5.3))
"""Published compression against 16 bits: nsn's README (2,048 tokens), OScaR's abstract (128K tokens)."""


def memory_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """One line per run, length and side: bytes by part, in fp16, and whether they were stored or follow from layout."""
    return labelled_rows(records, store, "bytes")


def memory_figure(table: pd.DataFrame, title: str) -> Figure:
    """Left: bits per element by part at the longest length stored; right: compression by length."""
    from matplotlib.lines import Line2D

    with style():
        methods = list(dict.fromkeys(table["method"]))
        made = figure(2, 1.4 + 0.3 * max(len(methods), 5))
        axes = made.subplots(1, 2, width_ratios=(1, 1.2))
        stored = table[table["measured"]]
        length = int((stored if not stored.empty else table)["tokens"].max())
        here = table[table["tokens"] == length].groupby("method", sort=False)[[*PARTS, "fp16"]].sum()
        left = pd.Series(0.0, index=here.index)
        for index, part in enumerate(PARTS):
            bits = 16 * here[part] / here["fp16"]
            if bits.any():
                axes[0].barh(range(len(here)), bits, 0.7, left=left, color=colour(index), label=part)
                left = left + bits
        axes[0].set_yticks(range(len(here)), list(here.index))
        axes[0].invert_yaxis()
        axes[0].set_xlabel(f"bits per element at {length:,} tokens")
        lines = (
            table.groupby(["method", "tokens", "measured"], sort=False)[["total", "residual", "fp16"]]
            .sum()
            .reset_index()
        )
        looks = lines_of(methods)
        for method in methods:
            look = looks[method]
            part = lines[lines["method"] == method].sort_values("tokens")
            ratio = part["fp16"] / part["total"]
            axes[1].plot(part["tokens"], ratio, color=look.color, linestyle=look.linestyle)
            for measured, fill in ((True, look.color), (False, "white")):
                some = part["measured"] == measured
                axes[1].plot(part["tokens"][some], ratio[some], look.marker, color=look.color, markerfacecolor=fill)
        for (name, value), dashes in zip(PAPERS, ("--", ":"), strict=True):
            axes[1].axhline(value, color="black", linestyle=dashes, linewidth=0.8, label=f"published: {name}, {value}x")
        axes[1].set_xscale("log", base=2)
        ticks = sorted(table["tokens"].unique())
        axes[1].set_xticks(ticks, [f"{tick // 1024}K" if tick % 1024 == 0 else str(tick) for tick in ticks])
        axes[1].minorticks_off()
        axes[1].set_xlabel("context (tokens; hollow: from the layout)")
        axes[1].set_ylabel("compression against fp16 (x)")
        axes[1].set_ylim(bottom=0)
        axes[1].grid(linewidth=0.3)
        handles = [Line2D([], [], **look._asdict(), markersize=4, label=method) for method, look in looks.items()]
        axes[0].legend(loc="upper left", bbox_to_anchor=(-0.05, -0.2), ncols=3, columnspacing=1, handlelength=1)
        handles += axes[1].get_legend_handles_labels()[0]
        axes[1].legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.05, -0.2), ncols=2, columnspacing=1)
        made.suptitle(title, fontsize=8)
    return made
