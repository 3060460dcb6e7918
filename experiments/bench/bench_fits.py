"""What calibrations fit beside scikit-learn's k-means on the same states of `tiny`: error, held-out error and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

from kvq.calibration.collect import LayerStates, collect_states
from kvq.calibration.text import load_text
from kvq.codecs import NonUniformQuantizer, UndoRope
from kvq.codecs.levels import codebooks, nearest
from kvq.config import compose, resolve
from kvq.models.inputs import Inputs

COUPLED = {"4c9b": (4, 9), "8c10b": (8, 10)}
TOKENS, GROUPS = 16384, 4
BITS = 3


def measure() -> dict[str, Any]:
    """Ratios ours / scikit-learn's in every layer: CQ's codebooks of `GROUPS` groups of channels, KVQuant's levels.

    Errors are weighted with squared gradients. `held_out`: of tokens that neither was fitted to.
    """
    config = resolve(compose(["method=cq", "model=tiny", "dataset=pydocs"]))
    inputs = Inputs(config)
    text = load_text(inputs)
    assert text is not None
    states = collect_states(inputs.model, text.windows, None, True, config.method.calibration.seed)
    out: dict[str, Any] = {"tokens": TOKENS, "groups": GROUPS, "codebooks": {}, "levels": {}}
    with torch.inference_mode(), threadpool_limits(limits=1):
        torch.set_num_threads(1)
        for layer, of_layer in states.items():
            for side in ("key", "value"):
                x, gradients = _before_rope(of_layer, side)
                for name, (channels, bits) in COUPLED.items():
                    out["codebooks"][f"{name}_{side}_{layer}"] = _coupled(x, gradients, channels, 2**bits)
                out["levels"][f"{side}_{layer}"] = _levels(x, gradients, side)
    return out


def _before_rope(states: LayerStates, side: str) -> tuple[Tensor, Tensor]:
    x, gradients = getattr(states, side).float(), states.gradients[side].float()
    if side == "value":
        return x, gradients
    undo = UndoRope()
    return undo.forward(x, rope=states.rope)[0], undo.forward(gradients, rope=states.rope)[0]


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _fit(points: Tensor, weights: Tensor, count: int) -> Tensor:
    means = KMeans(count, n_init=1, random_state=0).fit(points.numpy(), sample_weight=weights.numpy())
    return torch.from_numpy(means.cluster_centers_)


def _coupled(x: Tensor, gradients: Tensor, channels: int, count: int) -> dict[str, float]:
    """Groups of channels spread over the heads; the first `TOKENS` tokens are fitted to, the next as many held out."""
    points, weights = (t.unflatten(-1, (-1, channels)).transpose(-3, -2).flatten(0, 1) for t in (x, gradients))
    some = torch.linspace(0, len(points) - 1, GROUPS).long()
    points, mass = points[some], weights[some].square().sum(-1)
    mass = mass / mass.mean(-1, keepdim=True)
    fitted, held = (slice(0, TOKENS), slice(TOKENS, 2 * TOKENS))
    ours, mine = _timed(lambda: codebooks(points[:, fitted], mass[:, fitted], count, 25, 0))
    theirs, their = _timed(
        lambda: torch.stack([_fit(p[fitted], m[fitted], count) for p, m in zip(points, mass, strict=True)])
    )

    def ratio(part: slice) -> float:
        errors = [
            float(
                ((points[:, part] - _nearest(points[:, part], found)).square().sum(-1) * mass[:, part]).double().sum()
            )
            for found in (ours, theirs.float())
        ]
        return errors[0] / errors[1]

    return {"error": ratio(fitted), "held_out_error": ratio(held), "time": mine / their}


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    index = nearest(points, centroids).long()[..., None]
    return centroids.gather(1, index.expand(-1, -1, points.shape[-1]))


def _levels(x: Tensor, gradients: Tensor, side: str) -> dict[str, float]:
    """KVQuant's levels at `BITS` bits, against k-means on every value that is not kept apart."""
    quantizer = NonUniformQuantizer(BITS, "per_channel" if side == "key" else "per_token")
    start = time.perf_counter()
    tables = quantizer.fit(x, gradients, 0)
    mine = time.perf_counter() - start
    scaled, weights = _kept_inside(x, gradients, side)
    theirs, their = _timed(lambda: _fit(scaled[:, None], weights / weights.mean(), 2**BITS))
    errors = []
    for levels in (tables["levels"].double(), theirs.flatten().sort().values.double()):
        index = np.searchsorted(((levels[1:] + levels[:-1]) / 2).numpy(), scaled.numpy())
        errors.append(float(((scaled - levels[index]).square() * weights).double().sum()))
    return {"error": errors[0] / errors[1], "time": mine / their}


def _kept_inside(x: Tensor, gradients: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Values within the thresholds of their channel (keys) or of their token over all heads, scaled to them."""
    rows = x.transpose(0, 1).flatten(1).numpy()
    low, high = np.percentile(rows, [0.5, 99.5], axis=0 if side == "key" else 1, keepdims=True)
    scaled = (rows - (high + low) / 2) / ((high - low) / 2)
    inside = torch.from_numpy(np.abs(scaled) <= 1)
    return torch.from_numpy(scaled)[inside], gradients.transpose(0, 1).flatten(1).square()[inside]


def show(found: dict[str, Any]) -> None:
    """Print the range of each ratio."""
    for part in ("codebooks", "levels"):
        for figure in next(iter(found[part].values())):
            ratios = [values[figure] for values in found[part].values()]
            print(f"{'calibration_fits':<34}{part} {figure:<24}{min(ratios):.3f}x to {max(ratios):.3f}x")
