"""`task=limit`: the least loss that per-token Gaussian coding can have at given bits, from spectra on the task's text.

Reverse water-filling over the components of all layers and sides, which are independent, with variances λ in nats:
noise of relative size d costs λ d / 2. At a level θ those above it get (1/2) log2(λ / θ) bits. It is the limit of
coding one token of one side at a time with normal states and second-order loss; states are not normal, and tokens, keys
with values, and layers can be coded together. Source: Cover and Thomas, Elements of Information Theory, section 10.3.3.

Keys are taken before RoPE. Gradients are those of the windows that are scored, so the limit knows the text: a method is
calibrated on another. A method with a `FisherTransform` also has its predicted loss, from its own calibration.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.calibration.budget import collect_joint, joint_parts, predicted
from kvq.codecs import Codec, FisherTransform, JointMoments
from kvq.config.diagnostics import LimitConfig, LimitHeads
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.capture import fingerprint, windows_of
from kvq.tasks.measurement import Baseline, Measurement, Task, units_like

_STEPS = 200


def spectrum_of(moments: JointMoments, transform: FisherTransform) -> Float[Tensor, " components"]:
    """λ of a side of a layer in nats, descending, in fp64."""
    return transform.fit_joint(moments)["spectrum"][0].double()


def rate_at(spectrum: Float[Tensor, " components"], level: float) -> float:
    """Mean bits of a component at a level θ."""
    return float((spectrum / level).log2().clamp_min(0).mean() / 2)


def loss_at(spectrum: Float[Tensor, " components"], level: float) -> float:
    """Loss in nats per token at a level θ: (1/2) Σ min(λ, θ)."""
    return float(spectrum.clamp_max(level).sum() / 2)


def level_of_rate(spectrum: Float[Tensor, " components"], bits: float) -> float:
    """The level at which components have `bits` on average, by bisection from 2^-64 of the largest λ to the largest."""
    high = float(spectrum.max())
    low = high * 2.0**-64
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if rate_at(spectrum, middle) > bits else (low, middle)
    return high


SIDES = ("key", "value")
CURVE = [bits / 4 for bits in range(1, 33)]
"""Bits of the curve."""
_KEPT = 64
"""Components whose λ a record has, of a side of a layer."""


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method without a spectrum."""
    inputs.check_context(inputs.config.task.context)
    if not method.is_full_precision and any(joint_parts(getattr(method, side)) is None for side in SIDES):
        raise Unsupported(f"task=limit: method={method.name} has no spectrum; fp16, or a method with FisherTransforms")


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """The limit at `task.rates`, its curve, and the spectrum of each layer and side."""
    task: LimitConfig = inputs.config.task
    windows = windows_of(inputs)
    moments = collect_joint(inputs.model, torch.stack(windows), left_out=task.left_out)
    transform = FisherTransform(heads_together=None if task.heads is LimitHeads.joint else 1, ridge=task.ridge)
    spectra = {place: spectrum_of(own, transform) for place, own in moments.items()}
    whole = torch.cat(list(spectra.values()))
    metrics = {"windows": float(len(windows))}
    metrics |= {f"limit_loss_{rate:g}": loss_at(whole, level_of_rate(whole, rate)) for rate in task.rates}
    layers = 1 + max(layer for _, layer in spectra)
    if not method.is_full_precision:
        metrics["predicted_loss"] = _predicted(method, layers)
    rows: list[dict[str, Any]] = []
    for rate in CURVE:
        level = level_of_rate(whole, rate)
        rows.append({"kind": "curve", "bits": rate, "level": level, "loss": loss_at(whole, level)})
    levels = {rate: level_of_rate(whole, rate) for rate in task.rates}
    for side, layer in product(SIDES, range(layers)):
        own = spectra[side, layer]
        bits = {f"{rate:g}": rate_at(own, level) for rate, level in levels.items()}
        rows.append({"kind": "layer", "side": side, "layer": layer, "bits": bits, "spectrum": _thinned(own)})
    return Measurement(metrics, units_like(metrics, {"windows": "windows", "*_loss*": "nats/token"}), rows)


def _thinned(spectrum: Tensor) -> list[list[float]]:
    """Rank, from 0, and λ of evenly spread components, the largest and the smallest among them."""
    ranks = torch.linspace(0, len(spectrum) - 1, min(_KEPT, len(spectrum))).round().long()
    return [[float(rank), float(spectrum[rank])] for rank in ranks]


def _predicted(method: Method, layers: int) -> float:
    """Second-order loss of the method's widths on its own calibration text."""
    total = 0.0
    for side, layer in product(SIDES, range(layers)):
        codec: Codec | None = method.codec(side, layer, layers)
        parts = joint_parts(codec)
        if parts is not None:
            tables = parts[2].tables
            total += predicted(parts[2], tables["weights"], tables["widths"])
    return total


TASK = Task(check, measure, fingerprint)
