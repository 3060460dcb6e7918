"""`task=synthetic`: a method's error on synthetic keys, by the norm of sinks and the magnitude of outlier channels.

OScaR (arXiv 2605.19660), section 4, claims that scaling without rotation creates outliers and that both together help.
No model is read.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, rope_table
from kvq.config.diagnostics import SyntheticConfig
from kvq.diagnostics.fidelity import reconstruct
from kvq.diagnostics.norms import TOKENS_PER_GROUP
from kvq.errors import ConfigError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.capture import block_of
from kvq.tasks.measurement import Baseline, Measurement, Task, units_like
from kvq.tasks.scoring import check_codecs_alone, check_layers_alike


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

    Raises:
        ConfigError: more sinks than tokens or more outlier channels than channels.
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


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
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


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method of values alone, or a head dim that the method cannot do."""
    task: SyntheticConfig = inputs.config.task
    check_codecs_alone(method, task.name)
    if method.by_layer:
        check_layers_alike(method, task.name)
    if method.key is None and not method.is_full_precision:
        raise Unsupported(f"task=synthetic: {method.name} leaves keys in full precision")
    if method.key is not None:
        method.key.check(task.head_dim)


def fingerprint(_inputs: Inputs) -> str:
    """No text: the settings name the tensors."""
    return "made-up keys"


TASK = Task(check, measure, fingerprint)
