"""The figure of needles found by length and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvq.report.figures.drawing import GREY, bare, heat, register_figure
from kvq.report.figures.style import COLUMN
from kvq.report.labels import by_bits, label
from kvq.report.tables.layout import DASH, Row
from kvq.results import Record, Store

_OUTCOMES = ("hit", "wrong_needle", "bit_mixing", "other")
# Inches: a panel across and up at least, a cell of it up, the names of methods, what stands above and below the panels.
_ACROSS, _UP, _CELL, _LETTER, _AROUND = 1.15, 0.55, 0.11, 0.062, 1.25


def needle_grid(rows: Sequence[Row], store: Store) -> pd.DataFrame:
    """Outcomes of every run by length (tokens) and depth: one line per cell, shares of its items."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        if row.record.status != "done":
            continue
        samples = [sample for sample in store.samples_of(row.record) if "skipped" not in sample]
        cells = sorted({(sample["length"], sample["depth"]) for sample in samples})
        for length, depth in cells:
            here = [sample["outcome"] for sample in samples if (sample["length"], sample["depth"]) == (length, depth)]
            shares = {outcome: here.count(outcome) / len(here) for outcome in _OUTCOMES}
            lines.append(
                {"method": row.name, "bits": row.bits, "length": length, "depth": depth, "items": len(here)} | shares
            )
    return pd.DataFrame(lines, columns=["method", "bits", "length", "depth", "items", *_OUTCOMES])


def grid_of_run(record: Record, store: Store) -> pd.DataFrame:
    """`needle_grid` of one run."""
    return needle_grid([Row(record, label(record), record.bits)], store)


@register_figure(
    "niah", "Needles found: {where}", lambda table, store: needle_grid(table.rows, store), of="table", task="niah"
)
def heat_map(grid: pd.DataFrame) -> Figure:
    """A row of panels per method, a column per width: the share of needles found, depth (top: start) by length."""
    methods, widths = list(dict.fromkeys(grid["method"])), sorted(dict.fromkeys(grid["bits"]), key=by_bits)
    found = {
        (str(method), str(bits)): cells.pivot(index="depth", columns="length", values="hit")
        for (method, bits), cells in grid.groupby(["method", "bits"], sort=False)
    }
    share = None
    if len(methods) > 1 and "fp16" in methods:  # it has one number for all widths
        methods.remove("fp16")
        share = float(grid[grid["method"] == "fp16"]["hit"].mean())
        widths = [bits for bits in widths if any((method, bits) in found for method in methods)]
    return _grid_of(found, methods, widths, "" if share is None else f"; full precision finds {100 * share:.1f}%")


def _grid_of(
    found: Mapping[tuple[str, str], pd.DataFrame], methods: Sequence[str], widths: Sequence[str], said: str
) -> Figure:
    """Rows are methods from above, columns widths; a dash stands for a pair that was not measured.

    `found`: (method, bits) -> share of needles found, by depth (rows) and length (columns).
    """
    depths = max((len(panel.index) for panel in found.values()), default=1)
    names = _LETTER * max(map(len, methods), default=1)
    across = max(COLUMN, names + 1.1 + _ACROSS * len(widths))
    made = Figure(figsize=(across, _AROUND + len(methods) * max(_UP, _CELL * depths)), layout="constrained")
    axes = made.subplots(len(methods), len(widths), squeeze=False)
    image = None
    for column, bits in enumerate(widths):
        filled = [row for row, method in enumerate(methods) if (method, bits) in found]
        for row, method in enumerate(methods):
            axis, panel = axes[row, column], found.get((method, bits))
            if column == 0:
                axis.set_ylabel(method, rotation=0, ha="right", va="center", fontsize=7)
            if panel is None:
                axis.set(xticks=[], yticks=[])
                axis.spines[:].set_visible(False)
                axis.text(0.5, 0.5, DASH, ha="center", va="center", color=GREY, transform=axis.transAxes)
                continue
            image = heat(axis, panel, vmin=0, vmax=1, interpolation="nearest")
            bare(axis)
            lengths = [f"{length:g}" for length in panel.columns]
            axis.set_xticks(range(len(lengths)), lengths if row == filled[-1] else [""] * len(lengths), rotation=90)
            places = range(0, len(panel.index), max(1, (len(panel.index) - 1) // 2))
            axis.set_yticks(list(places), ["" if column else f"{panel.index[place]:g}" for place in places])
            if row == filled[0]:
                axis.set_title({"1": "1 bit"}.get(bits, f"{bits} bits" if bits.isdecimal() else bits), fontsize=7)
    made.supxlabel(f"length (tokens){said}", fontsize=7)
    if image is not None:
        made.colorbar(image, ax=axes, label="needles found, by depth", shrink=min(1.0, 3 / made.get_figheight()))
    return made
