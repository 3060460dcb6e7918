"""How every figure looks and how it is written: one set of colours and sizes, as PDF and PNG, its numbers as CSV."""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.report.command import write_files
from kvq.report.labels import FIRST, colour_of, method_of
from kvq.report.tables.formats import plain_cell

COLUMN = 3.4
"""Inches of one column of a two-column paper; a figure is one or two wide."""
SERIES = ("#264653", "#8AB17D", "#E9C46A", "#7D8597", "#B5838D", "#A98467", "#C8B6E2", "#ADB5BD")
"""Colours of what is no method: parts of memory, sides, stages, texts. None is a method's (`kvq.report.labels`)."""
MOST_LINES = 16
"""Most lines of a figure; its CSV has all."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_DPI = 160
_STYLE = matplotlib.rc_params_from_file(Path(__file__).parent / "kvq.mplstyle", use_default_template=False)
# No dates and versions, so that the same records give the same bytes.
_METADATA: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None, "Producer": None}, "png": {"Software": None}}


def style() -> AbstractContextManager[None]:
    """matplotlib's settings of all figures, within a block."""
    return matplotlib.rc_context(_STYLE)


def figure(columns: int, height: float) -> Figure:
    """An empty figure one or two columns wide and `height` inches high."""
    return Figure(figsize=(COLUMN * columns, height), layout="constrained")


def colour(index: int) -> str:
    """The colour of a series that is no method; they repeat after eight."""
    return SERIES[index % len(SERIES)]


def marker(index: int) -> str:
    """The marker of the series of this index."""
    return MARKERS[index % len(MARKERS)]


def dash(index: int) -> Any:
    """The dashes of the series of this index."""
    return _DASHES[index % len(_DASHES)]


class Line(NamedTuple):
    """How a run is drawn: its method's colour and dashes, a marker that no other of its colour has."""

    color: str
    linestyle: Any
    marker: str


def lines_of(labels: Iterable[str]) -> dict[str, Line]:
    """A look for each label, by name; variants and bits of a method (`nsn`, `nsn/arm_a`, `nsn 2`) share its colour.

    A method has its colour in every figure, on the page and in W&B; one that the palette does not know has one of a
    few others, and where two of a figure fall on the same, other dashes.
    """
    names = sorted(set(labels))
    dashes: dict[str, int] = {}
    for method in sorted({method_of(name) for name in names}):
        same = [other for other in dashes if colour_of(other) == colour_of(method)]
        dashes[method] = (method not in FIRST) + len(same)
    used: Counter[str] = Counter()
    found = {}
    for name in names:
        method = method_of(name)
        hue = colour_of(method)
        found[name] = Line(hue, dash(dashes[method]), marker(used[hue]))
        used[hue] += 1
    return found


def legend_columns(names: Sequence[str], columns: int) -> int:
    """How many columns of a legend with these names fit a figure `columns` columns wide."""
    return max(1, int(COLUMN * columns / (0.42 + 0.062 * max(map(len, names), default=1))))


def symlog(axis: Any, losses: pd.Series, along: str = "y") -> None:
    """Losses along x or y by powers of ten; linear near 0, where noise turns signs."""
    sizes = losses.abs()
    if sizes.any():
        # A power of ten, so that the ticks of the linear part are those of the logarithmic one.
        small = max(float(sizes[sizes > 0].min()), 1e-4)
        getattr(axis, f"set_{along}scale")("symlog", linthresh=10.0 ** math.floor(math.log10(small)))


def evenly_spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items at equal steps, from the first to the last, each once; all where there are no more."""
    if len(items) <= count:
        return list(items)
    return list(dict.fromkeys(items[int(i)] for i in np.linspace(0, len(items) - 1, count)))


def plain_text(text: str) -> str:
    """Text of records as figures show it: no formula, and no character without a glyph."""
    shown = "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text)
    return shown.replace("$", r"\$")


def drawable(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers with the names in them as figures show them, at most 60 characters of each."""

    def shown(value: Any) -> Any:
        return plain_text(value[:60]) if isinstance(value, str) else value

    return table.assign(**{str(name): table[name].map(shown) for name in table.select_dtypes(exclude="number")})


def image_of(made: Figure, kind: str = "png") -> bytes:
    """A figure as the bytes of a PNG or PDF file; the same figure gives the same bytes."""
    file = io.BytesIO()
    with style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # names that leave axes no room
        made.savefig(file, format=kind, dpi=_DPI, metadata=_METADATA[kind])
    made.set_layout_engine("none")  # laid out once for all its files
    return file.getvalue()


def save(made: Figure | None, numbers: pd.DataFrame, folder: Path, stem: str) -> list[Path]:
    """Write `stem`.csv and, of a figure, .pdf and .png and return their paths."""
    plain = numbers.rename(columns=plain_cell)
    for name in plain.select_dtypes(exclude="number"):
        plain[name] = plain[name].map(plain_cell)
    files = {"csv": plain.to_csv(index=False, lineterminator="\n").encode()}
    if made is not None:
        files |= {kind: image_of(made, kind) for kind in ("pdf", "png")}
    return write_files("figures", folder, {f"{stem}.{kind}": content for kind, content in files.items()})
