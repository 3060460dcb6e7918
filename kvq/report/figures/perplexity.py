"""Figures of perplexity by width, and of needles found by length and depth."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvq.report.comparisons import Comparisons
from kvq.report.figures import drawing as draw
from kvq.report.labels import by_bits, label
from kvq.report.tables.layout import DASH, Table
from kvq.results import Record, Store
from kvq.results.metrics import METRICS
from kvq.results.noise import NOISE_RULE

# Methods of a figure one column wide; how far apart the first and the last of a width are drawn, in bits.
_FEW, _ASIDE = 6, 0.3
_FEWEST_WIDTHS = 3
_OUTCOMES = ("hit", "wrong_needle", "bit_mixing", "other")
# Inches: a panel across and up at least, a cell of it up, the names of methods, what stands above and below the panels.
_ACROSS, _UP, _CELL, _LETTER, _AROUND = 1.15, 0.55, 0.11, 0.062, 1.25


def run_name(method: object, bits: object) -> str:
    """A run of a figure: its method and its bits, where they are not fixed by the method."""
    return f"{method} {bits}".removesuffix(" fixed")


def valley_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """ΔNLL by method and bits, and the paired step from the width before; `valley`: a rise beyond noise."""
    lines: list[dict[str, Any]] = []
    wanted = [record for record in records if record.bits.isdecimal() and "delta_nll" in record.metrics]
    wanted.sort(key=lambda r: (label(r), int(r.bits)))
    steps = {after.key: before for before, after in itertools.pairwise(wanted) if label(before) == label(after)}
    if len({record.bits for record in wanted}) < _FEWEST_WIDTHS:
        return pd.DataFrame()
    comparisons = Comparisons(store.samples_of)
    tested = comparisons.compare_pairs([(after, steps[after.key]) for after in wanted if after.key in steps])
    for record in wanted:
        before = steps.get(record.key)
        change = None if before is None else comparisons.delta_nll(record, before)
        found = {name: record.metrics.get(name, math.nan) for name in ("delta_nll", "delta_nll_se", "delta_perplexity")}
        step: dict[str, Any] = {"step": math.nan, "step_se": math.nan, "valley": False}
        if before is not None and change is not None:
            worse = change.value > 0 and tested.differs((record.key, before.key))
            step = {"step": change.value, "step_se": change.standard_error, "valley": worse}
        lines.append({"method": label(record), "bits": int(record.bits), **found, **step})
    return pd.DataFrame(lines)


@draw.register_figure("widths", "More bits, less loss? {where}", valley_table, of="all", task="ppl", note=NOISE_RULE)
def valley_figure(table: pd.DataFrame) -> Figure:
    """ΔNLL by bits of the `MOST_LINES` best methods; rings: higher than at one bit less, beyond noise."""
    best = table.groupby("method", sort=False)["delta_nll"].min().nsmallest(draw.MOST_LINES).index
    table = table[table["method"].isin(best)]
    looks = draw.lines_of(table["method"])
    wide = 1 if len(looks) <= _FEW else 2
    columns = draw.legend_columns(list(looks), wide)
    ring: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none", "color": "black"}
    made, axis = draw.panels(wide, 2.4 + 0.15 * math.ceil(len(looks) / columns))
    for place, (method, part) in enumerate(table.groupby("method", sort=False)):
        aside = _ASIDE * (place - (len(looks) - 1) / 2) / len(looks)  # so that bars of one width can be told apart
        look = {**looks[str(method)]._asdict(), "elinewidth": 0.6, "capsize": 1.2, "markersize": 3}
        error = part["delta_nll_se"].fillna(0)
        axis.errorbar(part["bits"] + aside, part["delta_nll"], error, label=str(method), **look)
        worse = part[part["valley"]]
        axis.plot(worse["bits"] + aside, worse["delta_nll"], "o", **ring)
    draw.scale_losses(axis, table["delta_nll"])
    draw.draw_level(axis)
    words = ("bits (ring: worse than one bit less, beyond noise)", METRICS["delta_nll"].title)
    draw.dress(axis, *words, grid="both", whole=True)
    draw.legend_below(made, axis, columns, handlelength=2.6)
    return made


def needle_grid(table: Table, store: Store) -> pd.DataFrame:
    """Outcomes of every run by length (tokens) and depth: one line per cell, shares of its items."""
    lines: list[dict[str, Any]] = []
    for row in (row for row in table.rows if row.record.status == "done"):
        cells: dict[tuple[int, float], list[str]] = defaultdict(list)
        for sample in store.samples_of(row.record):
            if "skipped" not in sample:
                cells[sample["length"], sample["depth"]].append(sample["outcome"])
        for (length, depth), here in sorted(cells.items()):
            shares = {outcome: here.count(outcome) / len(here) for outcome in _OUTCOMES}
            about = {"method": row.name, "bits": row.bits, "length": length, "depth": depth, "items": len(here)}
            lines.append(about | shares)
    return pd.DataFrame(lines, columns=["method", "bits", "length", "depth", "items", *_OUTCOMES])


@draw.register_figure("niah", "Needles found: {where}", needle_grid, of="table", task="niah")
def needles_figure(grid: pd.DataFrame) -> Figure:
    """A row per method (a dash: not measured), a column per width: share of needles found, depth by length."""
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
    said = "" if share is None else f"; full precision finds {100 * share:.1f}%"
    depths = max((len(panel.index) for panel in found.values()), default=1)
    names = _LETTER * max(map(len, methods), default=1)
    across = max(draw.COLUMN, names + 1.1 + _ACROSS * len(widths))
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
                axis.text(0.5, 0.5, DASH, ha="center", va="center", color=draw.GREY, transform=axis.transAxes)
                continue
            image = draw.draw_heat(axis, panel, vmin=0, vmax=1, interpolation="nearest")
            draw.hide_frame(axis)
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
