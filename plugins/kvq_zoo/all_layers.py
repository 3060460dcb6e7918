"""A cache whose codec takes all layers at once: a token is encoded when every layer has its states.

Tokens leave full precision as in any cache. Those of earlier forwards leave layer by layer: the first layer that lets
one go encodes it with the states that the others still hold, and each layer reads its own part from then on. Those of
the present forward (a prompt) wait in full precision until the last layer has its states; attention does not read them
decoded before the next forward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.cache.layer import KVCacheLayer, Layer
from kvq.cache.side import CacheSide
from kvq.cache.store import BlockStore
from kvq.codecs import Codec, Packed
from kvq.codecs.stages import Rope
from kvq.config.method import ResidualSide
from kvq.errors import Unsupported
from kvq.methods.kept_keys import SinkSide
from kvq.methods.policies import Capabilities, Policy
from kvq.models.layers import kv_layers_of

States = Float[Tensor, "batch heads _tokens head_dim"]


_JOINED: Capabilities = frozenset({"codecs_alone", "two_codecs", "sides_apart", "own_window"})
_LATE: Capabilities = frozenset({"all_at_once", "decoded_at_once", "packed_attention"})


class AllLayers(Policy):
    """Sides whose codec takes all layers at once are encoded so; a stage brings the policy (`Stage.policy`)."""

    setting = "a codec"
    does = "encodes all layers together"
    needs = frozenset({"codecs_alone", "same_stages", "one_width", "all_layers"})
    excludes = _JOINED | _LATE

    def for_model(self, method: Any, config: Any) -> Any:
        """The method. Raises: Unsupported: a model whose layers differ, or some of which stay in full precision."""
        held = kv_layers_of(config)
        if len({(one.head_dim, one.value_dim) for one in held}) > 1:
            raise Unsupported(f"model: {method.name} encodes all layers together, which are alike")
        return method

    def wrap_side(self, like: CacheSide, side: str, layer: int, layers: int) -> CacheSide:
        """A `JoinedSide` in place of a side whose codec joins layers; any other side as it is."""
        if like.codec is None or not like.codec.joins_layers:
            return like
        return JoinedSide(like.codec, like.residual, like.label, like.keep_decoded, getattr(like, "most_sinks", 0))

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """The layer with both its sides, as one that is linked to all others."""
        return LayerOfAll(like.key, like.value)


class JoinedStates:
    """The packed tokens of keys, or of values, of all layers: heads of the first layer, then those of the next."""

    def __init__(self, sides: Sequence[JoinedSide], store: BlockStore | None = None) -> None:
        self.sides, self.store = sides, store
        self._decoded: tuple[int, Tensor] | None = None
        for place, side in enumerate(sides):
            side.place, side.joined = place, self
            if isinstance(side._store, LayerShare):
                side._store.joined = self

    def can_pack(self, tokens: int) -> bool:
        """Whether the first `tokens` tokens behind the sinks are packed, or every layer has the states to pack them."""
        packed = 0 if self.store is None else self.store.tokens
        return tokens <= packed or all(side.packed_tokens + side.residual_tokens >= tokens for side in self.sides)

    def encode(self, place: int, states: States, end: int, block: int | None, rope: Rope | None) -> None:
        """Encode the tokens up to `end` that are not packed, with `states` those of layer `place`, `block` at a time.

        Raises:
            DataError: states of some layer are NaN or infinite.
        """
        first = self.sides[0]
        if self.store is None:
            assert first.codec is not None
            self.store = first.new_store(first.codec)
        start = self.store.tokens
        if end <= start:
            return
        found = []
        for side in self.sides:
            if side.place != place:
                assert side._full is not None
                at = start - side.packed_tokens
                own = side._full.view[:, :, at : at + end - start]
                side._check_finite(own)
            else:
                own = states[:, :, states.shape[2] - (end - start) :]
            found.append(own.to(first.device))
        self.store.add(torch.cat(found, 1), block, None if rope is None else rope.to(first.device))

    def decoded_layer(self, place: int, start: int, end: int, rope: Rope | None) -> States:
        """Packed tokens `start` to `end` of layer `place`, decoded.

        All layers are decoded at once and the result is kept until every layer has read its part (`clear`).
        """
        assert self.store is not None
        if self._decoded is None or self._decoded[0] != self.store.tokens:
            turns = None if rope is None else rope.to(self.sides[0].device)
            self._decoded = self.store.tokens, self.store.past(turns)
        own = self._decoded[1].unflatten(1, (len(self.sides), -1))[:, place]
        return own[:, :, start:end].to(self.sides[place].device)

    def flush_waiting(self, first: bool) -> None:
        """Once every layer has the tokens of a forward, pack in each layer those that waited for the other layers."""
        if len({side.seen for side in self.sides}) == 1:
            for side in self.sides:
                SinkSide._flush(side, first)
            self.clear()

    def clear(self) -> None:
        """Forget the decoded tokens."""
        self._decoded = None

    def reset(self) -> None:
        """Forget the packed tokens of all layers."""
        self.store = None
        self.clear()

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, of all layers."""
        assert self.store is not None
        return 8 * self.store.nbytes / (self.store.tokens * sum(side.elements_per_token for side in self.sides))


