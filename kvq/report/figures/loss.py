"""Figures of perplexity and needles: by width, length, depth; loss against bits with the frontier; variants."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from kvq.report.comparisons import Comparisons, effective_bits, measured_bits
from kvq.report.figures import drawing as draw
from kvq.report.labels import ENGINES, by_bits, colour_of, engine_of, label, method_of
from kvq.report.tables.layout import DASH, Row, Table, is_of_texts
from kvq.results import Record, Store
from kvq.results.metrics import METRICS
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE

# Methods of a figure one column wide; how far apart the first and the last of a width are drawn, in bits.
_FEW, _ASIDE = 6, 0.3
_OUTCOMES = ("hit", "wrong_needle", "bit_mixing", "other")
# Inches: a panel across and up at least, a cell of it up, the names of methods, what stands above and below the panels.
_ACROSS, _UP, _CELL, _LETTER, _AROUND = 1.15, 0.55, 0.11, 0.062, 1.25
LOSSES = tuple((name, METRICS[name].title) for name in ("delta_nll", "kl_mean"))
_USUAL = ("rtn", "kivi", "nsn", "oscar", "nsnquant", "turboquant", "waterfill", "waterfill_kv")
_FIRST_COMPARED = ("kivi", "oscar", "nsnquant", "turboquant")
_LOSSES = ("delta_nll", "delta_nll_se", "kl_mean")
_GREY, _FRONT = "#b4b8be", "#333333"
_BITS = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_RING: Any = {"markersize": 8, "markerfacecolor": "none", "markeredgewidth": 0.8}
_FEWEST = 3
_RATES = 6
"""A method's variants are drawn over measured bits where they have so many different ones, to a tenth of a bit."""
_EFFECTIVE, _MEASURED = "effective_bits", "bits_per_element"
# Offsets of a label from its ring in points; the first without an overlap is taken. matplotlib avoids no overlaps.
_SIDES = ((-6.0, -5.0), (-6.0, 5.0), (-6.0, -12.0), (6.0, 7.0), (-6.0, 12.0), (6.0, 14.0))
# Font size of a label, and the approximate width and height of a panel, in points.
_NAME, _PANEL = 5.5, (200, 155)


def run_name(method: object, bits: object) -> str:
    """A run of a figure: its method and its bits, where they are not fixed by the method."""
    return f"{method} {bits}".removesuffix(" fixed")


def valley_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """ΔNLL by method and bits, and the paired step from the width before; `valley`: a rise beyond noise."""
    lines: list[dict[str, Any]] = []
    wanted = [record for record in records if record.bits.isdecimal() and "delta_nll" in record.metrics]
    wanted.sort(key=lambda r: (label(r), int(r.bits)))
    steps = {after.key: before for before, after in itertools.pairwise(wanted) if label(before) == label(after)}
    if len({record.bits for record in wanted}) < 3:  # widths, no curve
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


def runs_table(
    table: Table, bits_of: Callable[[Record], float | None] = effective_bits, column: str = _EFFECTIVE
) -> pd.DataFrame:
    """One line per run with `bits_of` (in `column`): losses, whether it is on the frontier, or a variant."""
    lines: list[dict[str, Any]] = []
    for row in () if is_of_texts(table) else table.rows:
        metrics, bits = row.record.metrics, bits_of(row.record)
        if row.record.status == "done" and not row.baseline and bits is not None and "delta_nll" in metrics:
            losses = {name: metrics.get(name) for name in _LOSSES}
            best = row.best if column == _EFFECTIVE else row.best_measured
            about = {"method": row.name, "bits": row.bits, column: bits}
            lines.append(about | losses | {"frontier": best, "variant": row.variant})
    return pd.DataFrame(lines, columns=["method", "bits", column, *_LOSSES, "frontier", "variant"])


@draw.register_figure(
    "pareto",
    "Loss and bits: {where}",
    lambda table, _: found if len(found := runs_table(table)) > 1 else None,
    of="table",
    note=f"{FRONTIER_RULE} {NOISE_RULE}",
)
def pareto_figure(numbers: pd.DataFrame) -> Figure:
    """ΔNLL (with errors, frontier ringed) and KL by effective bits: some methods coloured, variants hollow."""
    names = _choose_methods(numbers)
    engines = _engine_looks(numbers)
    looks = engines | {name: {**look._asdict(), "capsize": 2} for name, look in draw.lines_of(names).items()}
    made, axes = draw.panels(2, 4.2 if engines else 3.5, 1, 2)  # the legend of engines is longer
    for axis, (loss, name) in zip(axes, LOSSES, strict=True):
        known = numbers[numbers[loss].notna()].sort_values(_EFFECTIVE, kind="stable")
        if known.empty:  # a task without this distance
            axis.set_visible(False)
            continue
        others = known[~known["method"].isin(list(looks))]
        for variant, fill in ((True, "none"), (False, _GREY)):
            some = others[others["variant"] == variant]
            axis.plot(some[_EFFECTIVE], some[loss], "o", color=_GREY, markerfacecolor=fill, markersize=3)
        for method in [*engines, *names]:
            part = known[known["method"] == method]
            error = part["delta_nll_se"].fillna(0) if loss == "delta_nll" else None
            axis.errorbar(part[_EFFECTIVE], part[loss], error, **looks[method])
        _scale_axes(axis, known, loss, _EFFECTIVE)
        if loss == "delta_nll":
            _draw_frontier(axis, known, names)
        draw.dress(axis, "effective bits per element", name, grid="both")
    handles = _legend_handles(numbers, names)
    columns = draw.legend_columns([one.get_label() for one in handles], 2)
    made.legend(handles=handles, loc="outside lower center", ncols=columns)
    return made


