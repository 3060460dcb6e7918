"""Marked places of a page, `<!-- kind: words -->` to `<!-- end -->`, that a command fills from what is measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = re.compile(r"(<!-- (\w+): ([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.S)


def filled(text: str, kind: str, made: Callable[[str], str]) -> str:
    """`text` with `made(words)` in every place of a kind; other places stay as they are."""

    def put(place: re.Match[str]) -> str:
        return f"{place[1]}{made(place[3])}{place[5]}" if place[2] == kind else place[0]

    return PLACE.sub(put, text)


def fill(page: Path, kind: str, made: Callable[[str], str]) -> None:
    """Write a page anew with its places of a kind filled."""
    page.write_text(filled(page.read_text(encoding="utf-8"), kind, made), encoding="utf-8")
