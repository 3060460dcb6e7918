"""`task=distribution`: how close keys and values come to N(0, 1) by the steps of NSN (NSNQuant, arXiv 2505.18231).

Table 1, Lemma 1, and figures 5, 6, 7, 10, 11, 12 and 13 of the paper, on the model's own states: no method is applied.
As in the method, keys go through NSN before RoPE, and their distribution is measured after it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Hadamard, RandomizedHadamard, TokenNorm, VectorQuantizer
from kvq.codecs.vector import CODEBOOKS
from kvq.codecs.vector import DIM as VECTOR
from kvq.config.diagnostics import DistributionConfig
from kvq.errors import ConfigError, Unsupported, did_you_mean
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.tasks import measurement
from kvq.tasks.measurement import Baseline, LayerStates, Measurement, Task

States = Float[Tensor, "batch heads tokens dim"]
BINS, LOW, HIGH = 100, -5.0, 5.0
"""Of Table 1: width 0.1."""
STEPS = ("N", "NS", "NSN")


def nsn(x: States, step: str, chunk: int | None = 64) -> States:
    """Tokens normalized to √D (N), channels centered per chunk (S; None: all tokens), normalized again (N)."""
    normalize = TokenNorm(rms=True)
    y = normalize.forward(x)[0]
    if "S" in step:
        y = torch.cat([part - part.mean(2, keepdim=True) for part in y.split(chunk or y.shape[2], 2)], 2)
    return normalize.forward(y)[0] if step == "NSN" else y


def hadamard(x: States) -> States:
    """Rotate channels by a Hadamard matrix, as `kvq.codecs.Hadamard`."""
    return Hadamard().forward(x)[0]


def channel_kl(x: Float[Tensor, "tokens channels"]) -> Float[Tensor, " channels"]:
    """KL (nats) of channels' histograms to N(0, 1): 100 bins on [-5, 5], the last with the normal's tails."""
    index = ((x.double() - LOW) * (BINS / (HIGH - LOW))).floor().clamp(0, BINS - 1).long()
    offsets = torch.arange(x.shape[1], device=x.device) * BINS
    counts = torch.bincount((index + offsets).flatten(), minlength=BINS * x.shape[1]).view(-1, BINS)
    edges = torch.linspace(LOW, HIGH, BINS + 1, dtype=torch.float64)
    edges[0], edges[-1] = -torch.inf, torch.inf
    normal = (0.5 * torch.special.erfc(-edges / math.sqrt(2))).diff().to(x.device)
    p = counts.double() / x.shape[0]
    return torch.special.xlogy(p, p / normal).sum(1)


def oracle(draws: int, samples: int = 4096, seed: int = 0) -> float:
    """Mean `channel_kl` of `draws` channels of `samples` standard normal numbers: a lower bound for 4096 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return float(channel_kl(torch.randn(samples, draws, generator=generator, dtype=torch.float64)).mean())


class ChannelMoments(NamedTuple):
    """Statistics of channels over tokens, per head; `lowest`, `highest`: covariances with the other channels."""

    mean: Float[Tensor, "heads dim"]
    deviation: Float[Tensor, "heads dim"]
    off_diagonal: Float[Tensor, " heads"]
    lowest: Float[Tensor, "heads dim"]
    highest: Float[Tensor, "heads dim"]


def moments(x: States) -> ChannelMoments:
    """Compute the statistics of channels over the tokens of all sequences of the batch."""
    flat = x.double().transpose(0, 1).flatten(1, 2)
    mean = flat.mean(1)
    centered = flat - mean[:, None]
    covariance = centered.mT @ centered / flat.shape[1]
    deviation = covariance.diagonal(dim1=1, dim2=2).sqrt()
    covariance.diagonal(dim1=1, dim2=2).zero_()
    norm = torch.linalg.matrix_norm(covariance)
    return ChannelMoments(mean, deviation, norm, covariance.amin(2), covariance.amax(2))


class VarianceRange(NamedTuple):
    """Lemma 1: bounds of a rotated channel's variance that hold with probability 1 - alpha."""

    low: float
    high: float
    epsilon: float
    gamma: float


def lemma_range(mean: Float[Tensor, " dim"], off_diagonal: float, alpha: float, constant: float) -> VarianceRange:
    """Lemma 1: [1 - ε - Γβ, 1 + Γβ], ε the mean of `mean`², Γ `off_diagonal`, β = sqrt(ln(2/α) / `constant`) / d."""
    beta = math.sqrt(math.log(2 / alpha) / constant) / mean.shape[0]
    epsilon = float(mean.double().square().mean())
    return VarianceRange(1 - epsilon - off_diagonal * beta, 1 + off_diagonal * beta, epsilon, off_diagonal)


