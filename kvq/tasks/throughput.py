"""`task=throughput`: tokens per second for batches of requests of a fixed length, with references."""

from __future__ import annotations

from typing import Any

from kvq.config.speed import ThroughputConfig
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.speed import SUBJECT, cells, check_length, fingerprint, median_of, paired_ratios


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Generated tokens per second for every batch, and every repeat as a sample.

    Raises:
        Unsupported: not even the smallest batch fits the memory of the device.
    """
    task: ThroughputConfig = inputs.config.task
    rows = cells(inputs.config, [(batch, task.prompt) for batch in sorted(task.batches)], growing=True)
    metrics = metrics_of(rows, task.new_tokens)
    return Measurement(metrics, {name: _unit(name) for name in metrics}, rows)


def metrics_of(rows: list[dict[str, Any]], new_tokens: int) -> dict[str, float]:
    """Rates and ratios of every batch that fits, and of the largest ones.

    `tokens_per_second` is over prefill and decoding, `decode_tokens_per_second` over decoding alone. `largest_batch` is
    the largest of `task.batches` that fits. `over_<reference>_largest` and `largest_batch_over_<reference>` compare
    each at its own largest batch; they exist only where a larger batch did not fit the reference, else its largest
    batch would not be known.

    Raises:
        Unsupported: nothing fits.
    """

    def rate(row: dict[str, Any]) -> float:
        return row["batch"] * new_tokens / (row["prefill_seconds"] + row["decode_seconds"])

    def decoding(row: dict[str, Any]) -> float:
        return row["batch"] * new_tokens / row["decode_seconds"]

    metrics: dict[str, float] = {}
    rates: dict[str, dict[int, float]] = {}
    for batch in sorted({row["batch"] for row in rows if row["subject"] == SUBJECT and row["fits"]}):
        here = [row for row in rows if row["batch"] == batch]
        for subject in dict.fromkeys(row["subject"] for row in here if row["fits"]):
            rates.setdefault(subject, {})[batch] = median_of(here, subject, rate)
        metrics[f"tokens_per_second_b{batch}"] = rates[SUBJECT][batch]
        metrics[f"decode_tokens_per_second_b{batch}"] = median_of(here, SUBJECT, decoding)
        for reference, ratio in paired_ratios(here, rate).items():
            metrics[f"over_{reference}_b{batch}"] = ratio
        metrics[f"cache_bytes_b{batch}"] = float(next(row for row in here if row["subject"] == SUBJECT)["cache_bytes"])
    if SUBJECT not in rates:
        raise Unsupported(f"task.batches={rows[0]['batch']}: does not fit the memory of the device")
    mine = max(rates[SUBJECT])
    metrics["largest_batch"] = float(mine)
    for reference in sorted({row["subject"] for row in rows if not row["fits"]} & rates.keys() - {SUBJECT}):
        theirs = max(rates[reference])
        metrics[f"largest_batch_over_{reference}"] = mine / theirs
        metrics[f"over_{reference}_largest"] = rates[SUBJECT][mine] / rates[reference][theirs]
    return metrics


def _unit(metric: str) -> str:
    begins = {"tokens": "tokens/s", "decode": "tokens/s", "cache": "bytes", "over": "x"}
    return {"largest_batch": "requests"}.get(metric) or begins.get(metric.partition("_")[0], "x")


def check(inputs: Inputs, method: Method) -> None:
    """Raise for requests that the model does not take, or a method that `cache.attention` cannot serve."""
    task: ThroughputConfig = inputs.config.task
    check_length(inputs, f"task.prompt={task.prompt}", task.prompt + task.new_tokens, method)


TASK = Task(check, measure, fingerprint)
