"""Errors of reconstructed keys and values, and of the attention that reads them; norms of tokens.

What imbalance of norms does to groups with one scale: OScaR (arXiv 2605.19660), sections 3 and 4. No models here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.codecs import Codec, Rope, UndoRope, UniformQuantizer
from kvq.errors import Unsupported

States = Float[Tensor, "batch heads tokens dim"]
KvStates = Float[Tensor, "batch kv_heads tokens dim"]
QUERY_CHUNK = 128
"""Queries whose attention weights are in memory at once."""
MAX_SUBSET_STAGES = 6
TOKENS_PER_GROUP = 32
"""Tokens per group where the quantizer has no groups: the size of OScaR's and KIVI's."""


def relative_mse(x: States, x_hat: States) -> Float[Tensor, " heads"]:
    """|x - x̂|² / |x|² summed over batch, tokens and channels of each head; 0 where both are zero."""
    error = (x - x_hat).double().square().sum((0, 2, 3))
    power = x.double().square().sum((0, 2, 3))
    return torch.where(error == 0, 0.0, error / power.clamp_min(torch.finfo(power.dtype).tiny))


def weighted_mse(x: States, x_hat: States, weights: Float[Tensor, "batch heads tokens"]) -> Float[Tensor, " heads"]:
    """Σ a |x - x̂|² / Σ a |x|² over the tokens of each head, a: the attention weights of one query (or of more, summed).

    Source: kvquant-plus-plus, section 3.1, whose attention-weighted error is the numerator.
    """
    error = (weights * (x - x_hat).square().sum(-1)).double().sum((0, 2))
    return error / (weights * x.square().sum(-1)).double().sum((0, 2))


def relative_mse_by_position(x: States, x_hat: States, bins: list[tuple[int, int]]) -> list[float]:
    """As `relative_mse`, over the tokens `start:end` of each bin and all heads."""
    error = (x - x_hat).double().square().sum((0, 1, 3))
    power = x.double().square().sum((0, 1, 3)).clamp_min(torch.finfo(torch.float64).tiny)
    return [float(error[start:end].sum() / power[start:end].sum()) for start, end in bins]


def cosine(x: States, x_hat: States) -> Float[Tensor, " heads"]:
    """Mean over tokens of the cosine between a token and its reconstruction, per head; zero tokens are left out."""
    dots = (x.double() * x_hat.double()).sum(-1)
    norms = torch.linalg.vector_norm(x.double(), dim=-1) * torch.linalg.vector_norm(x_hat.double(), dim=-1)
    known = norms > 0
    return torch.where(known, dots / norms.masked_fill(~known, 1), 0).sum((0, 2)) / known.sum((0, 2)).clamp_min(1)


@dataclass(frozen=True)
class AttentionRule:
    """How a layer attends: softmax(cap(q kᵀ · scaling)) over the last `window` tokens (None: all before)."""

    scaling: float
    window: int | None = None
    softcap: float | None = None

    def log_weights(
        self,
        query: Float[Tensor, "batch heads queries dim"],
        key: Float[Tensor, "batch kv_heads tokens dim"],
        first: int,
    ) -> Float[Tensor, "batch heads queries tokens"]:
        """Log attention weights of queries at positions from `first` on; -inf where a query cannot see."""
        shared = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(shared, 1).mT * self.scaling
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        at = torch.arange(first, first + query.shape[2], device=query.device)[:, None]
        tokens = torch.arange(key.shape[2], device=query.device)
        hidden = tokens > at
        if self.window is not None:
            hidden |= tokens <= at - self.window
        return torch.log_softmax(logits.masked_fill(hidden, -torch.inf), -1)


def query_chunks(query: States) -> Iterator[tuple[int, States]]:
    """Position of the first query of each chunk of `QUERY_CHUNK` queries, and the chunk."""
    for first in range(0, query.shape[2], QUERY_CHUNK):
        yield first, query[:, :, first : first + QUERY_CHUNK]


def attention_received(attention: AttentionRule, query: States, key: KvStates) -> Float[Tensor, "heads tokens"]:
    """Mean weight that each token gets from the queries after it (the last token: 0), per query head."""
    total = query.new_zeros(query.shape[1], key.shape[2], dtype=torch.float64)
    for first, chunk in query_chunks(query):
        end = first + chunk.shape[2]
        weights = attention.log_weights(chunk, key[:, :, :end], first).exp().double()
        rows = torch.arange(chunk.shape[2], device=key.device)
        weights[:, :, rows, first + rows] = 0  # its own query
        total[:, :end] += weights.mean(0).sum(1)
    later = torch.arange(key.shape[2] - 1, -1, -1, device=key.device).clamp_min(1)
    return total / later


@dataclass(frozen=True)
class AttentionError:
    """Per query head: KL(full ‖ quantized) of the weights in nats per query, and |Δoutput|² / |output|²."""

    weight_kl: Float[Tensor, " heads"]
    output: Float[Tensor, " heads"]


def attention_errors(
    attention: AttentionRule,
    query: States,
    key: KvStates,
    value: KvStates,
    cases: Sequence[tuple[Tensor | None, Tensor | None]],
) -> list[AttentionError]:
    """Errors of attention, over all queries, for each case of reconstructed keys and values (None: the originals)."""
    shared = query.shape[1] // key.shape[1]
    sums = query.new_zeros(len(cases), 2, query.shape[1], dtype=torch.float64)
    power = sums.new_zeros(query.shape[1])
    for first, chunk in query_chunks(query):
        end = first + chunk.shape[2]  # later tokens are seen by none of these
        full = attention.log_weights(chunk, key[:, :, :end], first).double()
        weights, seen = full.exp(), full > -torch.inf
        wide = value[:, :, :end].repeat_interleave(shared, 1).double()
        output = weights @ wide
        power += output.square().sum((0, 2, 3))
        for index, (key_hat, value_hat) in enumerate(cases):
            found, with_hat = weights, wide
            if key_hat is not None:
                quantized = attention.log_weights(chunk, key_hat[:, :, :end], first).double()
                sums[index, 0] += (weights * (full - quantized).masked_fill(~seen, 0)).sum((0, 2, 3))
                found = quantized.exp()
            if value_hat is not None:
                with_hat = value_hat[:, :, :end].repeat_interleave(shared, 1).double()
            sums[index, 1] += (found @ with_hat - output).square().sum((0, 2, 3))
    # Rounding can leave a KL of two equal distributions a hair below zero.
    kl = (sums[:, 0] / (query.shape[0] * query.shape[2])).clamp_min(0)
    relative = sums[:, 1] / power.clamp_min(torch.finfo(power.dtype).tiny)
    return [AttentionError(kl[index], relative[index]) for index in range(len(cases))]


@dataclass(frozen=True)
class Arm:
    """A codec with some of its stages: `name` joins those before the quantizer by '+' ("none": no stage)."""

    name: str
    codec: Codec
    complete: bool


def arms(codec: Codec, subsets: bool = False) -> list[Arm]:
    """The codec with every prefix of its stages, from none to all; with `subsets`, every choice of them, in order.

    `Unsupported` where there are more than `MAX_SUBSET_STAGES` stages to choose subsets of.
    """
    names = [name for name, _ in codec.stages]
    if subsets and len(names) > MAX_SUBSET_STAGES:
        raise Unsupported(f"task.arms=subsets: {len(names)} stages; at most {MAX_SUBSET_STAGES}, or task.arms=prefixes")
    chosen: list[tuple[str, ...]] = [tuple(names[:count]) for count in range(len(names) + 1)]
    if subsets:
        chosen = [pick for count in range(len(names) + 1) for pick in itertools.combinations(names, count)]
    stages = dict(codec.stages)
    return [
        Arm("+".join(pick) or "none", codec.with_stages((name, stages[name]) for name in pick), len(pick) == len(names))
        for pick in chosen
    ]


def before_rope(codec: Codec) -> Codec | None:
    """The codec applied to keys before RoPE; None where the codec undoes RoPE itself."""
    if codec.uses_rope:
        return None
    return codec.with_stages([("before_rope", UndoRope()), *codec.stages])


def reconstruct(codec: Codec, x: States, block: int | None, rope: Rope | None, sinks: int = 0) -> States:
    """States of a cache that quantizes all but `sinks` first tokens in blocks of `block` tokens (None: one block)."""
    rotation = rope.narrow(sinks, rope.tokens - sinks) if codec.uses_rope and rope is not None else None
    return torch.cat([x[:, :, :sinks], codec.decode(codec.encode(x[:, :, sinks:], block, rotation), rotation)], 2)


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
    size = getattr(codec.quantizer, "group_size", None) if shares_tokens(codec) else None
    return size or TOKENS_PER_GROUP


def shares_tokens(codec: Codec) -> bool:
    """Whether tokens of a group share a scale, so that one token's range affects the error of another."""
    quantizer = codec.quantizer
    return isinstance(quantizer, UniformQuantizer) and quantizer.axis == "per_channel"


def without_tokens(
    codec: Codec, x: States, positions: Int[Tensor, " sinks"], group: int, rope: Rope | None
) -> tuple[float, float]:
    """Relative errors of the other tokens in groups (blocks) with `positions`: with these tokens, and without."""
    sums = [0.0, 0.0, 0.0]
    for number in sorted({int(position) // group for position in positions}):
        start, end = number * group, min((number + 1) * group, x.shape[2])
        inside = torch.arange(start, end, device=x.device)
        rest = inside[~torch.isin(inside, positions.to(x.device))]
        if not rest.numel():
            continue
        together = reconstruct(codec, x[:, :, start:end], None, rope and rope.at(inside))[:, :, rest - start]
        apart = reconstruct(codec, x[:, :, rest], None, rope and rope.at(rest))
        kept = x[:, :, rest].double()
        for index, found in enumerate((together, apart)):
            sums[index] += float((found.double() - kept).square().sum())
        sums[2] += float(kept.square().sum())
    return (sums[0] / sums[2], sums[1] / sums[2]) if sums[2] else (0.0, 0.0)
