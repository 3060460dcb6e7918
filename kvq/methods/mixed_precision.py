"""Mixed precision: policies that give the tokens of a layer different numbers of bits, and their cache layers.

OTT keeps a pool of tokens in full precision; ZipCache and kvquant-plus-plus give tokens bits by the attention to them.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache.chunk_masks import Transitions
from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.cache.side import CacheSide, States
from kvq.codecs import Growable
from kvq.codecs.split import PlannedCodec, TokenSplit
from kvq.config.method import Policy as ResidualPolicy
from kvq.config.method import PrefillBlock, Residual
from kvq.errors import ConfigError, Unsupported, at_least
from kvq.methods.policies import CHOOSES_TOKENS, Policy


class AttendedLayer(KVCacheLayer):
    """Sums the attention weights that each token receives, per KV head, for policies that choose tokens by them.

    Attention does not read the sums, so they do not count as storage.

    Attributes:
        setting: names the policy in errors.
    """

    setting: str
    no_padding_reason = "goes by attention, in which padding takes part"
    saved = (*KVCacheLayer.saved, "_received")
    _received: Float[Tensor, "batch kv_heads tokens"] | None = None

    def _add_received(self, received: Float[Tensor, "batch kv_heads tokens"], kept: float = 1.0) -> None:
        """Scale the sums by `kept` and add `received`, the weights of all tokens, summed over the new queries."""
        if self._received is not None:
            new = received.shape[-1] - self._received.shape[-1]
            received = received + kept * torch.nn.functional.pad(self._received, (0, new))
        self._received = received

    def reset(self) -> None:
        super().reset()
        self._received = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._received is not None:
            self._received = self._received.index_select(0, indices.to(self._received.device))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises: Unsupported: always; the sums before an update are not kept."""
        raise Unsupported(f"{self.setting}: {self.irreversible} (fork() the cache before)")


class MixedPrecision(Policy):
    """A policy that chooses how to store each token that leaves full precision, from more than its block's states."""

    setting = "token_policy"
    does = "chooses tokens as they leave full precision"
    needs = frozenset({"own_tokens"})
    excludes = CHOOSES_TOKENS | {
        *("two_codecs", "all_at_once", "prompt_at_once", "latent"),
        *("own_window", "sides_apart"),
    }

    def check_residual(self, name: str, residual: Residual) -> None:
        """Raise `ConfigError` unless keys and values have one residual, of policy `block` and at least 2 tokens."""
        key = residual.key
        if key != residual.value or key.policy is not ResidualPolicy.block or key.size < 2:
            raise ConfigError(
                f"residual: method={name} plans keys and values together, so both have policy=block and one size, at "
                "least 2"
            )


class OutlierTokens(MixedPrecision):
    """A pool of full-precision tokens per KV head: those whose keys have the smallest sum of magnitudes.

    Each time a block leaves the residual, the pool is chosen anew among its tokens and the block's.

    Args:
        pool: number of tokens.
        exempt_layers: number of first layers without a pool.

    Source: OTT (arXiv 2505.10938).
    """

    version: ClassVar[int] = 1
    needs = MixedPrecision.needs | {"any_position"}

    def __init__(self, pool: int = 3, exempt_layers: int = 2) -> None:
        at_least("pool", pool, 1)
        at_least("exempt_layers", exempt_layers, 0)
        self.pool, self.exempt_layers = pool, exempt_layers

    def check_residual(self, name: str, residual: Residual) -> None:
        super().check_residual(name, residual)
        if self.pool >= residual.key.size:
            raise ConfigError(f"method.token_policy.pool={self.pool}: below residual.size ({residual.key.size})")

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """A `PoolLayer` with the settings of `like`; `like` itself in full precision and in the first layers."""
        quantized = [side.codec is not None for side in (like.key, like.value)]
        if layer < self.exempt_layers or not any(quantized):
            return like
        if not all(quantized):
            raise ConfigError(f"method.token_policy: keys and values of layer {layer} change places; quantize both")
        return PoolLayer(like, self)


