"""`task=error`, `task=synthetic`: errors of a method's keys, values and attention outputs.

`task=error` goes stage by stage through a model's states; all tokens of a window are quantized, in the blocks of the
residual. `task=synthetic` draws keys, by the norm of sinks and the magnitude of outlier channels: OScaR (arXiv
2605.19660), section 4, claims that scaling without rotation creates outliers and that both together help.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq import diagnostics
from kvq.codecs import Codec, rope_table
from kvq.config.diagnostics import Arms, ErrorConfig, SyntheticConfig
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.tasks import measurement
from kvq.tasks.measurement import Baseline, LayerStates, Measurement, Task

QUANTITIES = ("rel_mse", "cosine", "weight_kl", "output_error")
_UNITS = {"*_weight_kl": "nats/query", "windows": "windows", "context": "tokens"}


def bins_of(tokens: int, count: int) -> list[tuple[int, int]]:
    """`count` ranges of positions of equal length up to rounding, without empty ones."""
    edges = [tokens * index // count for index in range(count + 1)]
    return [(start, end) for start, end in itertools.pairwise(edges) if end > start]


def reconstructions(
    method: Method, layer: LayerStates, subsets: bool
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """States decoded by each choice of stages, of keys also quantized before RoPE; then both sides by all stages.

    Cases with decoded states by side: which `side` is quantized (`key`, `value`, `both`), by which stages (`arm`),
    before or after RoPE (`rope`), and whether these are all (`complete`).
    """
    found: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
    sinks = min(method.sink_tokens, layer.key.shape[2])
    for side in ("key", "value"):
        codec: Codec | None = method.codec(side, layer.index, layer.count)
        if codec is None:
            continue
        block, x = measurement.block_of(getattr(method.residual, side), codec), getattr(layer, side)
        tried = [(arm, arm.codec, "after") for arm in diagnostics.arms(codec, subsets)]
        if side == "key" and layer.rope is not None and not codec.uses_rope:
            before = [(arm, diagnostics.before_rope(arm.codec)) for arm, _, _ in tried]
            tried += [(arm, own, "before") for arm, own in before if own is not None]
        for arm, chain, rope in tried:
            case = {"side": side, "arm": arm.name, "rope": rope, "complete": arm.complete}
            found.append((case, {side: diagnostics.reconstruct(chain, x, block, layer.rope, sinks)}))
    if found:
        whole = {side: x for case, own in reversed(found) if case["complete"] for side, x in own.items()}
        found.append(({"side": "both", "arm": "complete", "rope": "after", "complete": True}, whole))
    return found


def errors_of(method: Method, task: ErrorConfig, layer: LayerStates) -> Iterator[dict[str, Any]]:
    """Rows of one layer of one window: one per case and head (`kind` error), per complete case (`kind` positions)."""
    found, bins = reconstructions(method, layer, task.arms is Arms.subsets), tuple(bins_of(task.context, task.bins))
    pairs = [(own.get("key"), own.get("value")) for _, own in found]
    attended = diagnostics.attention_errors(layer.attention, layer.query, layer.key, layer.value, pairs)
    shared = layer.query.shape[1] // layer.key.shape[1]
    for (case, own), error in zip(found, attended, strict=True):
        parts = {"weight_kl": error.weight_kl, "output_error": error.output}
        parts = {name: part.unflatten(0, (-1, shared)).mean(1) for name, part in parts.items()}
        if (side := case["side"]) != "both":
            x, x_hat = getattr(layer, side), own[side]
            parts = {"rel_mse": diagnostics.relative_mse(x, x_hat), "cosine": diagnostics.cosine(x, x_hat)} | parts
            if case["complete"]:
                by_bin = diagnostics.relative_mse_by_position(x, x_hat, list(bins))
                yield {"kind": "positions", **case, "layer": layer.index, "bins": bins, "rel_mse": by_bin}
        for head in range(layer.key.shape[1]):
            values = {name: float(part[head]) for name, part in parts.items()}
            yield {"kind": "error", **case, "layer": layer.index, "head": head, **values}


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors of `method` on the first windows; a full-precision method has none."""
    task: ErrorConfig = inputs.config.task
    found: list[dict[str, Any]] = []
    if method.is_full_precision:
        windows = len(measurement.windows_of(inputs))
    else:
        windows = measurement.capture_windows(inputs, lambda layer: found.extend(errors_of(method, task, layer)))
    rows = measurement.averaged(found, "kind", "side", "arm", "rope", "complete", "layer", "head", "bins")
    rows.sort(key=lambda row: str(row["kind"]))
    metrics = {"windows": float(windows), "context": float(task.context)}
    for side, quantity in itertools.product(("key", "value", "both"), QUANTITIES):
        if (side, quantity) != ("value", "weight_kl"):
            case: dict[str, Any] = {"kind": "error", "side": side, "complete": True, "rope": "after"}
            metrics |= measurement.mean_metric(f"{side}_{quantity}", rows, quantity, **case)
    return Measurement(metrics, measurement.units_like(metrics, _UNITS), rows)


