"""Sweeps made by hand, whose metrics follow from their samples; for tests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvq.results import Record, Store
from kvq.results.statistics import delta_nll_of_samples
from tests.results import made


def losses(mean: float, jitter: float, seed: int, windows: int = 24) -> list[float]:
    """Sums of loss per window: a text that all runs share, plus each run's own mean and noise, in nats per token."""
    text = np.random.default_rng(99).normal(scale=0.3, size=windows)
    own = np.random.default_rng(seed).normal(scale=jitter, size=windows)
    return [float(made.TOKENS * value) for value in 2.5 + text + mean + own]


def put_run(
    store: Store,
    method: str,
    bits: str,
    values: Sequence[float],
    baseline: Record | None,
    effective: float,
    **changes: Any,
) -> Record:
    """Store a run whose metrics follow from its samples, as the task's do."""
    rows = made.samples(values)
    nll = sum(values) / (made.TOKENS * len(values))
    metrics = {"nll": nll, "perplexity": float(np.exp(nll)), "bits_per_element": effective, "effective_bits": effective}
    metrics |= {"windows": float(len(values)), "scored_tokens": float(made.TOKENS * len(values))}
    if baseline is not None:
        found = delta_nll_of_samples(rows, store.samples(baseline.key), block=2, resamples=400)
        metrics |= {
            "delta_nll": found.value,
            "delta_perplexity": metrics["perplexity"] - baseline.metrics["perplexity"],
        }
        metrics |= {"kl_mean": 0.0123, "kl_p99": 0.456, "top1_agreement": 0.98765}
        if found.standard_error is not None:
            metrics["delta_nll_se"] = found.standard_error
    known = {"metrics": metrics, "baseline_key": baseline.key if baseline else None}
    return store.put(made.record(method, bits, **(known | changes)), rows)


def put_more(store: Store, run: Record, more: Mapping[str, float], unit: str = "nats/token") -> Record:
    """Store a run again, with more metrics."""
    changed = {"metrics": run.metrics | dict(more), "units": run.units | dict.fromkeys(more, unit)}
    return store.put(run.model_copy(update=changed), store.samples(run.key))


def sweep(store: Store) -> dict[str, Record]:
    """Full precision, two methods at three widths: 'good' always falls, 'flat' gains nothing from 3 to 4 bits."""
    full = put_run(store, "fp16", "", losses(0.0, 0.0, 0), None, 32.0)
    runs = {"fp16": full}
    for bits, mean in (("2", 0.20), ("3", 0.05), ("4", 0.0)):
        jitter = 0.004 if bits == "4" else 0.01
        runs[f"good {bits}"] = put_run(
            store, "good", bits, losses(mean, jitter, 10 + int(bits)), full, float(bits) + 0.1
        )
    for bits, mean in (("2", 0.50), ("3", 0.30), ("4", 0.30)):
        runs[f"flat {bits}"] = put_run(store, "flat", bits, losses(mean, 0.02, 20 + int(bits)), full, float(bits) + 0.2)
    return runs
