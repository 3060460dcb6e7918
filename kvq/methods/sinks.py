"""First tokens that stay in full precision, because attention concentrates on them (attention sinks)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kvq.cache.chunk_masks import Transitions
from kvq.cache.packed import PackedSide, packed_side
from kvq.cache.serialize import Field, Reader
from kvq.cache.side import CacheSide, States
from kvq.codecs import Codec, Growable
from kvq.codecs.packed import grown
from kvq.codecs.rope import Rope
from kvq.config.residual import ResidualSide
from kvq.kernels import PackedStates


class SinkSide(CacheSide):
    """Keys or values whose first `sinks` tokens stay in full precision, before packed prefix and residual.

    Their bytes count as full-precision bytes, as those of the residual do.
    """

    version: ClassVar[int] = 1
    drops: ClassVar[bool] = False
    saved: ClassVar[Mapping[str, Field]] = {**CacheSide.saved, "_first": Field("rows", "batch heads tokens head_dim")}

    def __init__(
        self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool = False, sinks: int = 0
    ) -> None:
        self.most_sinks = sinks
        super().__init__(codec, residual, label, keep_decoded)

    @override
    def reset(self) -> None:
        super().reset()
        self._first: Growable | None = None

    @property
    def sink_tokens(self) -> int:
        return 0 if self._first is None else self._first.rows

    @property
    @override
    def tokens(self) -> int:
        return super().tokens + self.sink_tokens

    @property
    @override
    def residual_bytes(self) -> int:
        first = 0 if self._first is None else self._first.view.numel() * self._first.view.element_size()
        return super().residual_bytes + first

    @property
    @override
    def bits_per_element(self) -> float:
        if self.packed_tokens:
            return super().bits_per_element
        elements = self.tokens * self.elements_per_token
        return 8 * self.residual_bytes / elements if elements else 0.0

    @property
    @override
    def _turns(self) -> Rope | None:
        rope = super()._turns
        return None if rope is None else rope.narrow(self.sink_tokens, rope.tokens - self.sink_tokens)

    @override
    def append(self, states: States, quantized_prefill: bool = False) -> States:
        rest = self._keep(states)
        return self._behind(None if rest is None else super().append(rest, quantized_prefill))

    @override
    def moves(self, queries: int) -> Transitions:
        sinks = min(self.most_sinks - self.sink_tokens, queries)
        start = self.sink_tokens + sinks
        if queries == sinks:
            return Transitions(start + self.packed_tokens, ())
        found = super().moves(queries - sinks)
        return Transitions(found.start + start, tuple(query + sinks for query in found.queries))

    @override
    def moves_behind(self, head: int, queries: int, quantized_prefill: bool) -> Transitions:
        room = self.most_sinks - self.sink_tokens
        sinks = min(room, head + queries)
        start = self.sink_tokens + sinks
        if head + queries == sinks:
            return Transitions(start + self.packed_tokens, ())
        if head > room:
            found = super().moves_behind(head - sinks, queries, quantized_prefill)
        else:
            found = super().moves(head + queries - sinks)
        return Transitions(found.start + start, tuple(query + sinks for query in found.queries))

    @override
    def append_in_steps(self, states: States) -> tuple[States, States | None]:
        rest = self._keep(states)
        if rest is None:
            return self._behind(None), None
        visible, decoded = super().append_in_steps(rest)
        return visible if visible.shape[2] == self.tokens else self._behind(visible), decoded

    def _keep(self, states: Tensor) -> Tensor | None:
        """Store the states that are sinks and return those after them; None: there are none."""
        count = min(self.most_sinks - self.sink_tokens, states.shape[2])
        if not count:
            return states
        super()._receive(states)
        first = states[:, :, :count]
        self._first = grown(self._first, first.clone() if self._first is None else first)
        return states[:, :, count:] if states.shape[2] > count else None

    @override
    def _receive(self, states: Tensor) -> bool:
        super()._receive(states)
        return not self.packed_tokens and not self.residual_tokens

    def _behind(self, states: Tensor | None) -> Tensor:
        assert self._first is not None
        return self._first.view if states is None else torch.cat([self._first.view, states], 2)

    @override
    def _check_read(self, given: Reader, packed: int) -> None:
        others = packed + self.residual_tokens
        if self.sink_tokens > self.most_sinks or (others and self.sink_tokens < self.most_sinks):
            raise given.error(f"{self.sink_tokens} sinks before {others} tokens; the method keeps {self.most_sinks}")
        super()._check_read(given, packed)

    @override
    def check_finite(self) -> None:
        if self._first is not None:
            self._check_finite(self._first.view)
        super().check_finite()

    @override
    def select(self, index: Tensor) -> None:
        super().select(index)
        if self._first is not None:
            self._first = self._first.select(index)


class PackedSinkSide(SinkSide, PackedSide):
    """A side with first tokens in full precision that can return its tokens in stored form."""

    version: ClassVar[int] = 1

    @override
    def append_packed(self, states: States) -> PackedStates:
        rest = self._keep(states)
        return self._stored() if rest is None else super().append_packed(rest)

    @override
    def _stored(self) -> PackedStates:
        found = super()._stored()
        full = self._behind(found.full)
        return dataclasses.replace(found, full=full, sinks=self.sink_tokens)


def packed_side_of(like: CacheSide) -> PackedSide:
    """An empty side that can return its tokens in stored form, with the settings of `like`."""
    if isinstance(like, SinkSide):
        return PackedSinkSide(like.codec, like.residual, like.label, sinks=like.most_sinks)
    return packed_side(like)


def side_of(codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool, sinks: int) -> CacheSide:
    """Keys or values of a layer; with sinks where `sinks` is not 0 and the others are quantized."""
    if codec is None or not sinks:
        return CacheSide(codec, residual, label, keep_decoded)
    return SinkSide(codec, residual, label, keep_decoded, sinks)
