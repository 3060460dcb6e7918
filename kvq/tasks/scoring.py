"""Exact scoring through the cache: log-probabilities of known text under a method, chunk by chunk.

A method with more than codecs and a residual is scored token by token (eviction), only after a prompt, up to each flush
(transformers' caches), or not at all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache import KVCache
from kvq.config.residual import Policy, PrefillBlock, Residual, ResidualSide
from kvq.methods.method import Method
from kvq.models import LoadedModel

FULL_PRECISION_CHUNK = 128
"""Queries per forward of a full-precision run, which has no residual; equal to the methods' usual residual size."""
LOGIT_CHUNK = 128
"""Positions whose logits are in memory at once under `parallel`."""


@dataclass(frozen=True)
class ScoredChunk:
    """Logits for consecutive targets of a batch of windows: `logits[:, i]` predicts `targets[:, i]`."""

    logits: Float[Tensor, "batch targets vocab"]
    targets: Int[Tensor, "batch targets"]


def log_probabilities(logits: Float[Tensor, "*lead vocab"]) -> Float[Tensor, "*lead vocab"]:
    """Logarithms of the probabilities that logits stand for, in fp32; in fp64 for fp64 logits."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


def sliding_chunk(method: Method, residual: ResidualSide) -> int:
    """The most tokens per forward under a sliding residual: `FULL_PRECISION_CHUNK`, and at most the residual's size.

    The latter not for a method that can read a token decoded in the forward it comes in (`decoded_at_once`).
    """
    whole = method.has("decoded_at_once")
    return FULL_PRECISION_CHUNK if whole else min(FULL_PRECISION_CHUNK, residual.size)


def scoring_bounds(method: Method, length: int, chunk: int | None = None) -> list[tuple[int, int]]:
    """Chunks of `length` tokens that end where a block residual is flushed, so that none is flushed within a chunk.

    Results do not depend on the cuts: under `token_by_token` each query reads what it would by itself. Cuts at flushes
    avoid second copies of tokens. Where a method needs it (`steps`), each token is a chunk.

    Args:
        chunk: at most this many tokens per forward (default: whole blocks; `FULL_PRECISION_CHUNK` where none cuts, and
            at most that under `sliding`).
    """
    method.check_needs("task.scoring=generation", "no_prompt")
    cuts = {0, length}
    if steps(method):
        cuts |= set(range(length))
    elif method.backend is not None:  # transformers' caches flush after the first token, then after every `size`
        cuts |= set(range(1, length, max(method.residual.key.size, 1)))
    else:
        sides = zip((method.key, method.value), _sides(method.residual), strict=True)
        quantized = [side for codec, side in sides if codec is not None]
        first = 0 if method.has("decoded_at_once") else method.sink_tokens
        for side in quantized:
            size = sliding_chunk(method, side) if side.policy is Policy.sliding else max(side.size, 1)
            cuts |= set(range(first, length, size))
        if not quantized:
            cuts |= set(range(first, length, FULL_PRECISION_CHUNK))
    if chunk is not None:
        starts = sorted(cuts)
        cuts |= {cut for start, end in itertools.pairwise(starts) for cut in range(start, end, chunk)}
    return list(itertools.pairwise(sorted(cuts)))


def parallel_method(method: Method) -> Method:
    """The method with residual `none` on both sides; block sizes stay."""
    return dataclasses.replace(method, residual=method.residual.for_parallel_scoring())


def without_codecs(method: Method) -> Method:
    """Full precision under the residual of a method, so that both cut a text alike."""
    return Method(name="fp16", key=None, value=None, residual=method.residual, bits=None, mla=method.mla)


@torch.no_grad()
def score(
    loaded: LoadedModel,
    cache: KVCache,
    tokens: Int[Tensor, "batch context"],
    scored_from: int,
    bounds: list[tuple[int, int]],
) -> Iterator[ScoredChunk]:
    """Feed `tokens[:, start:end]` for each of `bounds` and yield the logits of the targets from `scored_from` on.

    Each query reads what it would if the tokens came one by one, wherever `bounds` cut. The last position has no
    target; feeding it matters only to statistics that span the window (`parallel`).
    """
    cache.token_by_token = True
    for start, end in bounds:
        hidden = loaded.hidden_states(tokens[:, start:end], cache)
        first, last = max(start, scored_from - 1), min(end, tokens.shape[1] - 1)
        for low in range(first, last, LOGIT_CHUNK):
            high = min(low + LOGIT_CHUNK, last)
            logits = loaded.logits(hidden[:, low - start : high - start])
            yield ScoredChunk(logits, tokens[:, low + 1 : high + 1])


_NEVER = 2**30


def holding_method(method: Method) -> Method:
    """The method with a residual that never fills: the cache keeps full precision until it is encoded at once."""
    sides = [dataclasses.replace(side, policy=Policy.block, size=_NEVER) for side in _sides(method.residual)]
    return dataclasses.replace(method, residual=Residual(*sides))


@torch.no_grad()
def score_continuation(
    loaded: LoadedModel, cache: KVCache, blocks: Residual, tokens: Int[Tensor, "batch context"], prompt: int
) -> Iterator[ScoredChunk]:
    """Yield the logits of the targets from position `prompt` on, all at once.

    `cache`: empty, of a `holding_method`. All tokens of the prompt but the last are encoded, in the block size of the
    residual `blocks`, before the rest is read.
    """
    loaded.hidden_states(tokens[:, : prompt - 1], cache)
    for layer in cache.kv_layers:
        for side, residual in zip((layer.key, layer.value), _sides(blocks), strict=True):
            if side.codec is not None and side._full is not None:
                whole = residual.prefill_block is PrefillBlock.whole or residual.size == 0
                states, side._full = side._full.view, None
                side._encode(states, None if whole else residual.size)
    hidden = loaded.hidden_states(tokens[:, prompt - 1 : -1], cache)
    yield ScoredChunk(loaded.logits(hidden), tokens[:, prompt:])


def _sides(residual: Residual) -> tuple[ResidualSide, ResidualSide]:
    return residual.key, residual.value


def steps(method: Method) -> bool:
    """Whether what a token reads depends on the forwards before it, so that each token needs its own forward."""
    return not method.has("several_tokens")
