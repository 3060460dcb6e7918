"""Token norms and the effect of their imbalance on groups with one scale (OScaR, arXiv 2605.19660, sections 3-4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.codecs import Axis, Codec, Rope, UniformQuantizer
from kvq.diagnostics.fidelity import reconstruct

States = Float[Tensor, "batch heads tokens dim"]
TOKENS_PER_GROUP = 32
"""Tokens per group where the quantizer has no groups: the size of OScaR's and KIVI's."""


def token_norms(x: States) -> Float[Tensor, "batch heads tokens"]:
    """L2 norm of each token in each head."""
    return torch.linalg.vector_norm(x.double() if x.dtype == torch.float64 else x.float(), dim=-1)


@dataclass(frozen=True)
class NormSpread:
    """Spread of norms over tokens, per head: deviation / mean, max / min, median / min."""

    variation: Float[Tensor, " heads"]
    max_over_min: Float[Tensor, " heads"]
    median_over_min: Float[Tensor, " heads"]


def imbalance(norms: Float[Tensor, "batch heads tokens"]) -> NormSpread:
    """Means over the batch of each sequence's statistics. A norm of 0 counts as the smallest positive fp32 number."""
    norms = norms.double()
    low = norms.amin(-1).clamp_min(torch.finfo(torch.float32).tiny)
    mean = norms.mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
    spread = norms.std(-1, correction=0) / mean
    return NormSpread(spread.mean(0), (norms.amax(-1) / low).mean(0), (norms.quantile(0.5, -1) / low).mean(0))


def over_median(norms: Float[Tensor, "batch heads tokens"]) -> Float[Tensor, "batch heads tokens"]:
    """Each token's norm over its head's median over tokens."""
    return norms / norms.quantile(0.5, -1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)


def relative_norms(norms: Float[Tensor, "batch heads tokens"]) -> Float[Tensor, "batch tokens"]:
    """Each token's norm over its head's median over tokens; the median over heads."""
    return over_median(norms).quantile(0.5, 1)


@dataclass(frozen=True)
class Sink:
    """A position of low norm: its norm over the median, and the fraction of inputs in which it is below the limit."""

    position: int
    relative_norm: float
    stability: float


def find_sinks(relative: Float[Tensor, "inputs tokens"], below: float) -> list[Sink]:
    """Positions whose norm lies below `below` medians in at least half of the inputs, by position."""
    low = (relative < below).double().mean(0)
    middle = relative.double().quantile(0.5, 0)
    return [Sink(int(p), float(middle[p]), float(low[p])) for p in torch.nonzero(low >= 0.5).flatten()]


def group_ranges(x: States, group: int) -> Float[Tensor, "batch heads groups dim"]:
    """Range R_{j,g} (max - min) of channel j over the tokens of group g; a short last group is left out."""
    count = x.shape[2] // group
    low, high = torch.aminmax(x[:, :, : count * group].unflatten(2, (count, group)), dim=3)
    return high - low


def group_spread(
    norms: Float[Tensor, "batch heads tokens"], group: int
) -> tuple[Float[Tensor, "batch heads groups"], Float[Tensor, "batch heads groups"]]:
    """Range and standard deviation of the token norms of each group; a short last group is left out."""
    count = norms.shape[2] // group
    parts = norms[:, :, : count * group].unflatten(2, (count, group))
    low, high = torch.aminmax(parts, dim=3)
    return high - low, parts.std(3, correction=0)


def step_bound(ranges: Tensor, bits: int) -> Tensor:
    """Half a step of an asymmetric grid of `bits` bits over `ranges`: R / (2 (2^b - 1)), the largest possible error."""
    return ranges / (2 * (2**bits - 1))


def stage_outputs(codec: Codec, x: States, block: int | None, rope: Rope | None) -> list[tuple[str, States]]:
    """`x`, and the output of each stage of `codec` in blocks of `block` tokens (a short tail is left out).

    In the compute dtype; side information is exact where a stage does not quantize it itself.
    """
    size = x.shape[2] if block is None else min(block, x.shape[2])
    count = x.shape[2] // size
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide[:, :, : count * size].unflatten(2, (count, size)).transpose(1, 2)
    rotation = None if rope is None else rope.narrow(0, count * size).blocks(size, count)
    out = [("input", y.transpose(1, 2).flatten(2, 3))]
    for name, stage in codec.stages:
        y, _ = stage.forward(y, rope=rotation) if stage.uses_rope else stage.forward(y)  # type: ignore[call-arg]
        if y.shape[-1] != x.shape[-1]:
            break
        out.append((name, y.transpose(1, 2).flatten(2, 3)))
    return out


def quantizer_group(codec: Codec) -> int:
    """Tokens that share one scale per channel in `codec`; `TOKENS_PER_GROUP` where it shares none or the block's."""
    quantizer = codec.quantizer
    if isinstance(quantizer, UniformQuantizer) and quantizer.axis is Axis.per_channel and quantizer.group_size:
        return quantizer.group_size
    return TOKENS_PER_GROUP


def shares_tokens(codec: Codec) -> bool:
    """Whether tokens of a group share a scale, so that one token's range affects the error of another."""
    quantizer = codec.quantizer
    return isinstance(quantizer, UniformQuantizer) and quantizer.axis is Axis.per_channel


def without_tokens(
    codec: Codec, x: States, positions: Int[Tensor, " sinks"], group: int, rope: Rope | None
) -> tuple[float, float]:
    """Relative errors of the other tokens in groups with `positions`: with these tokens in the group, and without.

    Each group is encoded as one block. The two errors are equal where no tokens share a scale.
    """
    sums = [0.0, 0.0, 0.0]
    for number in sorted({int(position) // group for position in positions}):
        start, end = number * group, min((number + 1) * group, x.shape[2])
        inside = torch.arange(start, end, device=x.device)
        rest = inside[~torch.isin(inside, positions.to(x.device))]
        if not rest.numel():
            continue
        together = reconstruct(codec, x[:, :, start:end], None, _at(rope, inside))[:, :, rest - start]
        apart = reconstruct(codec, x[:, :, rest], None, _at(rope, rest))
        kept = x[:, :, rest].double()
        for index, found in enumerate((together, apart)):
            sums[index] += float((found.double() - kept).square().sum())
        sums[2] += float(kept.square().sum())
    return (sums[0] / sums[2], sums[1] / sums[2]) if sums[2] else (0.0, 0.0)


def _at(rope: Rope | None, positions: Tensor) -> Rope | None:
    return None if rope is None else rope.at(positions)
