"""`task=latency`: seconds of a prefill and of a decoded token, by batch and context, with references."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from kvq.config import Attention
from kvq.config.speed import LatencyConfig, References, Regime
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.regimes import check_regimes
from kvq.tasks.speed import SUBJECT, cells, check_length, fingerprint, mean_of, median_of, paired_ratios
from kvq.tasks.steps import check_decode_steps, check_steps, decode_metrics, step_metrics

Row = dict[str, Any]
"""One repeat of a subject, as `kvq.tasks.speed.cell` gives it."""
Times = tuple[dict[str, float], dict[str, str]]
"""Metrics and their units."""


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Medians and means for every cell, ratios to the references, and every repeat as a sample."""
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
        prefill, step = itemgetter("prefill_seconds"), itemgetter("step_seconds_median")
        of_cell = [_times("prefill", name, here, SUBJECT, prefill, prefill)]
        of_cell.append(_times("decode", name, here, SUBJECT, step, partial(_mean_step, task.new_tokens)))
        for regime in () if method.is_full_precision else task.regimes:
            of_cell += [_regime(regime, name, here, task.new_tokens)]
        for found, their_units in (*of_cell, step_metrics(name, here), decode_metrics(name, here, SUBJECT)):
            metrics, units = metrics | found, units | their_units
        metrics[f"cache_bytes_{name}"], units[f"cache_bytes_{name}"] = float(here[0]["cache_bytes"]), "bytes"
    return Measurement(metrics, units, rows)


def _mean_step(new_tokens: int, row: Row) -> float:
    return float(row["decode_seconds"]) / new_tokens


def _times(
    part: str, cell: str, rows: list[Row], subject: str, middle: Callable[[Row], float], mean: Callable[[Row], float]
) -> Times:
    """Seconds of a part and their ratio to each reference: medians, and as `<part>_mean` means over repeats.

    A median step has no flush of a residual in it, of which there is one in `residual.size` steps; the mean has them.
    """
    metrics = {f"{part}_{cell}": median_of(rows, subject, middle), f"{part}_mean_{cell}": mean_of(rows, subject, mean)}
    units = dict.fromkeys(metrics, "s")
    for reference, ratio in paired_ratios(rows, middle, subject).items():
        of_means = metrics[f"{part}_mean_{cell}"] / mean_of(rows, reference, mean)
        found = {f"{part}_over_{reference}_{cell}": ratio, f"{part}_mean_over_{reference}_{cell}": of_means}
        metrics, units = metrics | found, units | dict.fromkeys(found, "x")
    return metrics, units


def _regime(regime: Regime, cell: str, rows: list[Row], new_tokens: int) -> Times:
    """As `_times` of a decoded token in one regime, and its overhead over each reference."""
    step, part = itemgetter("step_seconds_median"), f"decode_{regime}"
    metrics, units = _times(part, cell, rows, regime, step, partial(_mean_step, new_tokens))
    for name, ratio in list(metrics.items()):
        if name.startswith(f"{part}_over_"):
            overhead = f"overhead_{name.removeprefix('decode_')}"
            metrics[overhead], units[overhead] = 100 * (ratio - 1), "%"
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
