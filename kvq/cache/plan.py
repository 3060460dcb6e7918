"""Layers of methods with a plan: a pool of full-precision tokens, and bits by the attention that tokens receive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.cache.side import CacheSide, States
from kvq.cache.sources import Departures
from kvq.codecs import Growable
from kvq.codecs.zipcache import PlannedCodec, TokenSplit
from kvq.config.residual import PrefillBlock
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import Method
from kvq.methods.plan import OutlierTokens, Saliency


def planned_layers(method: Method, layers: list[KVCacheLayer], keep_decoded: bool) -> list[KVCacheLayer]:
    """The layers as the method's plan wants them.

    Raises:
        Unsupported: attention that reads a prefill in decoded form; codecs that need the positions of a pool's tokens.
    """
    plan = method.plan
    if any(layer.quantized_prefill for layer in layers):
        raise Unsupported(f"quantized_prefill: method={method.name} chooses tokens behind the attention that sees them")
    if isinstance(plan, Saliency):
        return [SaliencyLayer(layer, plan, keep_decoded) for layer in layers]
    assert isinstance(plan, OutlierTokens)
    if any(layer.key.uses_rope or layer.value.uses_rope for layer in layers):
        raise Unsupported("method.plan: the codec turns keys back by their positions, which a pool does not keep")
    return [
        layer if index < plan.exempt_layers else PoolLayer(layer, plan, keep_decoded)
        for index, layer in enumerate(layers)
    ]


class PoolSide(CacheSide):
    """Its first full-precision tokens are the pool, behind which come those that wait for their block.

    `leader`: the side that chooses (the keys'); None: this one.
    """

    def __init__(self, like: CacheSide, pool: int, keep_decoded: bool, leader: PoolSide | None = None) -> None:
        self.pool, self.leader = pool, leader
        self.pooled = 0
        self.orders: list[Int[Tensor, "batch heads tokens"]] = []
        super().__init__(like.codec, like.residual, like.label, keep_decoded)

    @override
    def reset(self) -> None:
        super().reset()
        self.pooled = 0

    @override
    def moves(self, queries: int) -> Departures:
        fresh = self.residual_tokens - self.pooled
        groups = 0 if self.codec is None else (fresh + queries - 1) // self._group
        when = [self._group * (group + 1) - fresh for group in range(groups)]
        return Departures(self.packed_tokens, tuple(query for query in when for _ in range(self._group)))

    def _order(self, states: States) -> Int[Tensor, "batch heads tokens"]:
        """The pool first, then the others, in the order in which they came."""
        if self.leader is not None:
            return self.leader.orders.pop(0)
        chosen = states.abs().sum(-1).sort(dim=-1, stable=True).indices[..., : self.pool]
        losing = torch.ones(states.shape[:3], dtype=torch.uint8, device=states.device).scatter_(-1, chosen, 0)
        order = losing.sort(dim=-1, stable=True).indices
        self.orders.append(order)
        return order

    @override
    def _flush(self, first: bool, decoded: bool = False) -> Tensor | None:
        count = (self.residual_tokens - self.pooled) // self._group
        if self.codec is None or self._full is None or not count:
            return None
        states, end = self._full.view, self.pooled + count * self._group
        pool = states[:, :, : self.pooled]
        for group in states[:, :, self.pooled : end].split(self._group, 2):
            both = torch.cat([pool, group], 2)
            order = self._order(both).unsqueeze(-1).expand(-1, -1, -1, both.shape[-1])
            ordered = both.gather(2, order)
            pool = ordered[:, :, : self.pool]
            self._encode(ordered[:, :, self.pool :], None)
        self._full = Growable(torch.cat([pool, states[:, :, end:]], 2))
        self.pooled = self.pool
        return None

    @override
    def check_crop(self, remove: int) -> None:
        super().check_crop(remove + self.pooled if remove else 0)


class PoolLayer(KVCacheLayer):
    """Keys and values of one layer with a pool of full-precision tokens, chosen by the keys."""

    keeps_order = False
    lasting = "tokens have changed places with those of a pool"

    @property
    @override
    def shuffled(self) -> bool:
        """A token has left for the pool, or come back from it."""
        return bool(self.key.packed_tokens)

    def __init__(self, like: KVCacheLayer, plan: OutlierTokens, keep_decoded: bool) -> None:
        key = PoolSide(like.key, plan.pool, keep_decoded)
        super().__init__(key, PoolSide(like.value, plan.pool, keep_decoded, key), False)

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `KVCacheLayer.update`. Raises: Unsupported: one by one, beyond the end of a block."""
        _refuse_moves(self, key_states.shape[2])
        return super().update(key_states, value_states, *args, **kwargs)

    @override
    def fork(self) -> PoolLayer:
        other = super().fork()
        assert isinstance(other, PoolLayer)
        assert isinstance(other.key, PoolSide)
        assert isinstance(other.value, PoolSide)
        other.key.orders, other.value.leader = [], other.key
        return other


def _refuse_moves(layer: KVCacheLayer, queries: int) -> None:
    if layer.one_by_one and layer._moving(queries):
        raise Unsupported("method.plan: tokens fed one by one, but together beyond the end of a block; feed up to it")


class LaterSide(CacheSide):
    """Holds what comes until `settle`, behind the attention that sees it."""

    @override
    def append(self, states: States, quantized_prefill: bool = False) -> States:
        self.begins = self._receive(states)
        self._hold(states)
        return self._visible()

    @override
    def append_one_by_one(self, states: States) -> tuple[States, States | None]:
        return self.append(states), None

    def leaving(self) -> list[int]:
        """Lengths of the blocks that leave now."""
        held = self.residual_tokens
        if self.begins and self.residual.prefill_block is PrefillBlock.whole and held >= self._group:
            return [held]
        return [self._group] * (held // self._group)

    def settle(self, mask: Tensor) -> None:
        """Encode the blocks that leave, their salient tokens by `mask` `[batch, heads or 1, tokens]`."""
        assert isinstance(self.codec, PlannedCodec)
        with self.codec.planned(mask):
            self._flush(self.begins)


class SaliencyLayer(KVCacheLayer):
    """Keys and values of one layer, whose tokens get bits by the attention they receive from probe queries."""

    lasting = "attention received cannot be taken back"

    def __init__(self, like: KVCacheLayer, plan: Saliency, keep_decoded: bool) -> None:
        key, value = (LaterSide(side.codec, side.residual, side.label, keep_decoded) for side in (like.key, like.value))
        for side in (key, value):
            if not isinstance(side.codec, PlannedCodec) or not isinstance(side.codec.quantizer, TokenSplit):
                raise ConfigError("method.plan: Saliency needs a PlannedCodec over a TokenSplit for keys and values")
        super().__init__(key, value, False)
        self.plan = plan
        self._received: Tensor | None = None

    @property
    @override
    def observes(self) -> bool:
        return True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `KVCacheLayer.update`; what leaves does so in `observe`."""
        _refuse_moves(self, key_states.shape[2])
        return super().update(key_states, value_states, *args, **kwargs)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Start and length of the blocks in which the tokens held leave, now or later."""
        assert isinstance(self.key, LaterSide)
        held, size, start = self.key.residual_tokens, self.key.residual.size, 0
        for length in self.key.leaving():
            yield start, length
            start += length
        if start < held:
            yield start, size

    @override
    def observe(self, attended: Attended) -> None:
        """Add the weights that tokens receive from the probes of their own block; let full blocks go."""
        side, queries = self.key, attended.query.shape[2]
        held, packed = side.residual_tokens, side.packed_tokens
        received = attended.key.new_zeros(*attended.key.shape[:2], held)
        for start, length in self._blocks():
            own = received[..., start : start + length]
            at = start + self.plan.probes(packed + start, length)
            rows = at[(at >= held - queries) & (at < held)] - (held - queries)
            for some in rows.to(received.device).split(64):
                weights = attended.weights(some)[..., -held:][..., start : start + length]
                own += weights.mean(2).sum(2).to(received.dtype)
        if self._received is not None:
            received[..., : self._received.shape[-1]] += self._received
        self._received = received
        self._settle()

    def _settle(self) -> None:
        assert isinstance(self.key, LaterSide)
        assert isinstance(self.value, LaterSide)
        lengths = self.key.leaving()
        if not lengths:
            return
        assert self._received is not None
        gone, packed = sum(lengths), self.key.packed_tokens
        starts = [packed + sum(lengths[:number]) for number in range(len(lengths))]
        asked = torch.cat([self.plan.divisors(*block) for block in zip(starts, lengths, strict=True)])
        scores = self._received[..., :gone] / asked.to(self._received.device)
        for side in (self.key, self.value):
            assert side.codec is not None
            split = side.codec.quantizer
            assert isinstance(split, TokenSplit)
            own = scores if split.per_head else scores.mean(1, keepdim=True)
            side.settle(torch.cat([split.salient(part) for part in own.split(lengths, -1)], -1))
        self._received = self._received[..., gone:]

    @override
    def reset(self) -> None:
        super().reset()
        self._received = None

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._received is not None:
            self._received = self._received.index_select(0, indices.to(self._received.device))

    @override
    def check_crop(self, tokens_to_remove: int) -> None:
        raise Unsupported(f"method.plan: {self.lasting} (fork() the cache before)")
