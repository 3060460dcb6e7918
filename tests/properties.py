"""How much of a property `make test` tries: a quarter of its examples, and not the slow ones of many presets.

`KVQ_ALL=1` (`make test-all`) tries all examples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest


def examples(number: int) -> int:
    """`max_examples` of a property that is to hold on `number` of them."""
    return number if os.environ.get("KVQ_ALL") == "1" else max(2, number // 4)


def mostly_quick(names: Sequence[str], slow: str | tuple[str, ...]) -> list[Any]:
    """Parameters: those whose name begins with `slow`, or one of them, belong to the long half."""
    return [pytest.param(name, marks=pytest.mark.long) if name.startswith(slow) else name for name in names]
