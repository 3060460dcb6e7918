"""`task=limit`: the least loss that per-token Gaussian coding of keys and values can have at given bits.

Reverse water-filling over the components of all layers and sides, which are independent, with variances λ in
nats: noise of relative size d costs λ d / 2. At a level θ those above it get (1/2) log2(λ / θ) bits. It is the limit of
coding one token of one side at a time with normal states and second-order loss; states are not normal, and tokens, keys
with values, and layers can be coded together. Source: Cover and Thomas, Elements of Information Theory, section 10.3.3.
Keys are taken before RoPE. Spectra and gradients are those of the windows that are scored, so the limit knows the text:
a method is calibrated on another. A method with a `FisherTransform` also has its predicted loss, on its own calibration
text and on this one, and the part of it of directions without bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.calibration.budget import BOTH, joint_parts, moments_of, predicted
from kvq.calibration.collect import Kept
from kvq.codecs import FisherTransform, JointMoments
from kvq.config.method import CalibrationConfig
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.tasks.measurement import Baseline, Measurement, Task, units_like, windows_of
from kvq_lab.settings import LimitConfig, LimitHeads

SIDES = ("key", "value")
Place = tuple[str, int]
"""A side and a layer."""


def spectrum_of(moments: JointMoments, transform: FisherTransform) -> Float[Tensor, " components"]:
    """Eigenvalues λ of one layer's keys or values, descending, in fp64: losing a component costs λ/2 nats per token."""
    return transform.fit_joint(moments)["spectrum"][0].double()


def rate_at(spectrum: Float[Tensor, " components"], level: float) -> float:
    """Mean bits per component at a level θ: the mean of max(0, (1/2) log2(λ/θ))."""
    return float((spectrum / level).log2().clamp_min(0).mean() / 2)


def loss_at(spectrum: Float[Tensor, " components"], level: float) -> float:
    """Loss in nats per token at a level θ: (1/2) Σ min(λ, θ)."""
    return float(spectrum.clamp_max(level).sum() / 2)


def level_at_rate(spectrum: Float[Tensor, " components"], bits: float) -> float:
    """The level at which components have `bits` on average, by bisection from 2^-64 of the largest λ to the largest."""
    high = float(spectrum.max())
    low = high * 2.0**-64
    for _ in range(200):  # of a bisection
        middle = (low * high) ** 0.5
        low, high = (middle, high) if rate_at(spectrum, middle) > bits else (low, middle)
    return high


CURVE = [bits / 4 for bits in range(1, 33)]
"""Bits of the curve."""

_kept: Kept[dict[Place, JointMoments]] = {}
"""Moments of the scored text, which the forms and bits of a sweep share; those of calibrations are kept apart."""

