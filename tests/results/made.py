"""Records made by hand, for tests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvq.results import Provenance, Record, run_key

TOKENS = 100
TASK = {"name": "ppl", "windows": "sliding", "context": 2048, "bootstrap": {"block": 2, "resamples": 400, "seed": 0}}


def provenance(**changes: Any) -> Provenance:
    known: dict[str, Any] = {
        "git_commit": None,
        "git_dirty": None,
        "packages": {"torch": "2.13.0"},
        "python": "3.12.1",
        "platform": "Linux",
        "cpu": "a processor",
        "device": "cpu",
        "threads": 2,
        "dtype": "float32",
        "dataset_fingerprint": "d" * 64,
        "model_fingerprint": "m" * 64,
        "command": "run.py method=kivi",
        "started": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "wall_seconds": {"load": 0.5, "measure": 2.25},
        "peak_memory_bytes": 2**28,
        "seed": 0,
    }
    return Provenance(**(known | changes))


def config(method: str, bits: str, task: Mapping[str, Any] = TASK, **changes: Any) -> dict[str, Any]:
    return {
        "task": dict(task),
        "model": {"path": "embedded:tiny"},
        "dataset": {"split": None},
        "method": {"key": {"quantizer": {"_target_": method, "bits": bits}}},
        "seed": 0,
    } | changes


def record(method: str, bits: str = "", *, settings: Mapping[str, Any] | None = None, **changes: Any) -> Record:
    made = dict(settings) if settings is not None else config(method, bits)
    known: dict[str, Any] = {
        "key": run_key(made),
        "status": "done",
        "task": "ppl",
        "model": "tiny",
        "dataset": "pydocs",
        "method": method,
        "bits": bits,
        "config": made,
        "versions": {"ppl": 1},
        "provenance": provenance(),
    }
    return Record(**(known | changes))


def samples(losses: Sequence[float]) -> list[dict[str, Any]]:
    return [{"window": i, "tokens": TOKENS, "nll": x, "kl": 0.0, "top1": TOKENS} for i, x in enumerate(losses)]
