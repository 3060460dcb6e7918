"""Adaptive tiers: tokens move between codecs of 4, 3, 2 and 1 bits with the attention that they receive."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.cache.side import States
from kvq.cache.store import BlockStore, Recompression
from kvq.codecs import BlockRun, Codec, Growable, Packed, TokenTiers, pack, unpack
from kvq.codecs.packed import pack_tokens, unpack_tokens
from kvq.codecs.split import TIER_BITS
from kvq.codecs.stages import Rope
from kvq.errors import ConfigError, require
from kvq.methods.mixed_precision import DeferredSide, MixedPrecision, PlannedLayer

Tiers = UInt8[Tensor, "batch heads tokens"]


class AdaptiveTiers(MixedPrecision):
    """Gives a token the tier of the attention that it has received lately, and moves it as that changes.

    A token's score is the exponential mean of its weights over the queries that could see it, for each KV head. Tiers
    are chosen when a block leaves full precision: for its tokens, and anew for all before it. A token that moves is
    decoded and encoded again; what was lost stays lost.

    Args:
        decay: weight of the earlier mean when a further query is averaged in.
        thresholds: lowest score of each tier but the last, descending.
        relative: thresholds are multiples of 1/T, the mean weight of T tokens; else attention weights.
        hysteresis: share of a threshold by which a score must be beyond it before the token moves.
        every_step: choose tiers anew after every forward (a decoded token), as the source does.

    Source: kvquant-plus-plus, section 3.3, which has neither thresholds nor hysteresis and moves tokens at every step.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        decay: float | int = 0.9,
        thresholds: Sequence[float | int] = (2, 0.5, 0.125),
        relative: bool = True,
        hysteresis: float | int = 0.25,
        every_step: bool = False,
    ) -> None:
        require(0 <= decay < 1, "decay", decay, "a share, 0 to below 1")
        require(0 <= hysteresis < 1, "hysteresis", hysteresis, "a share, 0 to below 1")
        if not thresholds or min(thresholds) <= 0 or any(a <= b for a, b in itertools.pairwise(thresholds)):
            raise ConfigError(f"thresholds={list(thresholds)}: positive and falling, one less than there are tiers")
        self.decay, self.thresholds, self.relative, self.hysteresis = decay, list(thresholds), relative, hysteresis
        self.every_step = every_step

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """A `TierLayer` with the settings of `like`."""
        return TierLayer(like, self)

    def tiers(self, scores: Float[Tensor, "*lead"], tokens: int, now: Tensor | None = None) -> UInt8[Tensor, "*lead"]:
        """Tier of each score, among `tokens` tokens. `now`: current tiers, kept within the hysteresis (None: none)."""
        if now is None:
            return self._tier_index(scores, tokens, 1.0)
        best, worst = (self._tier_index(scores, tokens, 1 + side * self.hysteresis) for side in (-1, 1))
        return torch.minimum(torch.maximum(now, best), worst)

    def _tier_index(self, scores: Tensor, tokens: int, factor: float | int) -> Tensor:
        """Tier index of each score, 0 for the most bits: how many thresholds, times `factor`, are above it.

        If `relative`, thresholds are also divided by the number of `tokens`.
        """
        unit = factor / tokens if self.relative else factor
        return sum((scores < threshold * unit).to(torch.uint8) for threshold in self.thresholds)  # type: ignore[return-value]


