"""`task=error`, `task=synthetic`: errors of a method's keys, values and attention outputs.

`task=error` goes stage by stage through the states of a model. All tokens of a window are quantized, in the blocks of
the method's residual; none stays in full precision. `task=synthetic` draws keys, by the norm of sinks and the magnitude
of outlier channels, and reads no model: OScaR (arXiv 2605.19660), section 4, claims that scaling without rotation
creates outliers and that both together help.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, rope_table
from kvq.config.diagnostics import Arms, ErrorConfig, SyntheticConfig
from kvq.diagnostics import (
    TOKENS_PER_GROUP,
    Arm,
    arms,
    attention_errors,
    before_rope,
    cosine,
    reconstruct,
    relative_mse,
    relative_mse_by_position,
)
from kvq.errors import ConfigError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.tasks.capture import LayerStates, block_of, capture_windows, check, windows_of
from kvq.tasks.measurement import Baseline, Measurement, Task, mean_metric, units_like

QUANTITIES = ("rel_mse", "cosine", "weight_kl", "output_error")
_UNITS = {"*_weight_kl": "nats/query", "windows": "windows", "context": "tokens"}


@dataclass(frozen=True)
class Case:
    """Which side is quantized (`key`, `value`, `both`), by which stages (`arm`), before or after RoPE (`rope`)."""

    side: str
    arm: str
    rope: str
    complete: bool


@dataclass(frozen=True)
class Reconstruction:
    """A case with its decoded keys and values; None: the original ones are used."""

    case: Case
    key: Tensor | None
    value: Tensor | None


def bins_of(tokens: int, count: int) -> list[tuple[int, int]]:
    """`count` ranges of positions of equal length up to rounding, without empty ones."""
    edges = [tokens * index // count for index in range(count + 1)]
    return [(start, end) for start, end in itertools.pairwise(edges) if end > start]


class ErrorSums:
    """Sums over windows: per case, layer and KV head, and per case, layer and bin of positions."""

    def __init__(self, method: Method, task: ErrorConfig) -> None:
        self.method, self.task = method, task
        self.bins = bins_of(task.context, task.bins)
        self._sums: dict[tuple[Case, int], Tensor] = {}
        self._positions: dict[tuple[Case, int], list[list[float]]] = defaultdict(list)
        self._windows: dict[int, int] = defaultdict(int)

    def add(self, layer: LayerStates) -> None:
        """Add the errors of every case for one layer of one window."""
        found = [*self._side(layer, "key"), *self._side(layer, "value")]
        complete = [each for each in found if each.case.complete]
        if found:
            key = next((each.key for each in complete if each.case.side == "key"), None)
            value = next((each.value for each in complete if each.case.side == "value"), None)
            found.append(Reconstruction(Case("both", "complete", "after", True), key, value))
        attended = attention_errors(
            layer.attention, layer.query, layer.key, layer.value, [(each.key, each.value) for each in found]
        )
        shared = layer.query.shape[1] // layer.key.shape[1]
        for each, error in zip(found, attended, strict=True):
            kl, output = (part.unflatten(0, (-1, shared)).mean(1) for part in (error.weight_kl, error.output))
            errors = torch.zeros(4, layer.key.shape[1], dtype=torch.float64)
            errors[2], errors[3] = kl, output
            if each.case.side != "both":
                x = getattr(layer, each.case.side)
                x_hat = getattr(each, each.case.side)
                errors[0], errors[1] = relative_mse(x, x_hat), cosine(x, x_hat)
                if each.case.complete:
                    bins = relative_mse_by_position(x, x_hat, self.bins)
                    self._positions[each.case, layer.index].append(bins)
            name = (each.case, layer.index)
            self._sums[name] = self._sums[name] + errors if name in self._sums else errors
        self._windows[layer.index] += 1

    def _side(self, layer: LayerStates, side: str) -> list[Reconstruction]:
        """One side's states, decoded by each choice of stages; of keys also quantized before RoPE."""
        codec: Codec | None = self.method.codec_of(side, layer.index)
        if codec is None:
            return []
        block = block_of(getattr(self.method.residual, side))
        x = getattr(layer, side)
        tried: list[tuple[Arm, Codec, str]] = [
            (arm, arm.codec, "after") for arm in arms(codec, self.task.arms is Arms.subsets)
        ]
        if side == "key" and layer.rope is not None and not codec.uses_rope:
            tried += [(arm, own, "before") for arm, _, _ in tried if (own := before_rope(arm.codec)) is not None]
        out = []
        for arm, chain, rope in tried:
            x_hat = reconstruct(chain, x, block, layer.rope)
            case = Case(side, arm.name, rope, arm.complete)
            out.append(Reconstruction(case, x_hat if side == "key" else None, x_hat if side == "value" else None))
        return out

    def samples(self) -> list[dict[str, Any]]:
        """One row per case, layer and head (`kind` error), and per complete case and layer (`kind` positions)."""
        rows: list[dict[str, Any]] = []
        for (case, layer), sums in self._sums.items():
            means = sums / self._windows[layer]
            for head in range(means.shape[1]):
                values = dict(zip(QUANTITIES, means[:, head].tolist(), strict=True))
                if case.side == "both":
                    del values["rel_mse"], values["cosine"]
                rows.append({"kind": "error", **vars(case), "layer": layer, "head": head, **values})
        for (case, layer), found in self._positions.items():
            means = torch.tensor(found, dtype=torch.float64).mean(0)
            rows.append(
                {"kind": "positions", **vars(case), "layer": layer, "bins": self.bins, "rel_mse": means.tolist()}
            )
        return rows


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors of `method` on the first windows; a full-precision method has none."""
    task: ErrorConfig = inputs.config.task
    errors = ErrorSums(method, task)
    windows = len(windows_of(inputs)) if method.is_full_precision else capture_windows(inputs, errors.add)
    rows = errors.samples()
    metrics = {"windows": float(windows), "context": float(task.context)}
    for side, quantity in itertools.product(("key", "value", "both"), QUANTITIES):
        if (side, quantity) != ("value", "weight_kl"):
            case: dict[str, Any] = {"kind": "error", "side": side, "complete": True, "rope": "after"}
            metrics |= mean_metric(f"{side}_{quantity}", rows, quantity, **case)
    return Measurement(metrics, units_like(metrics, _UNITS), rows)


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
    have these outliers too, so they point in the direction of the other tokens; without, they have a direction of their
    own, as OScaR (arXiv 2605.19660, section 4) describes attention sinks. Norms of other tokens do not depend on
    `lowness`.
    """
    if not 0 <= sinks <= tokens or not 0 <= outlier_channels <= head_dim:
        raise ConfigError(
            f"task.sinks={sinks}, task.outlier_channels={outlier_channels}: at most task.tokens={tokens} and "
            f"task.head_dim={head_dim}"
        )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, head_dim, generator=generator)
    channels = torch.stack([torch.randperm(head_dim, generator=generator) for _ in range(heads)])[:, :outlier_channels]
    signs = torch.randint(0, 2, (heads, outlier_channels), generator=generator).float() * 2 - 1
    sizes = 1 + outlier_spread * torch.randn(heads, tokens, outlier_channels, generator=generator)
    if not sink_outliers:
        sizes[:, :sinks] = 0
    x[0] += torch.zeros_like(x[0]).scatter_(
        2, channels[:, None].expand_as(sizes), sizes * signs[:, None] * outlier_size
    )
    x[:, :, :sinks] /= lowness
    return x


