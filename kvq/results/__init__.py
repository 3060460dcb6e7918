"""Records of runs: their schema, the folder that keeps them, their provenance, and statistics of their numbers."""

from kvq.results.record import Provenance, Record, canonical, is_stale, run_key
from kvq.results.store import Broken, Store

__all__ = ["Broken", "Provenance", "Record", "Store", "canonical", "is_stale", "run_key"]
