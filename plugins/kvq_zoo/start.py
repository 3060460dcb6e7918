"""Full precision until a number of tokens is cached, then everything at once is quantized."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvq.cache.chunk_masks import Transitions
from kvq.cache.side import CacheSide, States
from kvq.codecs import Codec
from kvq.config.method import PrefillBlock, ResidualSide
from kvq.errors import at_least
from kvq.methods.policies import Policy


class Start(Policy):
    """Nothing is quantized before a layer has seen `tokens` tokens; the update that reaches them quantizes all of them.

    That update's own queries still read full precision. Later tokens leave as the method's residual says.

    Args:
        tokens: seen before anything is quantized.

    Raises:
        ConfigError: fewer than 1 token.

    Source: `maybe_quantize_kv_cache` of MLX-LM, whose `quantized_kv_start` is 5000 on the command line.
    """

    version: ClassVar[int] = 1
    setting = "start"
    does = "quantizes nothing before a number of tokens is cached"
    needs = frozenset({"own_tokens", "sides_apart"})
    excludes = frozenset({"codecs_alone", "own_tokens", "packed_attention", "all_at_once"})

    def __init__(self, tokens: int = 5000) -> None:
        at_least("tokens", tokens, 1)
        self.tokens = tokens

    def wrap_side(self, like: CacheSide, side: str, layer: int, layers: int) -> CacheSide:
        """A `StartSide` in place of a quantized side of the cache."""
        if like.codec is None:
            return like
        return StartSide(like.codec, like.residual, like.label, like.keep_decoded, self.tokens)


class StartSide(CacheSide):
    """Keys or values that are all in full precision until `start` tokens have been seen.

    Args:
        codec, residual, label, keep_decoded: as `CacheSide`; the residual holds from then on.
        start: number of tokens.
    """

    def __init__(self, codec: Codec, residual: ResidualSide, label: str, keep_decoded: bool, start: int) -> None:
        self._start = start
        super().__init__(codec, residual, label, keep_decoded)

    @property
    def _has_started(self) -> bool:
        return self.packed_tokens > 0 or self.seen >= self._start

    def append(self, states: States) -> States:
        """As `CacheSide.append`; until then, attention reads all tokens in full precision."""
        if self._has_started:
            return super().append(states)
        return self._wait(states, states.shape[2])[0]

    def moves(self, queries: int, head: int = 0) -> Transitions:
        return super().moves(queries, head) if self._has_started else self._waiting_moves(head, queries)

    def append_in_steps(self, states: States) -> tuple[States, States | None]:
        return super().append_in_steps(states) if self._has_started else self._wait(states, 0)

    def append_then_steps(self, states: States, head: int) -> tuple[States, States | None]:
        if self._has_started:
            return super().append_then_steps(states, head)
        return self._wait(states, head)

    def _reached_after(self, head: int) -> int:
        """Number of new tokens with which the start is reached, if the first `head` come together."""
        return max(self._start - self.seen, head, 1)

    def _waiting_moves(self, head: int, queries: int) -> Transitions:
        """The tokens that later queries of this update read decoded: all held ones from the start on."""
        first, count = self._reached_after(head), head + queries
        if first >= count:
            return Transitions(0, ())
        held = self.residual_tokens + first
        if self._encodes_at_once:
            return Transitions(0, (first,) * held + tuple(range(first, count)))
        gone = self._leaving(held, first=False)
        later = tuple(first + query for query in self._decoded_from(held - gone, count - first))
        return Transitions(0, (first,) * gone + later)

    def _wait(self, states: States, head: int) -> tuple[States, States | None]:
        """Add tokens, the first `head` together, the others one by one; encode all if the start is reached.

        Returns:
            All tokens in full precision, and those decoded that later queries of this update read so.
        """
        moved, first = len(self._waiting_moves(head, states.shape[2] - head).queries), self._reached_after(head)
        held = self.residual_tokens + min(first, states.shape[2])
        self._receive(states)
        self._hold(states)
        visible = self._visible()
        if self.seen < self._start:
            return visible, None
        decoded = self._encode_all(visible, held, moved > 0) if self._encodes_at_once else self._flush(False, moved > 0)
        return visible, None if decoded is None else decoded[:, :, :moved]

    def _encode_all(self, states: States, together: int, decoded: bool) -> Tensor | None:
        """Encode the first `together` tokens as a prompt is, and the others each for itself."""
        size, self._full = self.residual.size, None
        whole = self.residual.prefill_block is PrefillBlock.whole or size == 0
        parts = [self._encode(states[:, :, :together], None if whole else size, decoded)]
        if together < states.shape[2]:
            parts.append(self._encode(states[:, :, together:], 1, decoded))
        found = [part for part in parts if part is not None]
        return torch.cat(found, 2) if found else None