def cell(codec: Codec, task: SyntheticConfig, block: int | None, lowness: float, outliers: float) -> dict[str, float]:
    """Relative squared errors of all tokens, sinks, others, and the sinks' neighbours, each a mean over tokens.

    `apart`: relative to the token minus the mean of all others, instead of the token itself. Neighbours: the other
    tokens among the first 32, which is OScaR's and KIVI's group.
    """
    x = imbalanced(
        task.tokens,
        task.head_dim,
        task.sinks,
        lowness,
        task.outlier_channels,
        outliers,
        task.outlier_spread,
        task.sink_outliers,
        task.repeats,
        task.seed,
    )
    rope = rope_table(task.tokens, task.head_dim) if codec.uses_rope else None
    x_hat = reconstruct(codec, x, block, rope)
    # The mean of all keys adds the same to every logit, which softmax cancels, so errors are relative to the deviation.
    common = x[:, :, task.sinks :].mean(2, keepdim=True)
    error, power, apart = (part.double().square().sum(-1)[0] for part in (x_hat - x, x, x - common))
    first = slice(task.sinks, min(TOKENS_PER_GROUP, task.tokens))
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
    if method.key is not None:
        block = block_of(method.residual.key)
        for lowness in task.lowness:
            for outliers in task.outliers:
                found = cell(method.key, task, block, lowness, outliers)
                rows.append({"kind": "plane", "lowness": lowness, "outliers": outliers, **found})
    metrics = {"cells": float(len(task.lowness) * len(task.outliers))}
    for name in ("error", "apart_error", "sink_error", "other_apart_error", "neighbour_apart_error"):
        values = [row[name] for row in rows if name in row]
        if values:
            metrics[f"{name}_mean"], metrics[f"{name}_max"] = sum(values) / len(values), max(values)
    return Measurement(metrics, units_like(metrics, {"cells": "cells"}), rows)


def check_synthetic(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method that quantizes only values, or a head dim that the method cannot do."""
    task: SyntheticConfig = inputs.config.task
    method.check_needs("task=synthetic", "codecs_alone", "all_at_once", "one_width", "all_tokens")
    if method.key is None and not method.is_full_precision:
        raise Unsupported(f"task=synthetic: {method.name} leaves keys in full precision")
    if method.key is not None:
        method.key.check(task.head_dim)


def check_error(inputs: Inputs, method: Method) -> None:
    """As `check`; also raise `Unsupported` for a calibrated method, whose tables fit only all of its stages."""
    check(inputs, method)
    method.check_needs("task=error", "uncalibrated")


TASKS = {
    "error": Task(check_error, measure),
    "synthetic": Task(check_synthetic, measure_synthetic, lambda _: "made-up keys"),  # settings name the tensors
}
