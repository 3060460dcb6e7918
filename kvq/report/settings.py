"""A run's settings as short text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvq.results import Record

# Settings that are equal for all runs of a table.
PROTOCOL = ("task", "model", "dataset", "seed")


def settings_of(record: Record) -> dict[str, str]:
    """Settings of a run outside its protocol, flat; a setting that keys and values share is named once."""
    flat = dict(flatten({name: value for name, value in record.config.items() if name not in PROTOCOL}))
    merged: dict[str, str] = {}
    for name, value in flat.items():
        other = re.sub(r"(^|\.)(key|value)\.", lambda m: f"{m[1]}{'value' if m[2] == 'key' else 'key'}.", name, count=1)
        shared = re.sub(r"(^|\.)(key|value)\.", r"\1", name, count=1)
        merged[shared if flat.get(other) == value else name] = value
    return merged


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of nested settings as (dotted name, JSON text), in the order of the mapping."""
    if isinstance(value, Mapping):
        return [leaf for name, item in value.items() for leaf in flatten(item, f"{prefix}.{name}" if prefix else name)]
    # A record's mappings are sorted by name, a preset's are not, and a list may hold some.
    plain = isinstance(value, str) and value.strip() == value != ""
    return [(prefix, value if plain else json.dumps(value, sort_keys=True))]
