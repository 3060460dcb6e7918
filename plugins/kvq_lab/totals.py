"""Figures of loss: against bits in all, of what tokens store with the tables of calibrations, and on real models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import LogLocator

from kvq.config.explain import COMPOSE_ERRORS, composed
from kvq.models.inputs import CacheShape, LayerKind, cache_shape
from kvq.report.figures.drawing import dress, legend_below, lines_of, multiples, panels, register_figure
from kvq.report.figures.over_models import SCORINGS, stand_in_table
from kvq.report.labels import keeps_first, label, method_departures
from kvq.results import Record, Store
from kvq.results.metrics import IN_FLIGHT, metric_of, total_bits
from kvq_lab.advisor import held_elements, table_bytes_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGER = CacheShape((LayerKind(32, 8, 128),), None)
"""The shape of a model of 8B parameters: Llama 3.1's."""
_DRAWN = (
    "rtn kivi nsn oscar nsnquant turboquant waterfill waterfill_kv waterfill/kv_small kvtc nova_kv cq/4c9b cq/8c10b"
)
_NAMED = 4  # methods that a panel of `stand-ins` names: those whose ranks differ most


def totals_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """A line per run, shape and number of tokens in flight; empty where no run has tables.

    A method with runs that keep the first token in full precision, as waterfill does, has only those. At the larger
    shape, bits and losses are those of the measured model, and the bytes of tables from the layout (`table_bytes_at`).
    """
    wanted = [r for r in records if _is_drawn(r) and total_bits(r.metrics, IN_FLIGHT["32K"]) is not None]
    kept = {r.method for r in wanted if keeps_first(r)}
    wanted = [r for r in wanted if r.method not in kept or keeps_first(r)]
    if not any(r.metrics.get("calibration_bytes") and r.method.startswith("waterfill") for r in wanted):
        return pd.DataFrame()
    lines = []
    for record in sorted(wanted, key=lambda one: (label(one), one.metrics["bits_per_element"])):
        shape, tables = _shape_of_model(record.model), record.metrics.get("calibration_bytes", 0.0)
        line = {"method": label(record), "bits": record.bits, "tables": tables}
        line["delta_nll"] = record.metrics["delta_nll"]
        for name, tokens in IN_FLIGHT.items():
            at = {"in_flight": name, "shape": record.model, "total_bits": total_bits(record.metrics, tokens)}
            lines.append(line | at)
            if shape is not None or not tables:
                size = table_bytes_at(record, shape, LARGER) if shape is not None and tables else 0.0
                bits = record.metrics["bits_per_element"] + 8 * size / (held_elements(LARGER) * tokens)
                lines.append(line | at | {"shape": "8B", "tables": size, "total_bits": bits})
    return pd.DataFrame(lines)


def _is_drawn(record: Record) -> bool:
    as_preset = not method_departures(record) or keeps_first(record)
    return record.method in _DRAWN.split() and as_preset and record.metrics.get("delta_nll", 0.0) > 0


def _shape_of_model(model: str) -> CacheShape | None:
    try:
        return cache_shape(composed((f"model={model}",)).model)
    except COMPOSE_ERRORS:
        return None


@register_figure("total-bits", "Loss against bits in all: {where}", totals_table, task="ppl")
def totals_figure(table: pd.DataFrame) -> Figure:
    """A row of panels for each shape, the model's own first, a column for each number of tokens in flight."""
    shapes, looks = list(dict.fromkeys(table["shape"])), lines_of(list(dict.fromkeys(table["method"])))
    sizes = {"sharex": True, "sharey": True, "squeeze": False}
    made, axes = panels(2, 1.2 + 1.7 * len(shapes), len(shapes), len(IN_FLIGHT), **sizes)
    for row, shape in zip(axes, shapes, strict=True):
        for axis, length in zip(row, IN_FLIGHT, strict=True):
            here = table[(table["shape"] == shape) & (table["in_flight"] == length)]
            for method, look in looks.items():
                part = here[here["method"] == method]
                axis.plot(part["total_bits"], part["delta_nll"], **look._asdict(), markersize=3, label=method)
            words = "bits in all" if shape == shapes[-1] else ""
            title = f"{length} tokens" if shape == shapes[0] else ""
            dress(axis, words, f"{metric_of('delta_nll').title}\n{shape}" if axis is row[0] else "", "both", title)
    axes[0][0].set_yscale("log")
    axes[0][0].set_xlim(0, 8.0)  # bits that are drawn
    legend_below(made, axes[0][0], 3)
    return made


@register_figure(
    "stand-ins",
    "Losses on real models and on others: one mark per method and bits",
    lambda records, _: stand_in_table(records),
    of="records",
)
def stand_in_figure(table: pd.DataFrame) -> Figure:
    """Loss on a real model over loss on others, a row for each real model and scoring; the farthest are named."""
    looks = lines_of(table["method"])
    # Losses below this are noise, and a logarithm has no place for gains.
    drawn = table.assign(row=table["model"] + " " + table["scoring"])
    drawn = drawn.assign(**table[["loss_stand_in", "loss"]].clip(lower=1e-3))
    pairs = itertools.product(sorted(set(table["model"])), SCORINGS.items())
    rows = {f"{model} {name}": f"{model},\n{words}" for model, (name, words) in pairs}
    rows = {row: words for row, words in rows.items() if row in set(drawn["row"])}
    columns = ("model_stand_in", dict.fromkeys(table["model_stand_in"], ""))
    height = 0.6 + 1.9 * len(rows)
    made, _, parts = multiples(height, drawn, ("row", rows), columns, sharex=True, sharey=True)
    for axis, row, _, part in parts:
        named_ones = set(part["ranks"].abs().nlargest(_NAMED).index)
        for index, method, *place in part[["method", "loss_stand_in", "loss"]].itertuples():
            axis.plot(*place, looks[method].marker, color=looks[method].color, alpha=0.8)
            if index in named_ones:
                aside: Any = {"xytext": (-3, 2), "ha": "right"} if place[0] > 0.03 else {"xytext": (3, 2)}
                note = axis.annotate(method, place, textcoords="offset points", fontsize=5, **aside)
                note.set_in_layout(False)
        axis.set(xscale="log", yscale="log")
        axis.xaxis.set_major_locator(LogLocator(numticks=6))
        axis.grid(linewidth=0.3)
        if len(part):
            first = part.iloc[0]
            said = f"ρ {first['rho']:.2f} [{first['low']:.2f}, {first['high']:.2f}], n = {first['methods']}"
            above = f"{first['model_stand_in']}\n" if row == next(iter(rows)) else ""
            axis.set_title(above + said, fontsize=6)
    made.supxlabel("ΔNLL on the other model (nats/token)", fontsize=8)
    return made
