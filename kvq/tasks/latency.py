"""`task=latency`: seconds of a prefill and of a decoded token, by batch and context, with references."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any

from kvq.config import Attention
from kvq.config.speed import LatencyConfig, References, Regime
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.decode_steps import check_decode_steps, decode_metrics
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.prefill_steps import check_steps, step_metrics
from kvq.tasks.regimes import check_regimes
from kvq.tasks.speed import SUBJECT, cells, check_length, fingerprint, median_of, paired_ratios


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Medians for every cell, ratios to the references, and every repeat as a sample."""
    task: LatencyConfig = inputs.config.task
    grid = list(itertools.product(sorted(task.batches), sorted(task.contexts)))
    rows = cells(inputs.config, grid)
    metrics: dict[str, float] = {}
    units: dict[str, str] = {}
    for batch, context in grid:
        here = [row for row in rows if (row["batch"], row["tokens"]) == (batch, context)]
        name = f"b{batch}_t{context}"
        if not all(row["fits"] for row in here if row["subject"] not in set(References)):
            raise Unsupported(f"task.batches={batch} at task.contexts={context}: does not fit the memory of the device")
        for part, field in (("prefill", "prefill_seconds"), ("decode", "step_seconds_median")):
            value = itemgetter(field)
            metrics[f"{part}_{name}"] = median_of(here, SUBJECT, value)
            units[f"{part}_{name}"] = "s"
            for reference, ratio in paired_ratios(here, value).items():
                metrics[f"{part}_over_{reference}_{name}"], units[f"{part}_over_{reference}_{name}"] = ratio, "x"
        for regime in () if method.is_full_precision else task.regimes:
            of_regime, regime_units = _regime(regime, name, here)
            metrics, units = metrics | of_regime, units | regime_units
        for of_steps, step_units in (step_metrics(name, here), decode_metrics(name, here, SUBJECT)):
            metrics, units = metrics | of_steps, units | step_units
        metrics[f"cache_bytes_{name}"], units[f"cache_bytes_{name}"] = float(here[0]["cache_bytes"]), "bytes"
    return Measurement(metrics, units, rows)


def _regime(regime: Regime, cell: str, rows: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of a decoded token in one regime, and its ratio to and overhead over each reference."""
    value = itemgetter("step_seconds_median")
    metrics, units = {f"decode_{regime}_{cell}": median_of(rows, regime, value)}, {f"decode_{regime}_{cell}": "s"}
    for reference, ratio in paired_ratios(rows, value, regime).items():
        metrics[f"decode_{regime}_over_{reference}_{cell}"] = ratio
        units[f"decode_{regime}_over_{reference}_{cell}"] = "x"
        metrics[f"overhead_{regime}_over_{reference}_{cell}"] = 100 * (ratio - 1)
        units[f"overhead_{regime}_over_{reference}_{cell}"] = "%"
    return metrics, units


def check(inputs: Inputs, method: Method) -> None:
    """Raise for contexts that the model does not take, or a method that `cache.attention` cannot serve."""
    task: LatencyConfig = inputs.config.task
    check_length(inputs, f"task.contexts={task.contexts}", max(task.contexts) + task.new_tokens, method)
    check_regimes(method, task.regimes)
    packed = inputs.config.cache.attention is Attention.packed
    if task.prefill_steps and not method.is_full_precision:
        check_steps(method, packed)
    if task.decode_steps and not method.is_full_precision:
        check_decode_steps(method, packed)


TASK = Task(check, measure, fingerprint)
