"""`task=distribution`: how close keys and values come to N(0, 1) by the steps of NSN (NSNQuant, arXiv 2505.18231).

Table 1, Lemma 1, and figures 5, 6, 7, 10, 11, 12 and 13 of the paper, on the model's own states: no method is applied.
As in the method, keys go through NSN before RoPE, and their distribution is measured after it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvq.codecs import Hadamard, RandomizedHadamard, VectorQuantizer
from kvq.codecs.vector import CODEBOOKS
from kvq.config.diagnostics import DistributionConfig
from kvq.diagnostics.normality import (
    STEPS,
    channel_kl,
    correlation_in_groups,
    hadamard,
    lemma_range,
    moments,
    nsn,
    oracle,
    synthetic_cosine,
    vector_cosine,
)
from kvq.errors import ConfigError, Unsupported, did_you_mean
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks import capture as capturing
from kvq.tasks.capture import Layer, capture, fingerprint, windows_of
from kvq.tasks.measurement import Baseline, Measurement, Task

ORACLE_DRAWS = 1000


def plain(layer: Layer, side: str) -> Tensor:
    """Values, or keys before their rotary embedding, in the compute dtype."""
    x = getattr(layer, side)
    x = x if x.dtype == torch.float64 else x.float()
    return _turned(layer, x, back=True) if side == "key" else x


def _turned(layer: Layer, x: Tensor, back: bool) -> Tensor:
    if layer.rope is None:
        return x
    rope = replace(layer.rope, cos=layer.rope.cos[:, None], sin=layer.rope.sin[:, None])
    return rope.turn(x, back)


class Distributions:
    """Statistics of every layer: means over windows, and moments of the first window."""

    def __init__(self, task: DistributionConfig) -> None:
        self.task = task
        self._means: dict[tuple[tuple[str, Any], ...], list[dict[str, float]]] = defaultdict(list)
        self.first: list[dict[str, Any]] = []
        self._seen: set[int] = set()
        self._kept = 0  # windows of which vectors are kept

    def add(self, layer: Layer) -> None:
        """Take one layer of one window."""
        for side in ("key", "value"):
            x = plain(layer, side)
            steps = {step: nsn(x, step, self.task.chunk) for step in STEPS}
            if side == "key":
                steps = {step: _turned(layer, y, back=False) for step, y in steps.items()}
            self._kl(layer.index, side, steps)
            rotated = hadamard(steps["NSN"])
            self._vectors(layer.index, side, rotated)
            if layer.index not in self._seen:
                self._moments(layer.index, side, getattr(layer, side), steps["NSN"], rotated)
                self._lemma(layer.index, side, steps["NSN"])
            if layer.index == self.task.vector_layer and self._kept < self.task.vector_windows:
                self._keep(side, layer.index, x)
        self._kept += layer.index == self.task.vector_layer
        self._seen.add(layer.index)

    def _note(self, names: dict[str, Any], **values: float) -> None:
        self._means[tuple(names.items())].append(values)

    def _kl(self, layer: int, side: str, steps: dict[str, Tensor]) -> None:
        for step, y in steps.items():
            for rotated, z in ((False, y), (True, hadamard(y))):
                for head in range(z.shape[1]):
                    names = {
                        "kind": "kl",
                        "side": side,
                        "layer": layer,
                        "head": head,
                        "step": step,
                        "hadamard": rotated,
                    }
                    self._note(names, kl=float(channel_kl(z[0, head]).mean()))

    def _vectors(self, layer: int, side: str, rotated: Tensor) -> None:
        place = {"side": side, "layer": layer}
        for head, value in enumerate(correlation_in_groups(rotated).tolist()):
            self._note({"kind": "correlation", **place, "head": head}, correlation=value)
        for name in self.task.codebooks:
            for bits in CODEBOOKS[name]:
                found = float(vector_cosine(rotated, bits, name).mean())
                self._note({"kind": "vq", **place, "codebook": name, "bits": bits}, cosine=found)

    def _moments(self, layer: int, side: str, raw: Tensor, normal: Tensor, rotated: Tensor) -> None:
        for stage, y in (("input", raw), ("NSN", normal), ("NSN+Hadamard", rotated)):
            found = moments(y)
            for head in range(y.shape[1]):
                row = {"kind": "moments", "side": side, "layer": layer, "head": head, "stage": stage}
                self.first.append({**row, "mean": _short(found.mean[head]), "deviation": _short(found.deviation[head])})

    def _lemma(self, layer: int, side: str, normal: Tensor) -> None:
        found = moments(normal)
        variances = torch.stack(
            [moments(RandomizedHadamard(seed).forward(normal)[0]).deviation.square() for seed in range(self.task.signs)]
        )
        for head in range(normal.shape[1]):
            limits = lemma_range(
                found.mean[head], float(found.off_diagonal[head]), self.task.alpha, self.task.hanson_wright
            )
            here = variances[:, head]
            inside = (here >= limits.low) & (here <= limits.high)
            self.first.append(
                {
                    "kind": "lemma",
                    "side": side,
                    "layer": layer,
                    "head": head,
                    **vars(limits),
                    "variance_min": float(here.min()),
                    "variance_max": float(here.max()),
                    "inside": float(inside.double().mean()),
                    "covariance_min": float(found.lowest[head].amin()),
                    "covariance_max": float(found.highest[head].amax()),
                }
            )
            if self.task.channel_ranges and not self._seen:  # the first layer
                ranges = {"lowest": _short(found.lowest[head]), "highest": _short(found.highest[head])}
                self.first.append({"kind": "ranges", "side": side, "layer": layer, "head": head, **ranges})

    def _keep(self, side: str, layer: int, x: Tensor) -> None:
        windows, index = self.task.vector_windows, self._kept
        count = min(self.task.vectors * (index + 1) // windows - self.task.vectors * index // windows, x.shape[2])
        place = {"side": side, "layer": layer} | ({"window": index} if windows > 1 else {})
        picked = torch.linspace(0, x.shape[2] - 1, count).long() if count else torch.zeros(0, dtype=torch.long)
        for position in picked.tolist():
            values = _short(x[0, 0, position])
            self.first.append({"kind": "vector", **place, "position": position, "values": values})

    def samples(self) -> list[dict[str, Any]]:
        """Rows of all kinds; means over windows, then those of the first window and the vectors that are kept."""
        rows = []
        for names, found in self._means.items():
            mean = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
            rows.append({**dict(names), **mean})
        return rows + self.first


def _short(values: Tensor) -> list[float]:
    """Rounded to four significant digits, enough for a figure, to save space."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Statistics of the first windows, those of equally many N(0, 1) samples, and cosines of synthetic vectors."""
    task: DistributionConfig = inputs.config.task
    distributions = Distributions(task)
    windows = windows_of(inputs)
    for tokens in windows:
        capture(inputs.model, tokens, distributions.add)
    rows = distributions.samples()
    if not any(row["kind"] == "vector" for row in rows) and task.vectors:
        raise ConfigError(f"task.vector_layer={task.vector_layer}: the model has no such layer")
    for name in task.codebooks:
        for bits in CODEBOOKS[name]:
            line = synthetic_cosine(task.context, inputs.head_dims[0], bits, name)
            rows.append({"kind": "synthetic", "codebook": name, "bits": bits, "cosine": line})
    metrics = {"kl_oracle": oracle(ORACLE_DRAWS, task.context), "windows": float(len(windows))}
    units = {"kl_oracle": "nats", "windows": "windows"}
    for side in ("key", "value"):
        for step in STEPS:
            for rotated in (True, False):
                wanted = ("kl", side, step, rotated)
                values = [
                    r["kl"] for r in rows if (r["kind"], r.get("side"), r.get("step"), r.get("hadamard")) == wanted
                ]
                name = f"kl_{side}_{step}{'_hadamard' if rotated else ''}"
                metrics[name], units[name] = sum(values) / len(values), "nats"
        for kind, quantity in (("lemma", "inside"), ("lemma", "gamma"), ("correlation", "correlation")):
            values = [row[quantity] for row in rows if row["kind"] == kind and row["side"] == side]
            metrics[f"{side}_{quantity}"], units[f"{side}_{quantity}"] = sum(values) / len(values), "1"
    return Measurement(metrics, units, rows)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method, or a head dim without Hadamard matrix or codebook; `ConfigError` as others."""
    task: DistributionConfig = inputs.config.task
    if not method.is_full_precision:
        raise Unsupported("task=distribution: looks at keys and values before any method; method=fp16")
    for name in task.codebooks:
        if name not in CODEBOOKS:
            raise ConfigError(
                f"task.codebooks={task.codebooks}: each of {', '.join(CODEBOOKS)}.{did_you_mean(name, CODEBOOKS)}"
            )
    for head_dim in inputs.head_dims:
        Hadamard().check(head_dim)
        VectorQuantizer(2).check(head_dim)
    capturing.check(inputs, method)


TASK = Task(check, measure, fingerprint)