def correlation_in_groups(x: States, size: int = VECTOR) -> Float[Tensor, " heads"]:
    """Mean |correlation| between channels of groups of `size` (figure 10), per head; constant channels have none."""
    flat = x.double().transpose(0, 1).flatten(1, 2).unflatten(-1, (-1, size)).transpose(1, 2)
    flat = flat - flat.mean(2, keepdim=True)
    deviation = flat.square().sum(2, keepdim=True).sqrt()
    flat = flat / deviation.masked_fill(deviation == 0, 1)
    apart = ~torch.eye(size, dtype=torch.bool, device=x.device)
    return (flat.mT @ flat).abs()[..., apart].mean((1, 2))


def vector_cosine(x: States, bits: int, codebook: str) -> Float[Tensor, " heads"]:
    """Mean cosine between tokens and their nearest codewords (figure 5), per head; no gain."""
    quantizer = VectorQuantizer(bits, codebook, "none")
    wide = x.float()
    found = quantizer.decode(quantizer.encode(wide, wide.dtype), wide.shape, wide.dtype)
    return torch.nn.functional.cosine_similarity(wide, found, dim=-1).mean((0, 2))


def synthetic_cosine(tokens: int, head_dim: int, bits: int, codebook: str, seed: int = 0) -> float:
    """`vector_cosine` of standard normal numbers, the reference for keys and values."""
    generator = torch.Generator().manual_seed(seed)
    return float(vector_cosine(torch.randn(1, 1, tokens, head_dim, generator=generator), bits, codebook))


def _rotated_by_rope(layer: LayerStates, x: Tensor, back: bool) -> Tensor:
    """Apply the layer's RoPE to `x`, or undo it (`back`)."""
    if layer.rope is None:
        return x
    rope = replace(layer.rope, cos=layer.rope.cos[:, None], sin=layer.rope.sin[:, None])
    return rope.rotate(x, back)