_SHOWN = 64
"""Components whose λ a record has, of a side of a layer."""


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method that has no spectrum."""
    inputs.check_context()
    if method.is_full_precision:
        return
    if method.joins_sides != (inputs.config.task.heads is LimitHeads.both):
        raise Unsupported("task.heads=both: the limit alone, or a method that stores values with keys; and only so")
    if any(joint_parts(getattr(method, side)) is None for side in _stored_sides(method)):
        raise Unsupported(f"task=limit: method={method.name} has no spectrum; fp16, or a method with FisherTransforms")


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """The limit at `task.rates`, its curve, and the spectrum of each layer and side."""
    task: LimitConfig = inputs.config.task
    windows, both = torch.stack(windows_of(inputs)), task.heads is LimitHeads.both
    moments, _ = moments_of(inputs.model, windows, CalibrationConfig(), (task.left_out, True, both), _kept)
    transform = FisherTransform(heads_together=1 if task.heads is LimitHeads.apart else None, ridge=task.ridge)
    spectra = {place: spectrum_of(values, transform) for place, values in moments.items()}
    whole = torch.cat(list(spectra.values()))
    metrics = {"windows": float(len(windows))}
    metrics |= {f"limit_loss_{rate:g}": loss_at(whole, level_at_rate(whole, rate)) for rate in task.rates}
    layers = 1 + max(layer for _, layer in spectra)
    if not method.is_full_precision:
        metrics |= _predict_losses(method, layers, moments)
    rows: list[dict[str, Any]] = []
    for rate in CURVE:
        level = level_at_rate(whole, rate)
        rows.append({"kind": "curve", "bits": rate, "level": level, "loss": loss_at(whole, level)})
    levels = {rate: level_at_rate(whole, rate) for rate in task.rates}
    for (side, layer), values in spectra.items():
        bits = {f"{rate:g}": rate_at(values, level) for rate, level in levels.items()}
        rows.append({"kind": "layer", "side": side, "layer": layer, "bits": bits, "spectrum": _sample_spectrum(values)})
    return Measurement(metrics, units_like(metrics, {"windows": "windows", "*_loss*": "nats/token"}), rows)


def _sample_spectrum(spectrum: Tensor) -> list[list[float]]:
    """Pairs of rank, from 0, and λ for up to `_SHOWN` evenly spaced components, the first and the last among them."""
    ranks = torch.linspace(0, len(spectrum) - 1, min(_SHOWN, len(spectrum))).round().long()
    return [[float(rank), float(spectrum[rank])] for rank in ranks]


def _stored_sides(method: Method) -> Sequence[str]:
    """The sides whose codecs store something."""
    return SIDES[:1] if method.joins_sides else SIDES


def _predict_losses(method: Method, layers: int, moments: Mapping[Place, JointMoments]) -> dict[str, float]:
    """Second-order loss of the method's widths in nats per token, and the part of it by components without bits.

    `predicted_loss`, `unseen_loss`: on the method's own calibration text; `..._here`: on the text of the moments, where
    directions that the calibration has not seen have no bits either. Rounding is that of components of deviation 1.
    """
    metrics = dict.fromkeys(("predicted_loss", "unseen_loss", "predicted_loss_here", "unseen_loss_here"), 0.0)
    for side, layer in product(_stored_sides(method), range(layers)):
        parts = joint_parts(method.codec(side, layer, layers))
        if parts is None:
            continue
        _, transform, quantizer = parts
        spectrum, widths = (quantizer.tables[name] for name in ("weights", "widths"))
        metrics["predicted_loss"] += predicted(quantizer, spectrum, widths)
        metrics["unseen_loss"] += float(spectrum[widths == 0].double().sum() / 2)
        here = moments[BOTH if method.joins_sides else side, layer]
        rounded, unseen = second_order_losses(here, transform, torch.tensor(quantizer.errors)[widths.long()])
        metrics["predicted_loss_here"] += rounded + unseen
        metrics["unseen_loss_here"] += unseen
    return metrics


def second_order_losses(
    moments: JointMoments, transform: FisherTransform, errors: Float[Tensor, " components"]
) -> tuple[float, float]:
    """Second-order losses on the moments' text: by errors of stored components, and outside their span.

    With y = (x - m) A the stored components and x̂ = y B + m: (1/2) Σ errors_i B_i F B_iᵀ, and (1/2) tr(F E[e eᵀ]) of
    e = (x - m)(1 - A B). A component that is not stored counts in the second.
    """
    n = len(moments.mean)
    eye = torch.eye(n, dtype=torch.float64)
    mean = transform.table("mean", _as_heads(eye, moments.heads))[0]
    stored, _ = transform.forward(_as_heads(eye + mean, moments.heads))
    left = eye - (transform.inverse(stored, {}).transpose(0, 1).flatten(1) - mean)
    away = moments.mean - mean
    spread = left.mT @ (moments.covariance + torch.outer(away, away)) @ left
    back = transform.inverse(_as_heads(eye, moments.heads), {}).transpose(0, 1).flatten(1) - mean
    kept = transform.table("order", stored).shape[1]
    costs = ((back @ moments.fisher) * back).sum(1)[:kept]
    return float((errors[:kept].double() * costs).sum() / 2), float((moments.fisher * spread).sum() / 2)


def _as_heads(rows: Float[Tensor, "tokens n"], heads: int) -> Float[Tensor, "heads tokens dim"]:
    return rows.unflatten(1, (heads, -1)).transpose(0, 1)


TASK = Task(check, measure)