def imbalanced(
    tokens: int,
    head_dim: int,
    sinks: int,
    lowness: float,
    outlier_channels: int,
    outlier_size: float,
    outlier_spread: float,
    sink_outliers: bool,
    heads: int = 1,
    seed: int = 0,
) -> Float[Tensor, "1 heads tokens head_dim"]:
    """Standard normal tokens, of which the first `sinks` are `lowness` times smaller.

    The same `outlier_channels` of every token have a mean of ±`outlier_size` (signs per channel) in addition to their
    unit deviation; `outlier_spread` is the relative deviation of that size over tokens. With `sink_outliers` the sinks
    have them too and point where other tokens do; without, they have a direction of their own, as OScaR (arXiv
    2605.19660, section 4) describes attention sinks. Norms of other tokens do not depend on `lowness`.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, head_dim, generator=generator)
    channels = torch.stack([torch.randperm(head_dim, generator=generator) for _ in range(heads)])[:, :outlier_channels]
    signs = torch.randint(0, 2, (heads, outlier_channels), generator=generator).float() * 2 - 1
    sizes = 1 + outlier_spread * torch.randn(heads, tokens, outlier_channels, generator=generator)
    if not sink_outliers:
        sizes[:, :sinks] = 0
    channels = channels[:, None].expand_as(sizes)
    x[0] += torch.zeros_like(x[0]).scatter_(2, channels, sizes * signs[:, None] * outlier_size)
    x[:, :, :sinks] /= lowness
    return x


def cell(codec: Codec, task: SyntheticConfig, block: int | None, lowness: float, outliers: float) -> dict[str, float]:
    """Mean relative errors of tokens, sinks, others and neighbours (of 32); `apart`: of the deviation."""
    given = (task.tokens, task.head_dim, task.sinks, lowness, task.outlier_channels, outliers)
    x = imbalanced(*given, task.outlier_spread, task.sink_outliers, task.repeats, task.seed)
    rope = rope_table(task.tokens, task.head_dim) if codec.uses_rope else None
    x_hat = diagnostics.reconstruct(codec, x, block, rope)
    # The mean of all keys adds the same to every logit, which softmax cancels, so errors are relative to the deviation.
    common = x[:, :, task.sinks :].mean(2, keepdim=True)
    error, power, apart = (part.double().square().sum(-1)[0] for part in (x_hat - x, x, x - common))
    first = slice(task.sinks, min(diagnostics.TOKENS_PER_GROUP, task.tokens))
    parts = {"sink": slice(0, task.sinks), "other": slice(task.sinks, None), "neighbour": first}
    out = {"error": float((error / power).mean()), "apart_error": float((error / apart).mean())}
    for name, part in parts.items():
        if x[:, :, part].numel():
            # Normalized per token: in a sum over tokens, the total loss of a low-norm sink would hardly be visible.
            out[f"{name}_error"] = float((error / power)[:, part].mean())
            out[f"{name}_apart_error"] = float((error / apart)[:, part].mean())
    return out


def measure_synthetic(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors of the method's keys on the grid of settings; full precision has none."""
    task: SyntheticConfig = inputs.config.task
    rows: list[dict[str, Any]] = []
    if (key := method.key) is not None:
        for lowness, outliers in itertools.product(task.lowness, task.outliers):
            found = cell(key, task, measurement.block_of(method.residual.key, key), lowness, outliers)
            rows.append({"kind": "plane", "lowness": lowness, "outliers": outliers, **found})
    metrics = {"cells": float(len(task.lowness) * len(task.outliers))}
    for name in ("error", "apart_error", "sink_error", "other_apart_error", "neighbour_apart_error"):
        values = [row[name] for row in rows if name in row]
        if values:
            metrics[f"{name}_mean"], metrics[f"{name}_max"] = sum(values) / len(values), max(values)
    return Measurement(metrics, measurement.units_like(metrics, {"cells": "cells"}), rows)


def check_synthetic(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method that quantizes only values, or a head dim that the method cannot do."""
    task: SyntheticConfig = inputs.config.task
    method.check_needs("task=synthetic", "codecs_alone", "all_at_once", "one_width", "all_tokens")
    if method.key is None and not method.is_full_precision:
        raise Unsupported(f"task=synthetic: {method.name} leaves keys in full precision")
    if method.key is not None:
        method.key.check(task.head_dim)


def check_error(inputs: Inputs, method: Method) -> None:
    """As `check_capture`; also raise `Unsupported` for a calibrated method, whose tables fit only all of its stages."""
    measurement.check_capture(inputs, method, ("uncalibrated",))


TASKS = {
    "error": Task(check_error, measure),
    "synthetic": Task(check_synthetic, measure_synthetic, lambda _: "made-up keys"),  # settings name the tensors
}
