"""Scoring a continuation: the prompt is quantized after a full-precision prefill, the continuation is not.

KVQuant++'s protocol: the first scored logits come from reading the last prompt token on the quantized cache, and keys
and values of that token and of the scored ones are not quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from kvq.cache import KVCache
from kvq.cache.side import CacheSide
from kvq.config.residual import Policy, PrefillBlock, Residual, ResidualSide
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.tasks.scoring import ScoredChunk

_NEVER = 2**30


def holding_method(method: Method) -> Method:
    """The method with a residual that never fills: the cache keeps full precision until `_quantize` is called."""
    sides = [dataclasses.replace(side, policy=Policy.block, size=_NEVER) for side in _sides(method.residual)]
    return dataclasses.replace(method, residual=Residual(*sides))


@torch.no_grad()
def score_continuation(
    loaded: LoadedModel, cache: KVCache, blocks: Residual, tokens: Int[Tensor, "batch context"], prompt: int
) -> Iterator[ScoredChunk]:
    """Yield the logits of the targets from position `prompt` on, all at once.

    Args:
        cache: empty, of a `holding_method`.
        blocks: the residual that gives the block size of the prompt.
        tokens: prompt and continuation.
        prompt: tokens of the prompt; its last one is read on the quantized cache.
    """
    loaded.hidden_states(tokens[:, : prompt - 1], cache)
    for layer in cache.kv_layers:
        for side, block in zip((layer.key, layer.value), _sides(blocks), strict=True):
            _quantize(side, block)
    hidden = loaded.hidden_states(tokens[:, prompt - 1 : -1], cache)
    yield ScoredChunk(loaded.logits(hidden), tokens[:, prompt:])


def _sides(residual: Residual) -> tuple[ResidualSide, ResidualSide]:
    return residual.key, residual.value


def _quantize(side: CacheSide, residual: ResidualSide) -> None:
    """Encode all that a side holds in full precision."""
    if side.codec is None or side._full is None:
        return
    whole = residual.prefill_block is PrefillBlock.whole or residual.size == 0
    states, side._full = side._full.view, None
    side._encode(states, None if whole else residual.size)