class LayerShare(BlockStore):
    """One layer's view of the packed tokens of all layers.

    Bytes and stored parts are counted, saved and selected in the first layer; other layers have none.
    """

    saved = ("_tokens",)

    def __init__(self, joined: JoinedStates, place: int) -> None:
        self.joined, self.place = joined, place
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Packed tokens of this layer."""
        return self._tokens

    @property
    def _held(self) -> BlockStore | None:
        """The store of all layers' tokens where this is the first layer; None: another layer."""
        return None if self.place else self.joined.store

    @property
    def nbytes(self) -> int:
        """Stored bytes of all layers in the first layer, 0 in the others."""
        return 0 if self._held is None else self._held.nbytes

    @property
    def packed(self) -> list[Packed]:
        """The packed blocks of all layers in the first layer, none in the others."""
        return [] if self._held is None else self._held.packed

    def add(self, states: States, block: int | None, rope: Rope | None, decoded: bool = False) -> States | None:
        """Pack this layer's next tokens with those of all layers; with `decoded`, return them decoded."""
        start, self._tokens = self._tokens, self._tokens + states.shape[2]
        self.joined.encode(self.place, states, self._tokens, block, rope)
        return self.joined.decoded_layer(self.place, start, self._tokens, rope) if decoded else None

    def past(self, rope: Rope | None) -> States:
        """All packed tokens of this layer, decoded."""
        return self.joined.decoded_layer(self.place, 0, self._tokens, rope)

    def write(self) -> dict[str, Any]:
        """The number of tokens and, in the first layer, the packed tokens of all layers."""
        return {**super().write(), "joined": None if self._held is None else self._held.write()}

    def read(self, state: dict[str, Any], rope: Rope | None) -> None:
        """Read a saved share; the first layer's has the packed tokens of all layers."""
        self._tokens = state["_tokens"]
        if state["joined"] is not None:
            self.joined.reset()
            first = self.joined.sides[0]
            assert first.codec is not None
            self.joined.store = first.new_store(first.codec)
            self.joined.store.read(state["joined"], rope)

    def fork(self) -> LayerShare:
        """A copy that still reads the same joined tokens, until `LayerOfAll.link` gives it its own."""
        return copy.copy(self)

    def select(self, index: Tensor) -> None:
        """Keep, or repeat, sequences of the batch by their indices, once for all layers."""
        if self._held is not None:
            self._held.select(index)
            self.joined.clear()


class JoinedSide(SinkSide):
    """Keys or values of one layer whose packed tokens are encoded with those of all layers.

    Its version is that of the stage that asks for it (`AllLayers`).

    Raises:
        Unsupported: a residual that encodes tokens as they come.
    """

    place: int
    joined: JoinedStates | None = None
    device = torch.device("cpu")
    """Of the states that came last."""

    def __init__(
        self, codec: Codec, residual: ResidualSide, label: str, keep_decoded: bool = False, sinks: int = 0
    ) -> None:
        super().__init__(codec, residual, label, keep_decoded, sinks)
        if self._encodes_at_once:
            raise Unsupported(
                f"{label}: all layers are encoded together, which takes the states of all; use residual.policy=sliding "
                "or block with residual.size of at least 1, and no task.scoring=parallel"
            )

    def reset(self) -> None:
        """Forget all tokens of this side, and the packed tokens of all layers with them."""
        super().reset()
        if self.joined is not None:
            self.joined.reset()

    def _receive(self, states: Tensor) -> bool:
        """As `CacheSide._receive`, after noting the device of the new states."""
        self.device = states.device
        return super()._receive(states)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of the packed tokens, as a mean over all layers."""
        assert self.joined is not None
        return self.joined.bits_per_element if self.packed_tokens else super().bits_per_element

    def new_store(self, codec: Codec) -> BlockStore:
        """An empty store for the tokens of all layers together."""
        return super()._new_store(codec)

    def _new_store(self, codec: Codec) -> BlockStore:
        """An empty `LayerShare` of this side's layer."""
        assert self.joined is not None
        return LayerShare(self.joined, self.place)

    def _flush(self, first: bool, decoded: bool = False) -> Tensor | None:
        """As `CacheSide._flush`, as far as every layer has its states, then in all layers what waited for this one.

        Raises:
            Unsupported: a query would read a token decoded that came in the same forward.
        """
        assert self.joined is not None
        out = None
        if self.joined.can_pack(self.packed_tokens + self._leaving(self.residual_tokens, first)):
            out = super()._flush(first, decoded)
        elif decoded:
            raise Unsupported(
                f"{self.label}: all layers are encoded together, and of these tokens a query reads one decoded; "
                f"feed at most {self._kept or self._group} at once, up to where a block leaves full precision"
            )
        self.joined.flush_waiting(first)
        return out


class LayerOfAll(KVCacheLayer):
    """Keys and values of a layer, one of which at least is encoded with those of all layers."""

    irreversible = "tokens of all layers are encoded together"
    no_padding_reason = "encodes all layers together"

    def link(self, layers: Sequence[Layer]) -> None:
        """Join the keys of all layers, and their values; what they have packed is forked."""
        for sides in ([layer.key for layer in layers], [layer.value for layer in layers]):
            if isinstance(sides[0], JoinedSide):
                before = sides[0].joined
                JoinedStates(sides, None if before is None or before.store is None else before.store.fork())

    def check_rotations(self, layers: Sequence[Layer]) -> None:
        """Raise `Unsupported` where layers that are encoded together have different rotary embeddings."""
        for side in (self.key, self.value):
            joined = side.joined if isinstance(side, JoinedSide) and side.uses_rope else None
            if joined is not None and any(one.rope is not side.rope for one in joined.sides):
                raise Unsupported(f"model: {side.label} and those of other layers have different rotary embeddings")
