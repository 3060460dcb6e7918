"""`task=sensitivity`, `task=limit`: what the bits of each layer's keys and values cost, and what they cost at least.

`task=sensitivity` quantizes each side of each layer while all others stay in full precision; then all at once; then
random sets of them, whose cost is compared with the sum of their parts; where asked, each KV head by itself. `kvq
allocate` gives layers bits by these costs.

`task=limit` computes the least loss that per-token Gaussian coding can have at given bits, from spectra on the task's
text. Reverse water-filling over the components of all layers and sides, which are independent, with variances λ in
nats: noise of relative size d costs λ d / 2. At a level θ those above it get (1/2) log2(λ / θ) bits. It is the limit of
coding one token of one side at a time with normal states and second-order loss; states are not normal, and tokens, keys
with values, and layers can be coded together. Source: Cover and Thomas, Elements of Information Theory, section 10.3.3.
Keys are taken before RoPE. Gradients are those of the windows that are scored, so the limit knows the text: a method is
calibrated on another. A method with a `FisherTransform` also has its predicted loss, on its own calibration text and
on this one, and the part of it of directions without bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor

from kvq.calibration.budget import joint_parts, predicted
from kvq.calibration.collect import Kept
from kvq.calibration.moments import BOTH, moments_of
from kvq.codecs import FisherTransform, HeadsCodec, JointMoments, check_single_heads
from kvq.config.diagnostics import LimitConfig, LimitHeads
from kvq.config.method import CalibrationConfig
from kvq.config.tasks import PplConfig, SensitivityConfig, Windows
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.layers import kv_layers_of
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks.capture import windows_of
from kvq.tasks.measurement import Baseline, Measurement, Task, journaled, units_like
from kvq.tasks.ppl import check_scoring, ppl_windows, reference_of, run_ppl, window_texts
from kvq.tasks.scoring import without_codecs

SIDES = ("key", "value")
Place = tuple[str, int]
"""A side and a layer."""


def protocol(task: SensitivityConfig) -> PplConfig:
    """The windows and the scoring, as `task=ppl` has them."""
    return PplConfig(
        windows=Windows.disjoint,
        context=task.context,
        scoring=task.scoring,
        bos=task.bos,
        max_windows=task.windows,
        batch_size=task.batch_size,
    )


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method without a codec for each side of a layer."""
    task: SensitivityConfig = inputs.config.task
    inputs.check_context(task.context)
    if method.joins_sides:
        raise Unsupported(f"task=sensitivity: method={method.name} has joins_sides, so that no side is quantized alone")
    for part in ("backend", "token_policy", "eviction", "merged"):
        if getattr(method, part) is not None:
            raise Unsupported(f"task=sensitivity: method={method.name} has {part}, which no single layer can have")
    check_scoring(method, protocol(task))
    if task.heads:
        check_heads(inputs, method)


