"""How many examples the fuzzers try: few in the quick tests, all with `KVQ_ALL=1` (`make test-all`).

`KVQ_FUZZ=1000` gives all of them without the other long tests (`500`: half of them), `KVQ_FUZZ_SEED=7` other ones.
Examples come in pieces, each with a seed of its own, so that several processes share them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

SLOWEST_SECONDS = 120.0
"""An example that takes longer is a failure: nothing here has that much to do."""


def pieces(full: int, quick: int, most: int) -> list[tuple[int, int]]:
    """Seed and number of examples of each piece, of at most `most` examples, of `full` or `quick` in all."""
    thousandths = os.environ.get("KVQ_FUZZ") or ("1000" if os.environ.get("KVQ_ALL") == "1" else "")
    count = full * int(thousandths) // 1000 if thousandths else quick
    return list(_shared_out(count, most, int(os.environ.get("KVQ_FUZZ_SEED", "0"))))


def _shared_out(count: int, most: int, seed: int) -> Iterator[tuple[int, int]]:
    while count > 0:
        yield seed, min(most, count)
        seed, count = seed + 1, count - most
