"""Text to score: the embedded corpora, datasets as token streams, and synthetic retrieval."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq.data.text import TokenData, load_tokens

__all__ = ["TokenData", "load_tokens"]


def __getattr__(name: str) -> Any:
    """Import torch only when something needs it: `kvq.data.rows` does not."""
    if name not in __all__:
        raise AttributeError(f"module 'kvq.data' has no attribute '{name}'")
    return getattr(importlib.import_module("kvq.data.text"), name)