class Distributions:
    """Rows of statistics by layer, side and head: means over windows, and numbers of the first window."""

    def __init__(self, task: DistributionConfig) -> None:
        self.task = task
        self._found: list[dict[str, Any]] = []
        self.first: list[dict[str, Any]] = []
        self._seen: set[int] = set()
        self._kept = 0  # windows of which vectors are kept

    def add(self, layer: LayerStates) -> None:
        """Add the statistics of one layer of one window."""
        for side in ("key", "value"):
            place = {"side": side, "layer": layer.index}
            given = getattr(layer, side)
            x = given if given.dtype == torch.float64 else given.float()
            x = _rotated_by_rope(layer, x, back=True) if side == "key" else x
            steps = {step: nsn(x, step, self.task.chunk) for step in STEPS}
            if side == "key":
                steps = {step: _rotated_by_rope(layer, y, back=False) for step, y in steps.items()}
            for step, y in steps.items():
                for turned, z in ((False, y), (True, hadamard(y))):
                    for head in range(z.shape[1]):
                        names = {"kind": "kl", **place, "head": head, "step": step, "hadamard": turned}
                        self._found.append(names | {"kl": float(channel_kl(z[0, head]).mean())})
            rotated = hadamard(steps["NSN"])
            for head, value in enumerate(correlation_in_groups(rotated).tolist()):
                self._found.append({"kind": "correlation", **place, "head": head, "correlation": value})
            for book, bits in [(name, bits) for name in self.task.codebooks for bits in CODEBOOKS[name]]:
                cosine = float(vector_cosine(rotated, bits, book).mean())
                self._found.append({"kind": "vq", **place, "codebook": book, "bits": bits, "cosine": cosine})
            if layer.index not in self._seen:
                for stage, y in (("input", given), ("NSN", steps["NSN"]), ("NSN+Hadamard", rotated)):
                    found = moments(y)
                    for head, (mean, deviation) in enumerate(zip(found.mean, found.deviation, strict=True)):
                        row = {"kind": "moments", **place, "head": head, "stage": stage}
                        self.first.append({**row, "mean": _rounded(mean), "deviation": _rounded(deviation)})
                self._add_lemma(place, steps["NSN"])
            if layer.index == self.task.vector_layer and self._kept < self.task.vector_windows:
                self._keep_vectors(place, x)
        self._kept += layer.index == self.task.vector_layer
        self._seen.add(layer.index)

    def _add_lemma(self, place: dict[str, Any], normal: Tensor) -> None:
        """Add rows that compare Lemma 1's range of variances with those under `task.signs` random rotations."""
        found = moments(normal)
        variances = torch.stack(
            [moments(RandomizedHadamard(seed).forward(normal)[0]).deviation.square() for seed in range(self.task.signs)]
        )
        for head, gamma in enumerate(found.off_diagonal.tolist()):
            limits = lemma_range(found.mean[head], gamma, self.task.alpha, self.task.hanson_wright)
            here, lowest, highest = variances[:, head], found.lowest[head], found.highest[head]
            inside = (here >= limits.low) & (here <= limits.high)
            row = {"kind": "lemma", **place, "head": head, **limits._asdict()}
            row |= {"variance_min": float(here.min()), "variance_max": float(here.max())}
            row |= {"inside": float(inside.double().mean())}
            self.first.append(row | {"covariance_min": float(lowest.amin()), "covariance_max": float(highest.amax())})
            if self.task.channel_ranges and not self._seen:  # the first layer
                ranges = {"lowest": _rounded(lowest), "highest": _rounded(highest)}
                self.first.append({"kind": "ranges", **place, "head": head, **ranges})

    def _keep_vectors(self, place: dict[str, Any], x: Tensor) -> None:
        """Add this window's part of `task.vectors` vectors of head 0, at evenly spread positions."""
        windows, index = self.task.vector_windows, self._kept
        count = min(self.task.vectors * (index + 1) // windows - self.task.vectors * index // windows, x.shape[2])
        own = {**place} | ({"window": index} if windows > 1 else {})
        picked = torch.linspace(0, x.shape[2] - 1, count).long() if count else torch.zeros(0, dtype=torch.long)
        for position in picked.tolist():
            values = _rounded(x[0, 0, position])
            self.first.append({"kind": "vector", **own, "position": position, "values": values})

    def samples(self) -> list[dict[str, Any]]:
        """All rows: means over windows first, then numbers of the first window and vectors."""
        names = ("kind", "side", "layer", "head", "step", "hadamard", "codebook", "bits")
        return measurement.averaged(self._found, *names) + self.first


def _rounded(values: Tensor) -> list[float]:
    """The numbers, rounded to four significant digits."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Statistics of the first windows, those of equally many N(0, 1) samples, and cosines of synthetic vectors."""
    task: DistributionConfig = inputs.config.task
    distributions = Distributions(task)
    windows = measurement.capture_windows(inputs, distributions.add)
    rows = distributions.samples()
    if not any(row["kind"] == "vector" for row in rows) and task.vectors:
        raise ConfigError(f"task.vector_layer={task.vector_layer}: the model has no such layer")
    for name in task.codebooks:
        for bits in CODEBOOKS[name]:
            line = synthetic_cosine(task.context, inputs.head_dims[0], bits, name)
            rows.append({"kind": "synthetic", "codebook": name, "bits": bits, "cosine": line})
    metrics = {"kl_oracle": oracle(1000, task.context), "windows": float(windows)}  # of 1,000 draws
    for side in ("key", "value"):
        for step, rotated in itertools.product(STEPS, (True, False)):
            name = f"kl_{side}_{step}{'_hadamard' if rotated else ''}"
            metrics |= measurement.mean_metric(name, rows, "kl", kind="kl", side=side, step=step, hadamard=rotated)
        for kind, quantity in (("lemma", "inside"), ("lemma", "gamma"), ("correlation", "correlation")):
            metrics |= measurement.mean_metric(f"{side}_{quantity}", rows, quantity, kind=kind, side=side)
    return Measurement(metrics, measurement.units_like(metrics, {"kl_*": "nats", "windows": "windows"}), rows)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` unless the method is fp16 and head dims fit, `ConfigError` for codebooks and windows."""
    task: DistributionConfig = inputs.config.task
    if not method.is_full_precision:
        raise Unsupported("task=distribution: looks at keys and values before any method; method=fp16")
    for name in set(task.codebooks) - CODEBOOKS.keys():
        known = f"each of {', '.join(CODEBOOKS)}.{did_you_mean(name, CODEBOOKS)}"
        raise ConfigError(f"task.codebooks={task.codebooks}: {known}")
    for head_dim in inputs.head_dims:
        Hadamard().check(head_dim)
        VectorQuantizer(2).check(head_dim)
    measurement.check_capture(inputs, method)


TASK = Task(check, measure)
