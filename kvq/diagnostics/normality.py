"""How close channels are to N(0, 1) after each step of NSN (NSNQuant, arXiv 2505.18231)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Hadamard, TokenNorm, VectorQuantizer
from kvq.codecs.vector import DIM as VECTOR

States = Float[Tensor, "batch heads tokens dim"]
BINS, LOW, HIGH = 100, -5.0, 5.0
"""Of Table 1: width 0.1."""
STEPS = ("N", "NS", "NSN")
ORACLE_SAMPLES = 4096


def nsn(x: States, step: str, chunk: int | None = 64) -> States:
    """`x` after normalizing tokens to norm √D (N), centering channels per chunk (NS), normalizing again (NSN).

    `chunk`: tokens that share a channel mean; None: all. A short last chunk has its own mean.
    """
    if step not in STEPS:
        raise ValueError(f"step={step}: one of {', '.join(STEPS)}")
    normalize = TokenNorm(rms=True)
    y = normalize.forward(x)[0]
    if "S" in step:
        y = torch.cat([part - part.mean(2, keepdim=True) for part in y.split(chunk or y.shape[2], 2)], 2)
    return normalize.forward(y)[0] if step == "NSN" else y


def hadamard(x: States) -> States:
    """Rotated channels, as `kvq.codecs.Hadamard` does."""
    return Hadamard().forward(x)[0]


@lru_cache(maxsize=2)
def _masses(device: torch.device) -> Float[Tensor, " bins"]:
    edges = torch.linspace(LOW, HIGH, BINS + 1, dtype=torch.float64)
    edges[0], edges[-1] = -torch.inf, torch.inf
    return (0.5 * torch.special.erfc(-edges / math.sqrt(2))).diff().to(device)


def channel_kl(x: Float[Tensor, "tokens channels"]) -> Float[Tensor, " channels"]:
    """KL of each channel's histogram to N(0, 1), in nats: 100 bins of width 0.1 on [-5, 5] against CDF differences.

    Values beyond the ends count in the last bins, whose normal mass then includes the tail.
    """
    index = ((x.double() - LOW) * (BINS / (HIGH - LOW))).floor().clamp(0, BINS - 1).long()
    offsets = torch.arange(x.shape[1], device=x.device) * BINS
    counts = torch.bincount((index + offsets).flatten(), minlength=BINS * x.shape[1]).view(-1, BINS)
    p = counts.double() / x.shape[0]
    return torch.special.xlogy(p, p / _masses(x.device)).sum(1)


def oracle(draws: int, samples: int = ORACLE_SAMPLES, seed: int = 0) -> float:
    """Mean `channel_kl` of `draws` channels of `samples` standard normal numbers: a lower bound for 4096 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return float(channel_kl(torch.randn(samples, draws, generator=generator, dtype=torch.float64)).mean())


@dataclass(frozen=True)
class Moments:
    """Per head: means and deviations of channels over tokens, and of their covariance the part off the diagonal.

    `lowest`, `highest`: least and largest covariance of each channel with the others (0 where all have one sign).
    """

    mean: Float[Tensor, "heads dim"]
    deviation: Float[Tensor, "heads dim"]
    off_diagonal: Float[Tensor, " heads"]
    lowest: Float[Tensor, "heads dim"]
    highest: Float[Tensor, "heads dim"]


def moments(x: States) -> Moments:
    """Moments over the tokens of all sequences of the batch; the Frobenius norm, least and largest covariances."""
    flat = x.double().transpose(0, 1).flatten(1, 2)
    mean = flat.mean(1)
    centered = flat - mean[:, None]
    covariance = centered.mT @ centered / flat.shape[1]
    variance = covariance.diagonal(dim1=1, dim2=2).clone()
    covariance.diagonal(dim1=1, dim2=2).zero_()
    return Moments(
        mean,
        variance.sqrt(),
        torch.linalg.matrix_norm(covariance),
        covariance.amin(2),
        covariance.amax(2),
    )


@dataclass(frozen=True)
class VarianceRange:
    """Lemma 1: bounds of a rotated channel's variance that hold with probability 1 - alpha."""

    low: float
    high: float
    epsilon: float
    gamma: float


def lemma_range(mean: Float[Tensor, " dim"], off_diagonal: float, alpha: float, constant: float) -> VarianceRange:
    """[1 - ε - Γβ, 1 + Γβ], β = sqrt(ln(2/α) / c) / d, ε the mean squared channel mean, Γ the off-diagonal norm.

    `constant`: c of the Hanson-Wright inequality, which the paper leaves open.
    """
    beta = math.sqrt(math.log(2 / alpha) / constant) / mean.shape[0]
    epsilon = float(mean.double().square().mean())
    return VarianceRange(1 - epsilon - off_diagonal * beta, 1 + off_diagonal * beta, epsilon, off_diagonal)


def correlation_in_groups(x: States, size: int = VECTOR) -> Float[Tensor, " heads"]:
    """Mean |correlation| between two channels of the same group of `size` consecutive ones (figure 10), per head.

    Channels that do not vary correlate with none.
    """
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
