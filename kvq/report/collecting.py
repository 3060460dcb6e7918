"""Garbage collection of commands that make one thing and end."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Search for reference cycles seldom: at Python's own thresholds that takes a tenth of a report's time."""
    gc.set_threshold(100_000, 20, 20)