class Saliency(MixedPrecision):
    """Gives more bits to the tokens that probe queries attend to: a block's last queries, and some drawn at random.

    Args:
        recent: share of a block's queries that are its last; the last one is always a probe.
        random: share of them drawn from the others. With both 0 only the last query ranks the tokens.
        seed: of the random draw; independent of the seed of the run.

    Source: ZipCache (arXiv 2405.14256), sections 4.3 and 4.4; kvquant-plus-plus, section 3.1 (both shares 0).
    """

    version: ClassVar[int] = 1

    def __init__(self, recent: float | int = 0.05, random: float | int = 0.05, seed: int = 0) -> None:
        if min(recent, random) < 0 or recent + random > 1:
            raise ConfigError(f"recent={recent}, random={random}: shares, together at most 1")
        self.recent, self.random, self.seed = recent, random, seed

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """A `SaliencyLayer` with the settings of `like`."""
        return SaliencyLayer(like, self)

    def probes(self, start: int, length: int) -> Int[Tensor, " probes"]:
        """Positions of the probes within a block of `length` tokens that begins at token `start`, ascending.

        The last position is always a probe.
        """
        last = max(round(self.recent * length), 1)
        others = min(round(self.random * length), length - last)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + start)
        drawn = torch.randperm(length - last, generator=generator)[:others]
        return torch.cat([drawn.sort().values, torch.arange(length - last, length)])

    def divisors(self, start: int, length: int) -> Int[Tensor, " tokens"]:
        """For each token of a block, the number of probes that see it, by which its summed weights are divided."""
        probes = self.probes(start, length)
        return (probes[:, None] >= torch.arange(length)).sum(0)


class PoolSide(CacheSide):
    """Keys or values with a pool of outlier tokens (`OutlierTokens`) in full precision, in front of a block's tokens.

    At each block's end the pool is chosen anew from both and the rest is encoded.

    `leader`: the side that chooses the pool's tokens for this one (keys, for values); None: this side chooses.
    """

    saved = (*CacheSide.saved, "pooled")

    def __init__(self, like: CacheSide, pool: int, leader: PoolSide | None = None) -> None:
        self.pool, self.leader = pool, leader
        self.pooled = 0
        self.orders: list[Int[Tensor, "batch heads tokens"]] = []
        super().__init__(like.codec, like.residual, like.label, like.keep_decoded)

    def reset(self) -> None:
        super().reset()
        self.pooled = 0

    def moves(self, queries: int, head: int = 0) -> Transitions:
        """As `CacheSide.moves`; each complete block encodes one group of tokens, and the pool stays in place."""
        fresh = self.residual_tokens - self.pooled
        groups = 0 if self.codec is None else (fresh + queries - 1) // self._group
        when = [self._group * (group + 1) - fresh for group in range(groups)]
        return Transitions(self.packed_tokens, tuple(query for query in when for _ in range(self._group)))

    def _order(self, states: States) -> Int[Tensor, "batch heads tokens"]:
        """Indices of the pool's tokens, then of the others, each in order of arrival."""
        if self.leader is not None:
            return self.leader.orders.pop(0)
        chosen = states.abs().sum(-1).sort(dim=-1, stable=True).indices[..., : self.pool]
        losing = torch.ones(states.shape[:3], dtype=torch.uint8, device=states.device).scatter_(-1, chosen, 0)
        order = losing.sort(dim=-1, stable=True).indices
        self.orders.append(order)
        return order

    def _flush(self, first: bool, decoded: bool = False) -> None:
        """For each complete block, choose the new pool among old pool and block, and encode the tokens not chosen."""
        count = (self.residual_tokens - self.pooled) // self._group
        if self.codec is None or self._full is None or not count:
            return
        states, end = self._full.view, self.pooled + count * self._group
        pool = states[:, :, : self.pooled]
        for group in states[:, :, self.pooled : end].split(self._group, 2):
            both = torch.cat([pool, group], 2)
            ordered = both.gather(2, self._order(both).unsqueeze(-1).expand(-1, -1, -1, both.shape[-1]))
            pool, rest = ordered[:, :, : self.pool], ordered[:, :, self.pool :]
            self._encode(rest, None)
        self._full = Growable(torch.cat([pool, states[:, :, end:]], 2))
        self.pooled = self.pool

    def check_crop(self, remove: int) -> None:
        """As `CacheSide.check_crop`; tokens of the pool cannot be removed."""
        super().check_crop(remove + self.pooled if remove else 0)


class BlockEndLayer(KVCacheLayer):
    """A layer that refuses, under `token_by_token`, a chunk in which a block is complete before the last token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `KVCacheLayer.update`. Raises: Unsupported: a chunk beyond the end of a block, under `token_by_token`."""
        if self.token_by_token and any(side.queries for side in self._moves(key_states.shape[2], 0)):
            raise Unsupported("method.token_policy: tokens fed one by one, beyond the end of a block; feed up to it")
        return super().update(key_states, value_states, *args, **kwargs)