class TierStore(BlockStore):
    """Packed tokens in one list per tier, sequence by sequence and head by head, and a 2-bit tier index for each token.

    Attributes:
        moves: number of tokens (of one head) that were decoded and encoded again so far.
        lost: sum of squared differences between their decoded states before and after.
        energy: sum of squares of their decoded states before.
    """

    saved = ("_tokens", "moves", "lost", "energy", "_index", "_lists", "_like")

    def __init__(self, codec: Codec, keep_decoded: bool) -> None:
        super().__init__(codec, keep_decoded)
        assert isinstance(codec.quantizer, TokenTiers)
        self._codecs = list(codec.quantizer.codecs.values())
        self._index: Tensor | None = None
        self._tokens = 0
        self._lists: tuple[Packed | None, ...] = (None,) * len(self._codecs)
        self._like: Tensor | None = None
        self.moves, self.lost, self.energy = 0, 0.0, 0.0

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.packed) + (0 if self._index is None else self._index.numel())

    @property
    def packed(self) -> list[Packed]:
        """The codes of each tier that has tokens: those of all sequences and heads as one head of one sequence."""
        return [held for held in self._lists if held is not None]

    @property
    def tiers(self) -> Tiers:
        """Tier index of each token held, 0 for the most bits."""
        assert self._index is not None
        return unpack([self._index], TIER_BITS, self._tokens)[..., 0]

    def revise(self, states: States, tiers: Tiers) -> None:
        """Append and encode `states`; encode stored tokens again whose tier changes. `tiers`: of old and new tokens."""
        before = self.past(None) if self.tokens else states[:, :, :0]
        old = torch.full_like(tiers, len(self._codecs))
        if self.tokens:
            old[..., : self.tokens] = self.tiers
        moved = (old != tiers)[..., : self.tokens]
        all_states = torch.cat([before, states], 2)
        lists = [self._new_tier_list(number, all_states, old, tiers) for number in range(len(self._codecs))]
        self._lists, self._like = tuple(lists), states.new_empty(0, states.shape[-1])
        self._set_tiers(tiers)
        if self.keep_decoded or bool(moved.any()):
            self._decoded = None
            after = self.past(None)
            rest = (after[:, :, : before.shape[2]] - before)[moved].double()
            self.moves += int(moved.sum())
            self.lost += float(rest.square().sum())
            self.energy += float(before[moved].double().square().sum())
            self._decoded = Growable(after) if self.keep_decoded else None

    def _set_tiers(self, tiers: Tiers) -> None:
        """Store the tier index of each token, packed."""
        self._index, self._tokens = pack(tiers.unsqueeze(-1), TIER_BITS)[0], tiers.shape[-1]

    def _new_tier_list(self, number: int, all_states: States, old: Tiers, new: Tiers) -> Packed | None:
        """The new list of tier `number`, in token order: codes of tokens that stay in it, and new codes of others.

        Args:
            all_states: all tokens, decoded (new ones in full precision).
            old, new: tier of each token before and after; `old` of a new token is the number of tiers.

        Returns:
            None where the tier has no tokens.
        """
        codec, held = self._codecs[number], self._lists[number]
        coming, staying = ((new == number) & same for same in (old != number, old == number))
        if not bool((new == number).any()):
            return None
        widths = codec.token_widths(1, all_states.shape[-1], all_states)
        pieces = []
        if bool(coming.any()):
            fresh = codec.encode(all_states[coming][None, None])
            pieces.append((coming, unpack_tokens(fresh.parts, widths, fresh.tokens)))
        if held is not None and bool(staying.any()):
            rows = unpack_tokens(held.parts, widths, held.tokens)
            kept = (new == number)[old == number].nonzero()[:, 0]
            pieces.append((staying, {name: part.index_select(2, kept) for name, part in rows.items()}))
        places = torch.cat([mask.flatten().nonzero()[:, 0] for mask, _ in pieces])
        order = places.argsort()
        joined = {name: torch.cat([rows[name] for _, rows in pieces], 2)[:, :, order] for name in pieces[0][1]}
        return _one_block(joined, widths, len(order), all_states)

    def past(self, rope: Rope | None) -> States:
        if self._decoded is not None:
            return self._decoded.view
        assert self._like is not None
        tiers = self.tiers
        out = self._like.new_empty(*tiers.shape, self._like.shape[-1])
        for number, (codec, held) in enumerate(zip(self._codecs, self._lists, strict=True)):
            if held is not None:
                out[tiers == number] = codec.decode(held)[0, 0]
        return out

    def read(self, state: dict[str, Any], rope: Rope | None) -> None:
        super().read(state, rope)
        self._decoded = Growable(self.past(None)) if self.keep_decoded and self.tokens else None

    def select(self, index: Tensor) -> None:
        """Replace the batch by its sequences `index` (beam search), with the codes that their tokens have."""
        assert self._like is not None
        before = self.tiers
        lists: list[Packed | None] = []
        index = index.to(before.device)
        tiers = before.index_select(0, index)
        for number, (codec, held) in enumerate(zip(self._codecs, self._lists, strict=True)):
            mine = before == number
            places = torch.zeros(mine.shape, dtype=torch.long, device=mine.device)
            places[mine] = torch.arange(int(mine.sum()), device=mine.device)
            picked = places.index_select(0, index)[tiers == number]
            if held is None or not len(picked):
                lists.append(None)
                continue
            widths = codec.token_widths(1, self._like.shape[-1], self._like)
            rows = unpack_tokens(held.parts, widths, held.tokens)
            chosen = {name: part.index_select(2, picked) for name, part in rows.items()}
            lists.append(_one_block(chosen, widths, len(picked), self._like))
        self._lists = tuple(lists)
        self._set_tiers(tiers)
        if self._decoded is not None:
            self._decoded = self._decoded.select(index)

    def fork(self) -> TierStore:
        """A copy that grows independently; it shares the lists, which are never changed in place."""
        other = copy.copy(self)
        other._decoded = None if self._decoded is None else self._decoded.fork()
        return other


