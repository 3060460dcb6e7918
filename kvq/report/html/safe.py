"""Escaping for the page: text of records never becomes markup, script or a link."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from markupsafe import Markup

from kvq.report.escapes import one_line

ARXIV = re.compile(r"\d{4}\.\d{4,5}\Z")
# Inside a script element these could end it or begin another; in JSON their escapes mean the same.
_MARKUP = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def script_json(value: Any) -> Markup:
    """`value` as JSON that is safe between `<script type="application/json">` and its end, in ASCII.

    Raises:
        ValueError: a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_MARKUP))


def shown(text: str, longest: int = 300) -> str:
    """`text` on one line without control characters or marks that change the direction of writing, cut to `longest`."""
    line = one_line(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def arxiv_link(identifier: object) -> str | None:
    """Address of a paper; None for anything that is not an arXiv number."""
    found = isinstance(identifier, str) and ARXIV.match(identifier)
    return f"https://arxiv.org/abs/{identifier}" if found else None


def source_digest(text: str) -> str:
    """What a content security policy calls an inline script or style, by its SHA-256."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def png_uri(content: bytes) -> str | None:
    """A PNG as a data address; None for anything else."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