class PoolLayer(BlockEndLayer):
    """Keys and values of one layer with a pool of full-precision tokens, chosen by the keys."""

    keeps_order = False
    irreversible = "tokens have changed places with those of a pool"

    @property
    def shuffled(self) -> bool:
        """True once a block is encoded: tokens of the pool are then cached after newer ones."""
        return bool(self.key.packed_tokens)

    def __init__(self, like: KVCacheLayer, policy: OutlierTokens) -> None:
        key = PoolSide(like.key, policy.pool)
        super().__init__(key, PoolSide(like.value, policy.pool, key))

    def fork(self) -> PoolLayer:
        other: Any = super().fork()
        other.key.orders, other.value.leader = [], other.key
        return other


class DeferredSide(CacheSide):
    """Keys or values that stay in full precision until `settle`, which is called after attention has read them."""

    def append(self, states: States) -> States:
        """Add states to the residual, without encoding any token, and return all cached tokens, oldest first."""
        self.begins = self._receive(states)
        self._hold(states)
        return self._visible()

    def append_in_steps(self, states: States) -> tuple[States, States | None]:
        """Return as `append`, and None: no token is read decoded before `settle`."""
        return self.append(states), None

    def leaving_lengths(self) -> list[int]:
        """Number of tokens of each block that is to be encoded now, oldest first; empty: no block is complete."""
        held = self.residual_tokens
        if self.begins and self.residual.prefill_block is PrefillBlock.whole and held >= self._group:
            return [held]
        return [self._group] * (held // self._group)

    def settle(self, mask: Tensor) -> None:
        """Encode the complete blocks; `mask` `[batch, heads or 1, tokens]` is true for their salient tokens."""
        assert isinstance(self.codec, PlannedCodec)
        with self.codec.planned(mask):
            self._flush(self.begins)


class PlannedLayer(BlockEndLayer, AttendedLayer):
    """Keys and values of one layer, whose blocks are encoded in `observe`, once the attention to them is known."""

    irreversible = "attention received cannot be taken back"
    setting = "method.token_policy"

    @property
    def observes(self) -> bool:
        return True


class SaliencyLayer(PlannedLayer):
    """Keys and values of one layer, whose tokens get bits by the attention they receive from probe queries."""

    def __init__(self, like: KVCacheLayer, policy: Saliency) -> None:
        key, value = (
            DeferredSide(side.codec, side.residual, side.label, side.keep_decoded) for side in (like.key, like.value)
        )
        for side in (key, value):
            if not isinstance(side.codec, PlannedCodec) or not isinstance(side.codec.quantizer, TokenSplit):
                raise ConfigError("method.token_policy: Saliency needs a PlannedCodec over a TokenSplit on both sides")
        super().__init__(key, value)
        self.policy = policy

    def observe(self, attended: Attended) -> None:
        """Sum the weights that probe queries give to residual tokens, and encode complete blocks."""
        side, queries = self.key, attended.query.shape[2]
        held, packed = side.residual_tokens, side.packed_tokens
        received = attended.key.new_zeros(*attended.key.shape[:2], held)
        lengths = side.leaving_lengths()
        if sum(lengths) < held:  # a block that is not complete
            lengths.append(side.residual.size)
        for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
            block_sums = received[..., start : start + length]
            at = start + self.policy.probes(packed + start, length)
            rows = at[(at >= held - queries) & (at < held)] - (held - queries)
            for some in rows.to(received.device).split(64):
                weights = attended.weights(some)[..., -held:][..., start : start + length]
                block_sums += weights.mean(2).sum(2).to(received.dtype)
        self._add_received(received)
        self._encode_leaving()

    def _encode_leaving(self) -> None:
        """Encode complete blocks of keys and values, with more bits for their salient tokens, and drop their sums."""
        lengths = self.key.leaving_lengths()
        if not lengths:
            return
        assert self._received is not None
        gone, packed = sum(lengths), self.key.packed_tokens
        starts = itertools.accumulate(lengths[:-1], initial=packed)
        asked = torch.cat([self.policy.divisors(*block) for block in zip(starts, lengths, strict=True)])
        scores = self._received[..., :gone] / asked.to(self._received.device)
        for side in (self.key, self.value):
            split = side.codec.quantizer  # a `TokenSplit`, which chooses the salient tokens
            side_scores = scores if split.per_head else scores.mean(1, keepdim=True)
            side.settle(torch.cat([split.salient(part) for part in side_scores.split(lengths, -1)], -1))
        self._received = self._received[..., gone:]
