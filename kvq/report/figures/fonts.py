"""Fonts in PDF files: cut to the same letters for every figure, so that it is done once, not once for each file."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterable, Iterator
from typing import Any

# Printable ASCII, the signs of labels, what the font joins (ﬁ). A figure with others has its font cut to those too.
_LETTERS = frozenset([*range(0x20, 0x7F), *map(ord, "Δ±≈–−†×·…°µ≤≥→ﬀﬁﬂﬃﬄ⁻⁰¹²³⁴⁵⁶⁷⁸⁹")])


class _Cut:
    """What the PDF backend asks of a font that was cut: its bytes, and where its glyphs went."""

    def __init__(self, content: bytes, glyph_index_map: Any) -> None:
        self._content, self.font, self.glyph_index_map = content, self, glyph_index_map

    def __enter__(self) -> _Cut:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def save(self, file: io.BytesIO, **_: object) -> None:
        file.write(self._content)


@contextlib.contextmanager
def cut_once() -> Iterator[None]:
    """Within, matplotlib's PDF backend cuts a font once for all figures whose text has the usual letters.

    Cutting takes a third of the time of a figure. Of a matplotlib that does it another way, nothing is changed.
    """
    from matplotlib.backends import _backend_pdf_ps

    backend: Any = _backend_pdf_ps

    cut = getattr(backend, "get_glyphs_subset", None)
    if not hasattr(backend, "SubsetResults") or cut is None:
        yield
        return
    backend.get_glyphs_subset = lambda font, glyphs: _remembered(cut, font, frozenset(glyphs) | _usual(font))
    try:
        yield
    finally:
        backend.get_glyphs_subset = cut


@functools.lru_cache(maxsize=16)
def _remembered(cut: Any, font: Any, glyphs: Iterable[int]) -> _Cut:
    buffer = io.BytesIO()
    with cut(font, glyphs) as found:
        found.font.save(buffer, reorderTables=False)
        return _Cut(buffer.getvalue(), dict(found.glyph_index_map))


@functools.lru_cache(maxsize=16)
def _usual(font: Any) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    found = get_font(font)
    return frozenset(glyph for letter in _LETTERS if (glyph := found.get_char_index(letter)))