def check_heads(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a codec that does not encode each head by itself."""
    for layer in kv_layers_of(inputs.model.text_config, inputs.config.cache.mla):
        for side, dim in zip(SIDES, (layer.head_dim, layer.value_dim), strict=True):
            codec = method.codec_of(side, layer.index)
            if codec is not None:
                try:
                    check_single_heads(codec, dim)
                except Unsupported as error:
                    raise Unsupported(f"task.heads=true: method={method.name}, {side}s: {error}") from error


def layers_of(inputs: Inputs) -> int:
    """Layers of the model that cache keys and values."""
    return len(kv_layers_of(inputs.model.text_config, inputs.config.cache.mla))


def heads_of(inputs: Inputs) -> int:
    """KV heads of a layer."""
    return int(inputs.model.text_config.num_key_value_heads)


def places_of(method: Method, layers: int) -> list[Place]:
    """What the method quantizes, layer by layer."""
    return [(side, layer) for layer, side in product(range(layers), SIDES) if method.codec(side, layer, layers)]


def only(method: Method, places: Collection[Place], layers: int) -> Method:
    """The method in these places; all others stay in full precision."""
    whole = {side: [layer for layer in range(layers) if (side, layer) not in places] for side in SIDES}
    return replace(method, full_precision_layers=whole)


def only_head(method: Method, place: Place, head: int, heads: int, layers: int) -> Method:
    """The method for one of the heads of a place; all other heads and places stay in full precision."""
    side, layer = place
    codec = method.codec_of(side, layer)
    assert codec is not None
    own: Any = {side: HeadsCodec([codec if one == head else None for one in range(heads)])}
    return only(replace(method, by_layer=(), first_layers=None, **own), [place], layers)


def random_sets(places: list[Place], count: int, seed: int) -> list[list[Place]]:
    """Sets of at least two places, their sizes evenly drawn, each a sample without replacement."""
    draw = random.Random(f"sensitivity maps {seed}")
    return [sorted(draw.sample(places, draw.randint(2, len(places)))) for _ in range(count if len(places) > 1 else 0)]


@dataclass(frozen=True)
class Job:
    """What one pass quantizes: places, or one head of one place."""

    places: list[Place]
    head: int | None = None

    def named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with its places: a side and a layer, a head of them, or lists of layers by side."""
        if self.head is not None:
            return {**row, "head": self.head, "of": list(self.places[0])}
        if len(self.places) == 1:
            return {**row, "side": self.places[0][0], "layer": self.places[0][1]}
        return {**row, "layers": {side: [layer for own, layer in self.places if own == side] for side in SIDES}}


def jobs_of(inputs: Inputs, method: Method) -> dict[str, Job]:
    """Every pass by its name."""
    task: SensitivityConfig = inputs.config.task
    places = places_of(method, layers_of(inputs))
    heads = range(heads_of(inputs) if task.heads else 0)
    jobs = {f"layer {layer} {side}": Job([(side, layer)]) for side, layer in places}
    jobs["all"] = Job(places)
    jobs |= {f"map {index}": Job(own) for index, own in enumerate(random_sets(places, task.maps, task.seed))}
    return jobs | {f"layer {layer} {side} head {h}": Job([(side, layer)], h) for side, layer in places for h in heads}


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample for each side of each layer, one for all of them and one for each random set."""
    loaded, settings = inputs.model, protocol(inputs.config.task)
    windows = ppl_windows(inputs.tokens.streams, settings, inputs.bos)
    reference, known = reference_of(inputs, method, windows, settings)
    full = known or run_ppl(loaded, without_codecs(method), windows, settings)
    if method.is_full_precision:
        metrics = {name: value for name, value in full.metrics().items() if name in ("nll", "windows", "scored_tokens")}
        return Measurement(metrics, units_of(metrics), full.samples())
    jobs, layers = jobs_of(inputs, method), layers_of(inputs)

    def score(item: str) -> dict[str, Any]:
        """KL and loss over full precision, in nats per token, and what is stored of the places."""
        places, head = jobs[item].places, jobs[item].head
        if head is None:
            own = only(method, places, layers)
        else:
            own = only_head(method, places[0], head, heads_of(inputs), layers)
        keep = inputs.config.cache.keep_decoded
        found = run_ppl(loaded, own, windows, settings, reference, keep_decoded=keep).metrics()
        kept = {name: found[name] for name in ("kl_mean", "key_bits", "value_bits", "bits_per_element", "packed_bytes")}
        return {"delta_nll": found["nll"] - full.nll, **kept}

    rows = [jobs[row["item"]].named(row) for row in journaled(journal, jobs, score, method.label, "pass")]
    metrics = _metrics({row["item"]: row for row in rows}, jobs)
    return Measurement(metrics, units_of(metrics), rows)


def _metrics(rows: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, Job]) -> dict[str, float]:
    whole = {item: job.places for item, job in jobs.items() if job.head is None}
    single = {places[0]: rows[item]["kl_mean"] for item, places in whole.items() if len(places) == 1}
    together, total = rows["all"], sum(single.values())
    keys = sum(kl for (side, _), kl in single.items() if side == "key")
    names = ("kl_mean", "delta_nll", "key_bits", "value_bits", "bits_per_element")
    metrics = {name: float(together[name]) for name in names}
    metrics |= {"kl_sum": total, "kl_sum_keys": keys}
    if of_heads := [rows[item]["kl_mean"] for item, job in jobs.items() if job.head is not None]:
        metrics["kl_sum_heads"] = sum(of_heads)
    maps = [
        (sum(single[place] for place in places), rows[item]["kl_mean"])
        for item, places in whole.items()
        if item.startswith("map")
    ]
    if len(maps) > 2:
        found = float(spearmanr(*zip(*maps, strict=True)).statistic)
        metrics["sum_correlation"] = found if math.isfinite(found) else 0.0
    return metrics


_STEPS = 200  # of a bisection


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


CURVE = [bits / 4 for bits in range(1, 33)]
"""Bits of the curve."""
_kept: Kept[dict[Place, JointMoments]] = {}
"""Moments of the scored text, which the forms and bits of a sweep share; those of calibrations are kept apart."""
_SHOWN = 64
"""Components whose λ a record has, of a side of a layer."""


def check_limit(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method that has no spectrum."""
    inputs.check_context(inputs.config.task.context)
    if method.is_full_precision:
        return
    if method.joins_sides != (inputs.config.task.heads is LimitHeads.both):
        raise Unsupported("task.heads=both: the limit alone, or a method that stores values with keys; and only so")
    if any(joint_parts(getattr(method, side)) is None for side in _coded(method)):
        raise Unsupported(f"task=limit: method={method.name} has no spectrum; fp16, or a method with FisherTransforms")


def measure_limit(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """The limit at `task.rates`, its curve, and the spectrum of each layer and side."""
    task: LimitConfig = inputs.config.task
    windows, both = torch.stack(windows_of(inputs)), task.heads is LimitHeads.both
    moments, _ = moments_of(inputs.model, windows, CalibrationConfig(), (task.left_out, True, both), _kept)
    transform = FisherTransform(heads_together=1 if task.heads is LimitHeads.apart else None, ridge=task.ridge)
    spectra = {place: spectrum_of(own, transform) for place, own in moments.items()}
    whole = torch.cat(list(spectra.values()))
    metrics = {"windows": float(len(windows))}
    metrics |= {f"limit_loss_{rate:g}": loss_at(whole, level_of_rate(whole, rate)) for rate in task.rates}
    layers = 1 + max(layer for _, layer in spectra)
    if not method.is_full_precision:
        metrics |= _predicted(method, layers, moments)
    rows: list[dict[str, Any]] = []
    for rate in CURVE:
        level = level_of_rate(whole, rate)
        rows.append({"kind": "curve", "bits": rate, "level": level, "loss": loss_at(whole, level)})
    levels = {rate: level_of_rate(whole, rate) for rate in task.rates}
    for (side, layer), own in spectra.items():
        bits = {f"{rate:g}": rate_at(own, level) for rate, level in levels.items()}
        rows.append({"kind": "layer", "side": side, "layer": layer, "bits": bits, "spectrum": _thinned(own)})
    return Measurement(metrics, units_like(metrics, {"windows": "windows", "*_loss*": "nats/token"}), rows)


def _thinned(spectrum: Tensor) -> list[list[float]]:
    """Rank, from 0, and λ of evenly spread components, the largest and the smallest among them."""
    ranks = torch.linspace(0, len(spectrum) - 1, min(_SHOWN, len(spectrum))).round().long()
    return [[float(rank), float(spectrum[rank])] for rank in ranks]


def _coded(method: Method) -> Sequence[str]:
    """The sides whose codecs store something."""
    return SIDES[:1] if method.joins_sides else SIDES


def _predicted(method: Method, layers: int, moments: Mapping[Place, JointMoments]) -> dict[str, float]:
    """Second-order loss of the method's widths, and the part of it of what has no bits.

    `predicted_loss`, `unseen_loss`: on the method's own calibration text; `..._here`: on the text of the moments, where
    directions that the calibration has not seen have no bits either. Rounding is that of components of deviation 1.
    """
    metrics = dict.fromkeys(("predicted_loss", "unseen_loss", "predicted_loss_here", "unseen_loss_here"), 0.0)
    for side, layer in product(_coded(method), range(layers)):
        parts = joint_parts(method.codec(side, layer, layers))
        if parts is None:
            continue
        _, transform, quantizer = parts
        spectrum, widths = (quantizer.tables[name] for name in ("weights", "widths"))
        metrics["predicted_loss"] += predicted(quantizer, spectrum, widths)
        metrics["unseen_loss"] += float(spectrum[widths == 0].double().sum() / 2)
        here = moments[BOTH if method.joins_sides else side, layer]
        rounded, unseen = losses_at(here, transform, torch.tensor(quantizer.errors)[widths.long()])
        metrics["predicted_loss_here"] += rounded + unseen
        metrics["unseen_loss_here"] += unseen
    return metrics


def losses_at(
    moments: JointMoments, transform: FisherTransform, errors: Float[Tensor, " components"]
) -> tuple[float, float]:
    """Second-order loss, on the text of the moments, of components with these errors, and of what none of them holds.

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


TASKS = {
    "sensitivity": Task(check, measure, texts=lambda inputs: window_texts(inputs, protocol(inputs.config.task))),
    "limit": Task(check_limit, measure_limit),
}
