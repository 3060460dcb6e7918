"""The figure of loss against bits in all: what tokens store with the tables of calibrations, by tokens in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvq.config.explain import COMPOSE_ERRORS, composed
from kvq.models.inputs import CacheShape, LayerKind, cache_shape
from kvq.report.figures.drawing import dress, legend_below, lines_of, panels, register_figure
from kvq.report.labels import keeps_first, label, method_departures
from kvq.results import Record, Store
from kvq.results.metrics import IN_FLIGHT, metric_of, total_bits
from kvq_lab.advisor import table_bytes_at, token_elements

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGER = CacheShape((LayerKind(32, 8, 128),), None)
"""The shape of a model of 8B parameters: Llama 3.1's."""
_DRAWN = (
    "rtn kivi nsn oscar nsnquant turboquant waterfill waterfill_kv waterfill/kv_small kvtc nova_kv cq/4c9b cq/8c10b"
)
_MOST = 8.0  # bits that are drawn


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
                bits = record.metrics["bits_per_element"] + 8 * size / (token_elements(LARGER) * tokens)
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
    axes[0][0].set_xlim(0, _MOST)
    legend_below(made, axes[0][0], 3)
    return made
