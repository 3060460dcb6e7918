"""A hook of mkdocs: a link out of docs/ leads nowhere on the site, so the path in the repository replaces it."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page, with links out of docs/ as paths."""
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