def _one_block(rows: dict[str, Tensor], widths: dict[str, int], tokens: int, like: Tensor) -> Packed:
    """`Packed` of one head and one block, from parts with a row per token; `widths`: bits of each part, by name."""
    parts = pack_tokens(rows, widths)
    run = BlockRun(tokens, 1, {name: part.shape[2] for name, part in parts.items()})
    return Packed(parts, (run,), 1, 1, like.shape[-1], like.dtype)


class TierSide(DeferredSide):
    """Keys or values whose packed prefix is a `TierStore`."""

    @property
    def store(self) -> TierStore:
        """The packed prefix."""
        if self._store is None:
            assert self.codec is not None
            self._store = self._new_store(self.codec)
        assert isinstance(self._store, TierStore)
        return self._store

    def _new_store(self, codec: Codec) -> TierStore:
        return TierStore(codec, self.keep_decoded)

    @property
    def recompression(self) -> Recompression | None:
        """How often tokens changed tiers so far, and the squared error that this added; None before the first block."""
        return None if self._store is None else Recompression(self.store.moves, self.store.lost, self.store.energy)

    def revise(self, tiers: Tiers) -> None:
        """Encode the oldest residual tokens, and again packed ones whose tier changes.

        `tiers`: of the packed tokens, followed by the residual tokens to encode.
        """
        assert self._full is not None
        gone, states = tiers.shape[-1] - self.packed_tokens, self._full.view
        self._check_finite(states[:, :, :gone])
        self.store.revise(states[:, :, :gone], tiers)
        self._full = Growable(states[:, :, gone:].clone()) if gone < states.shape[2] else None


class TierLayer(PlannedLayer):
    """Keys and values of one layer, whose tokens move between tiers by the attention they receive."""

    def __init__(self, like: KVCacheLayer, policy: AdaptiveTiers) -> None:
        key, value = (TierSide(one.codec, one.residual, one.label, one.keep_decoded) for one in (like.key, like.value))
        for side in (key, value):
            split = None if side.codec is None else side.codec.quantizer
            if not isinstance(split, TokenTiers) or side.codec is None or side.codec.stages:
                raise ConfigError(
                    "method.token_policy: AdaptiveTiers needs codecs without stages over TokenTiers for keys and values"
                )
            if len(split.codecs) != len(policy.thresholds) + 1:
                raise ConfigError(
                    f"method.token_policy.thresholds={policy.thresholds}: one less than the {len(split.codecs)} tiers"
                )
        super().__init__(key, value)
        self.policy = policy

    def observe(self, attended: Attended) -> None:
        """Update the exponential mean of each token's attention weights, and encode complete blocks."""
        decay = self.policy.decay
        for weights in attended.chunks():
            rows = weights.shape[-2]
            later = torch.arange(rows - 1, -1, -1, device=weights.device, dtype=weights.dtype)
            self._add_received(((1 - decay) * decay**later @ weights.mean(2)), decay**rows)
        self._encode_leaving()

    def _scores(self, tokens: int) -> Float[Tensor, "batch kv_heads tokens"]:
        """Exponential mean of the weights of each of the first `tokens` tokens, over the queries that could see it."""
        assert self._received is not None
        seen = torch.arange(self._received.shape[-1], 0, -1, device=self._received.device)[:tokens]
        return self._received[..., :tokens] / (1 - self.policy.decay ** seen.to(self._received.dtype))

    def _encode_leaving(self) -> None:
        """Choose the tiers of tokens in complete blocks and of all earlier tokens; encode those whose tier changes."""
        gone, held = sum(self.key.leaving_lengths()), self.key.packed_tokens
        if not gone and not (self.policy.every_step and held):
            return
        scores, seen = self._scores(held + gone), self.key.tokens
        tiers = self.policy.tiers(scores, seen)
        if held:
            tiers[..., :held] = self.policy.tiers(scores[..., :held], seen, self.key.store.tiers)
        for side in (self.key, self.value):
            side.revise(tiers)