def _engine_looks(numbers: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """How each format of an engine is drawn: a marker in the engine's colour and shape, hollow for a variant."""
    found = {name: engine for name in numbers["method"] if (engine := engine_of(name))}
    order = sorted(set(found.values()))
    variants = set(numbers["method"][numbers["variant"].astype(bool)])
    looks = {}
    for name, engine in found.items():
        hue, hollow = colour_of(name), name in variants
        edge = {"markeredgecolor": hue if hollow else _FRONT, "markerfacecolor": "none" if hollow else hue}
        shape: dict[str, Any] = {"marker": draw.marker(order.index(engine)), "markersize": 5, "zorder": 2.5}
        looks[name] = {"color": hue, "linestyle": "", "markeredgewidth": 0.6, **shape, **edge}
    return looks


def _choose_methods(numbers: pd.DataFrame) -> list[str]:
    """Methods with lines: the usual ones, then those whose losses are nearest the lowest of as few bits."""
    ordered = numbers.sort_values(_EFFECTIVE, kind="stable")
    losses = ordered["kl_mean"].fillna(ordered["delta_nll"]).clip(lower=1e-6)
    factor = losses / losses.cummin()
    best = factor.groupby(ordered["method"]).min()
    usual = ordered.groupby("method")["variant"].any()
    ranks = {
        method: (_USUAL.index(method) if method in _USUAL else len(_USUAL), usual[method], best[method])
        for method in best.index
        if engine_of(method) is None
    }
    return sorted(ranks, key=lambda method: (*ranks[method], method))[: len(_USUAL)]


def _legend_handles(numbers: pd.DataFrame, names: Sequence[str]) -> list[Any]:
    """Handles of the legend, one for each kind of line or marker that is drawn."""
    made = [draw.handle(name, **look._asdict(), markersize=4) for name, look in draw.lines_of(names).items()]
    engines = _engine_looks(numbers)
    for engine, name in sorted({str(engine_of(name)): name for name in reversed(engines)}.items()):
        filled = {"markeredgecolor": _FRONT, "markerfacecolor": engines[name]["color"]}
        made.append(draw.handle(f"engine: {engine}", **engines[name] | filled))
    others = numbers[~numbers["method"].isin([*names, *engines])]
    for variant, fill, text in ((False, _GREY, "other methods"), (True, "none", "variants and ablations")):
        if (others["variant"] == variant).any():
            made.append(draw.handle(text, color=_GREY, marker="o", markerfacecolor=fill, linestyle=""))
    if numbers["frontier"].any():
        made.append(draw.handle("frontier", **_RING, marker="o", linewidth=0.8, color=_FRONT))
    return made


def _scale_axes(axis: Any, known: pd.DataFrame, loss: str, column: str) -> None:
    """Scale bits (`column` of the numbers) along x by powers of two, losses along y by powers of ten."""
    draw.scale_losses(axis, known[loss])
    low, high = float(known[column].min()), float(known[column].max())
    ticks = [tick for tick in _BITS if 0.8 * low <= tick <= 1.1 * high]
    draw.scale_by_two(axis, ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(0.8 * low, 1.1 * high)


def _draw_frontier(axis: Any, known: pd.DataFrame, named: Sequence[str]) -> None:
    """Ring the runs on the frontier, join and name them; methods in `named` have their colours, others black."""
    ring = known[known["frontier"]]
    if ring.empty:
        return
    front: dict[str, Any] = {"color": _FRONT, "linewidth": 0.8, "zorder": 3}
    axis.plot(ring[_EFFECTIVE], ring["delta_nll"], drawstyle="steps-post", **front)
    axis.plot(ring[_EFFECTIVE], ring["delta_nll"], "o", **_RING, **front)
    axis.set_xlim(left=0.55 * float(known[_EFFECTIVE].min()))  # room for the names
    axis.get_ylim()  # matplotlib computes the limits now
    places = ring[[_EFFECTIVE, "delta_nll"]].to_numpy(dtype=float)
    points = (axis.transScale + axis.transLimits).transform(places) * _PANEL
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in points.tolist()]
    for (x, y), (_, run) in zip(points.tolist(), ring.iterrows(), strict=True):
        text = run_name(run["method"], run["bits"]).removeprefix(f"{ENGINES}/")
        length, height = 0.56 * _NAME * len(text), 0.55 * _NAME  # estimated
        boxes = [
            Bbox.from_extents(left, y + up - height, left + length, y + up + height)
            for across, up in _SIDES
            for left in [x + across - (length if across < 0 else 0)]
        ]
        side = next((i for i, box in enumerate(boxes) if not box.count_overlaps(taken)), 0)
        taken.append(boxes[side])
        across, up = _SIDES[side]
        own = run["method"] in named or engine_of(run["method"])
        look = {"fontsize": _NAME, "color": colour_of(run["method"]) if own else "black", "va": "center"}
        place = {"xytext": (across, up), "textcoords": "offset points", "ha": "right" if across < 0 else "left"}
        axis.annotate(text, (run[_EFFECTIVE], run["delta_nll"]), **place, **look)


def split_variants(table: Table, _: Store | None = None) -> dict[tuple[str, str], pd.DataFrame]:
    """Variants of each method, by its name (twice), at every width at which there are three or more."""
    found: dict[tuple[str, str], pd.DataFrame] = {}
    if is_of_texts(table):
        return found
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in table.rows:
        if row.record.status == "done" and not row.baseline and "delta_nll" in row.record.metrics:
            groups[method_of(row.record.method)][row.record.bits].append(row)
    for method, widths in sorted(groups.items()):
        lines = [
            {"bits": row.bits, "variant": row.name, "effective_bits": effective_bits(row.record)}
            | {name: row.record.metrics.get(name) for name in _LOSSES}
            for bits in sorted(widths, key=by_bits)
            for row in sorted(widths[bits], key=lambda row: row.record.metrics["delta_nll"])
            if len(widths[bits]) >= _FEWEST
        ]
        if lines:
            found[method, method] = pd.DataFrame(lines)
    return found


@draw.register_figure("variants-{name}", "Variants of {what}: {where}", split_variants, of="table")
def variants_figure(numbers: pd.DataFrame) -> Figure:
    """Bars of ΔNLL with standard errors, a panel for each width, the best on top."""
    parts = [(bits, part.head(12)) for bits, part in numbers.groupby("bits", sort=False)][:4]  # bars, panels
    heights = [len(part) for _, part in parts]
    ratios, whole = [height + 1 for height in heights], 0.9 + sum(0.25 + 0.16 * height for height in heights)
    made, axes = draw.panels(2, whole, len(parts), 1, squeeze=False, height_ratios=ratios)
    for axis, (bits, part) in zip(axes.flat, parts, strict=True):
        look = {"color": [colour_of(name) for name in part["variant"]], "capsize": 2}
        axis.barh(range(len(part)), part["delta_nll"], 0.7, xerr=part["delta_nll_se"].fillna(0), **look)
        sizes = ["" if pd.isna(size) else f" ({size:.2f})" for size in part["effective_bits"]]
        draw.name_rows(axis, [f"{name}{size}" for name, size in zip(part["variant"], sizes, strict=True)])
        axis.axvline(0, color=draw.GREY, linewidth=0.6)
        axis.set_title(f"{bits} bits", loc="left")
    made.supxlabel(f"{METRICS['delta_nll'].title}; effective bits in brackets", fontsize=8)
    return made


def split_by_rates(table: Table, _: Store | None = None) -> dict[tuple[str, str], pd.DataFrame]:
    """Numbers of each method (its name twice) with many variants and rates, with the methods compared first."""
    numbers, found = runs_table(table, measured_bits, _MEASURED), {}
    own = numbers["method"].map(method_of)
    for method in sorted(set(own) - set(_FIRST_COMPARED)):
        part = numbers[own == method]
        if part["method"].nunique() >= _FEWEST and part[_MEASURED].round(1).nunique() >= _RATES:
            found[method, method] = numbers[(own == method) | numbers["method"].isin(_FIRST_COMPARED)]
    return found


@draw.register_figure("measured-{name}", "Variants of {what} over measured bits: {where}", split_by_rates, of="table")
def family_figure(numbers: pd.DataFrame) -> Figure:
    """ΔNLL with standard errors by measured bits: a marker for each variant, lines of the methods compared first."""
    known = numbers[numbers["delta_nll"].notna()].sort_values(_MEASURED, kind="stable")
    usual = [name for name in _FIRST_COMPARED if (known["method"] == name).any()]
    variants = sorted(set(known["method"]) - set(usual))
    line: dict[str, Any] = {"alpha": 0.6, "markersize": 3}
    looks = {name: {**look._asdict(), **line, "label": name} for name, look in draw.lines_of(usual).items()}
    edge = {"linestyle": "", "markeredgecolor": _FRONT, "markeredgewidth": 0.5}
    for place, name in enumerate(variants):
        looks[name] = {"color": draw.colour(place), "marker": draw.marker(place + place // 8), **edge}
        looks[name]["label"] = name.rpartition("/")[2]
    made, axis = draw.panels(2, 4.6)
    for name, look in looks.items():
        part = known[known["method"] == name]
        axis.errorbar(part[_MEASURED], part["delta_nll"], part["delta_nll_se"].fillna(0), capsize=2, **look)
    _scale_axes(axis, known, "delta_nll", _MEASURED)
    draw.dress(axis, "measured bits per element, without the residual", METRICS["delta_nll"].title, grid="both")
    made.legend(loc="outside lower center", ncols=draw.legend_columns([look["label"] for look in looks.values()], 2))
    return made
