"""How many examples a property is tried on: all with `KVQ_ALL=1` (`make test-all`), else a quarter of them."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """`max_examples` of a property that is to hold on `number` of them."""
    return number if os.environ.get("KVQ_ALL") == "1" else max(2, number // 4)
