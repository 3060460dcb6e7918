"""Records of runs: their schema, the folder that keeps them, where they came from and what their numbers are worth.

`kvq.results.provenance` is imported by its own name: it needs torch, and reading records does not.
"""

from kvq.results.record import Provenance, Record, canonical, run_key
from kvq.results.source import is_stale, judge, source_hash
from kvq.results.store import Broken, Store

__all__ = ["Broken", "Provenance", "Record", "Store", "canonical", "is_stale", "judge", "run_key", "source_hash"]
