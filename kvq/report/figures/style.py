"""How every figure looks and how it is written: one set of colours and sizes, as PDF and PNG, its numbers as CSV."""

from __future__ import annotations

import functools
import io
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from kvq.report.command import write_files
from kvq.report.labels import FIRST, colour_of, method_of
from kvq.report.tables.formats import plain_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN = 3.4
"""Inches of one column of a two-column paper; a figure is one or two wide."""
SERIES = ("#264653", "#8AB17D", "#E9C46A", "#7D8597", "#B5838D", "#A98467", "#C8B6E2", "#ADB5BD")
"""Colours of what is no method: parts of memory, sides, stages, texts. None is a method's (`kvq.report.labels`)."""
MOST_LINES = 16
"""Most lines of a figure; its CSV has all."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_DPI = 200
# Of 9. The usual 6 takes a tenth of a figure's time more, for files that are hardly smaller.
_COMPRESS = 3
# No dates and versions, so that the same records give the same bytes.
_METADATA: Any = {"CreationDate": None, "Producer": None}


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings of all figures, within the block."""
    import matplotlib

    with matplotlib.rc_context(_settings()):
        yield


@functools.cache
def _settings() -> Any:
    from matplotlib import rc_params_from_file

    return rc_params_from_file(Path(__file__).parent / "kvq.mplstyle", use_default_template=False)


def figure(columns: int, height: float) -> Figure:
    """An empty figure one or two columns wide and `height` inches high."""
    from matplotlib.figure import Figure

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
        found[name] = Line(hue, dash(dashes[method]), MARKERS[used[hue] % len(MARKERS)])
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
        powers_of_ten(getattr(axis, f"{along}axis"))


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def powers_of_ten(axis: Any) -> None:
    """Label the ticks of a logarithmic axis as text; matplotlib's own formatter writes formulas."""
    from matplotlib.ticker import Formatter, LogFormatter, NullFormatter

    class Between(LogFormatter):
        """Labels where matplotlib has them: between powers of an axis that spans few."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    class Powers(Formatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            power = math.log10(abs(x)) if x else math.nan
            if not math.isclose(power, round(power) if x else 0, abs_tol=1e-6):
                return f"{x:g}"
            return ("−" if x < 0 else "") + "10" + str(round(power)).translate(_RAISED)

    axis.set_major_formatter(Powers())
    axis.set_minor_formatter(Between() if axis.get_scale() == "log" else NullFormatter())


def _without_formulas(made: Figure) -> None:
    """Label logarithmic axes as text wherever matplotlib's own formatter was left."""
    from matplotlib.ticker import LogFormatterMathtext

    for axis in (axis for axes in made.axes for axis in (axes.xaxis, axes.yaxis)):
        if axis.get_scale() == "log" and isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            powers_of_ten(axis)


def evenly_spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items at equal steps, from the first to the last, each once; all where there are no more."""
    if len(items) <= count:
        return list(items)
    return list(dict.fromkeys(items[int(i)] for i in np.linspace(0, len(items) - 1, count)))


def _without_control_characters(made: Figure) -> None:
    """Put a replacement character where a text of records has a control character, for which no font has a glyph."""
    from matplotlib.text import Text

    def printable(text: str) -> str:
        return "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text)

    _rename(made, printable)
    texts = [*made.texts]
    for axes in made.axes:
        # Not the ticks: asking for them makes them, hundreds in a figure that may show none.
        texts += [child for child in axes.get_children() if isinstance(child, Text)]
        texts += [axes.xaxis.label, axes.yaxis.label]
    for text in texts:
        text.set_text(printable(text.get_text()))


def _rename(made: Figure, change: Callable[[str], str]) -> None:
    """Change the names in legends, and at ticks that have labels of their own; what stays the same is not touched."""
    from matplotlib.ticker import FuncFormatter  # what `set_xticks` makes of labels

    for legend in (*made.legends, *(axes.legend_ for axes in made.axes if axes.legend_)):
        for text in legend.get_texts():
            text.set_text(change(text.get_text()))
    for axis in (axis for axes in made.axes for axis in (axes.xaxis, axes.yaxis)):
        if not isinstance(axis.get_major_formatter(), FuncFormatter):
            continue
        names = [text.get_text() for text in axis.get_majorticklabels()]
        if (changed := [change(name) for name in names]) != names:
            axis.set_ticklabels(changed)


# Characters of a name, tried in turn while names leave the axes no room; None: all of them.
_NAME_LENGTHS = (None, 60, 36, 20)
# The least share of a figure's width that its axes have, all panels of a line together.
_LEAST_SHARE = 0.35


def _lay_out(made: Figure) -> None:
    """Place everything; names that leave axes no room are cut in the middle (the figure's CSV has them whole)."""
    engine = made.get_layout_engine()
    for most in _NAME_LENGTHS:
        if engine is None:
            return
        if most is not None:
            _rename(made, functools.partial(cut, most=most))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=r"constrained_layout not applied")
            try:
                engine.execute(made)
            except UserWarning:
                continue
        places = [(axes.get_subplotspec(), axes.get_position().width) for axes in made.axes]
        shares = [width * place.get_gridspec().ncols for place, width in places if place is not None]
        if max(shares, default=1.0) >= _LEAST_SHARE:
            break
    made.set_layout_engine("none")


def cut(name: str, most: int) -> str:
    """A name of more than `most` characters by its beginning and end."""
    return name if len(name) <= most else f"{name[: 2 * most // 3]}…{name[-(most // 3) :]}"


def png_of(made: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    return _rendered(made, ("png",))["png"]


def _rendered(made: Figure, kinds: Sequence[str] = ("pdf", "png")) -> dict[str, bytes]:
    """The bytes of the files. The canvas writes them, because `savefig` draws each figure twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from PIL import Image

    files = {kind: io.BytesIO() for kind in kinds}
    _without_control_characters(made)
    _without_formulas(made)
    with style():
        made.dpi = _DPI
        canvas = FigureCanvasAgg(made)
        # Laid out once for both files, and by the renderer that draws next: it has measured the texts already.
        _lay_out(made)
        canvas.draw()
        opaque = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
        # A palette of 256 takes a third of the bytes, and less time to compress than it takes to find.
        picture = Image.fromarray(opaque).quantize(method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        picture.save(files["png"], format="png", dpi=(_DPI, _DPI), compress_level=_COMPRESS)
        if "pdf" in files:
            FigureCanvasPdf(made).print_pdf(files["pdf"], metadata=_METADATA)
    return {kind: file.getvalue() for kind, file in files.items()}


def save(made: Figure | None, numbers: pd.DataFrame, folder: Path, stem: str) -> list[Path]:
    """Write `stem`.csv and, of a figure, .pdf and .png and return their paths; the same records give the same bytes.

    Raises:
        RecordError: a folder that cannot be written.
    """
    plain = numbers.rename(columns=plain_cell)
    for name in plain.select_dtypes(exclude="number"):
        plain[name] = plain[name].map(plain_cell)
    files = {"csv": plain.to_csv(index=False, lineterminator="\n").encode()}
    if made is not None:
        files |= _rendered(made)
    return write_files("figures", folder, {f"{stem}.{kind}": content for kind, content in files.items()})
