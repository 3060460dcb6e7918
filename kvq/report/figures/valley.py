"""Figures of perplexity over bit widths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvq.report.comparisons import Comparisons, loss_change
from kvq.report.figures.style import MOST_LINES, figure, legend_columns, lines_of, style, symlog, whole_numbers
from kvq.report.labels import label
from kvq.results import Record, Store
from kvq.results.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Methods of a figure one column wide; how far apart the first and the last of a width are drawn, in bits.
_FEW, _ASIDE = 6, 0.3


def valley_table(records: Sequence[Record], store: Store) -> pd.DataFrame:
    """Runs by method and bits: ΔNLL to full precision with its error, and the paired change from the width before.

    `valley`: the loss is higher than at the next smaller width beyond noise, all steps judged at once.
    """
    lines: list[dict[str, Any]] = []
    wanted = [record for record in records if record.bits.isdecimal() and "delta_nll" in record.metrics]
    wanted.sort(key=lambda r: (label(r), int(r.bits)))
    steps = [(after, before) for before, after in itertools.pairwise(wanted) if label(before) == label(after)]
    judged = Comparisons(store.samples_of).family(steps)
    for method, runs in itertools.groupby(wanted, label):
        before: Record | None = None
        for record in runs:
            line: dict[str, Any] = {
                "method": method,
                "bits": int(record.bits),
                "delta_nll": record.metrics["delta_nll"],
                "delta_nll_se": record.metrics.get("delta_nll_se", math.nan),
                "delta_perplexity": record.metrics.get("delta_perplexity", math.nan),
                "step": math.nan,
                "step_se": math.nan,
                "valley": False,
            }
            if before is not None:
                change = loss_change(record, before, store)
                line["step"], line["step_se"] = change
                line["valley"] = change[0] > 0 and judged.differs((record.key, before.key))
            lines.append(line)
            before = record
    return pd.DataFrame(lines)


def valley_figure(table: pd.DataFrame, title: str) -> Figure:
    """ΔNLL by bits on a scale that is linear near 0; rings: higher than at one bit less, beyond noise.

    The `MOST_LINES` best methods are drawn; the CSV has all.
    """
    best = table.groupby("method", sort=False)["delta_nll"].min().nsmallest(MOST_LINES).index
    table = table[table["method"].isin(best)]
    with style():
        looks = lines_of(table["method"])
        wide = 1 if len(looks) <= _FEW else 2
        columns = legend_columns(list(looks), wide)
        made = figure(wide, 2.4 + 0.15 * math.ceil(len(looks) / columns))
        axis = made.subplots()
        for place, (method, part) in enumerate(table.groupby("method", sort=False)):
            aside = _ASIDE * (place - (len(looks) - 1) / 2) / len(looks)  # so that bars of one width can be told apart
            axis.errorbar(
                part["bits"] + aside,
                part["delta_nll"],
                part["delta_nll_se"].fillna(0),
                **looks[str(method)]._asdict(),
                elinewidth=0.6,
                capsize=1.2,
                label=str(method),
                markersize=3,
            )
            worse = part[part["valley"]]
            axis.plot(
                worse["bits"] + aside, worse["delta_nll"], "o", markersize=9, markerfacecolor="none", color="black"
            )
        symlog(axis, table["delta_nll"])
        axis.axhline(0, color="#999999", linewidth=0.6)
        axis.set_xlabel("bits (ring: worse than one bit less, beyond noise)")
        axis.set_ylabel(METRICS["delta_nll"].title)
        whole_numbers(axis)
        axis.grid(linewidth=0.3)
        made.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, handlelength=2.6)
        axis.set_title(title)
    return made
