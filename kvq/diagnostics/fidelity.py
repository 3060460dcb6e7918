"""Errors of reconstructed keys and values, and of the attention that reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, Rope, UndoRope
from kvq.errors import Unsupported

States = Float[Tensor, "batch heads tokens dim"]
KvStates = Float[Tensor, "batch kv_heads tokens dim"]
QUERY_CHUNK = 128
"""Queries whose attention weights are in memory at once."""
MAX_SUBSET_STAGES = 6


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


def query_chunks(query: States, size: int = QUERY_CHUNK) -> Iterator[tuple[int, States]]:
    """Position of the first query of each chunk, and the chunk."""
    for first in range(0, query.shape[2], size):
        yield first, query[:, :, first : first + size]


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

    An arm whose chain cannot be built is left out.

    Raises:
        Unsupported: more than `MAX_SUBSET_STAGES` stages to choose subsets of.
    """
    names = [name for name, _ in codec.stages]
    if subsets and len(names) > MAX_SUBSET_STAGES:
        raise Unsupported(f"task.arms=subsets: {len(names)} stages; at most {MAX_SUBSET_STAGES}, or task.arms=prefixes")
    chosen: list[tuple[str, ...]] = [tuple(names[:count]) for count in range(len(names) + 1)]
    if subsets:
        chosen = [pick for count in range(len(names) + 1) for pick in itertools.combinations(names, count)]
    stages = dict(codec.stages)
    return [
        Arm(
            "+".join(pick) or "none",
            codec.rebuilt((name, stages[name]) for name in pick),
            len(pick) == len(names),
        )
        for pick in chosen
    ]


def before_rope(codec: Codec) -> Codec | None:
    """The codec applied to keys before RoPE; None where the codec undoes RoPE itself."""
    if codec.uses_rope:
        return None
    return codec.rebuilt([("before_rope", UndoRope()), *codec.stages])


def reconstruct(codec: Codec, x: States, block: int | None, rope: Rope | None) -> States:
    """The decoded states of a cache that quantizes all tokens in blocks of `block` tokens (None: one block)."""
    rotation = rope if codec.uses_rope else None
    return codec.decode(codec.encode(x, block, rotation), rotation)
