"""Where needles are found: small heat maps in a grid of methods by bits, each column with its own labels below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvq.report.figures.style import COLUMN
from kvq.report.tables.cells import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches: a panel across and up at least, a cell of it up, the names of methods, what stands above and below the panels.
_ACROSS, _UP, _CELL, _LETTER, _AROUND = 1.15, 0.55, 0.11, 0.062, 1.25


def table_of_panels(
    panels: Mapping[tuple[str, str], pd.DataFrame], methods: Sequence[str], widths: Sequence[str], title: str
) -> Figure:
    """The figure: rows are methods, columns widths; a dash stands for a pair that was not measured.

    Args:
        panels: (method, bits) -> share of needles found, by depth (rows) and length (columns).
        methods: rows, from above.
        widths: columns, from the left.
        title: of the figure.
    """
    from matplotlib.figure import Figure

    depths = max((len(panel.index) for panel in panels.values()), default=1)
    names = _LETTER * max(map(len, methods), default=1)
    across = max(COLUMN, names + 1.1 + _ACROSS * len(widths))
    made = Figure(figsize=(across, _AROUND + len(methods) * max(_UP, _CELL * depths)), layout="constrained")
    axes = made.subplots(len(methods), len(widths), squeeze=False)
    image = None
    for column, bits in enumerate(widths):
        filled = [row for row, method in enumerate(methods) if (method, bits) in panels]
        for row, method in enumerate(methods):
            axis, panel = axes[row, column], panels.get((method, bits))
            if column == 0:
                axis.set_ylabel(method, rotation=0, ha="right", va="center", fontsize=7)
            if panel is None:
                axis.set_xticks([])
                axis.set_yticks([])
                axis.spines[:].set_visible(False)
                axis.text(0.5, 0.5, DASH, ha="center", va="center", color="#999999", transform=axis.transAxes)
                continue
            image = axis.imshow(panel.to_numpy(dtype=float), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            axis.spines[:].set_visible(False)
            axis.tick_params(length=0, labelsize=6)
            lengths = [f"{length:g}" for length in panel.columns]
            axis.set_xticks(range(len(lengths)), lengths if row == filled[-1] else [""] * len(lengths), rotation=90)
            places = range(0, len(panel.index), max(1, (len(panel.index) - 1) // 2))
            texts = [f"{panel.index[place]:g}" for place in places]
            axis.set_yticks(list(places), texts if column == 0 else [""] * len(texts))
            if row == filled[0]:
                axis.set_title({"1": "1 bit"}.get(bits, f"{bits} bits" if bits.isdecimal() else bits), fontsize=7)
    made.supxlabel("length (tokens)", fontsize=7)
    if image is not None:
        made.colorbar(image, ax=axes, label="needles found, by depth", shrink=min(1.0, 3 / made.get_figheight()))
    made.suptitle(title, fontsize=8)
    return made
