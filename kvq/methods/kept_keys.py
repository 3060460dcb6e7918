"""Tokens that stay in full precision: the first ones (attention sinks), and tokens whose keys are chosen by text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvq.cache.chunk_masks import Transitions
from kvq.cache.packed import PackedSide
from kvq.cache.side import CacheSide, States
from kvq.codecs import Codec, Growable
from kvq.codecs.packed import append_rows
from kvq.codecs.stages import Rope
from kvq.config.method import ResidualSide
from kvq.errors import ConfigError, Unsupported
from kvq.kernels import PackedStates
from kvq.methods.policies import CHOOSES_TOKENS, Policy

Chosen = Bool[Tensor, "batch tokens"]


class SinkSide(CacheSide):
    """Keys or values whose first `sinks` tokens stay in full precision, before packed prefix and residual.

    Their bytes count as full-precision bytes, as those of the residual do.
    """

    version: ClassVar[int] = 1
    drops: ClassVar[bool] = False
    saved = (*CacheSide.saved, "_first")

    def __init__(
        self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool = False, sinks: int = 0
    ) -> None:
        self.most_sinks = sinks
        super().__init__(codec, residual, label, keep_decoded)

    def reset(self) -> None:
        super().reset()
        self._first: Growable | None = None

    @property
    def sink_tokens(self) -> int:
        return 0 if self._first is None else self._first.rows

    @property
    def tokens(self) -> int:
        return super().tokens + self.sink_tokens

    @property
    def residual_bytes(self) -> int:
        return super().residual_bytes + (0 if self._first is None else self._first.view.nbytes)

    @property
    def bits_per_element(self) -> float:
        if self.packed_tokens:
            return super().bits_per_element
        elements = self.tokens * self.elements_per_token
        return 8 * self.residual_bytes / elements if elements else 0.0

    @property
    def _rotations(self) -> Rope | None:
        """RoPE rotations of the tokens after the sinks, which are not encoded; None: the codec does not undo RoPE."""
        rope = super()._rotations
        return None if rope is None else rope.narrow(self.sink_tokens, rope.tokens - self.sink_tokens)

    def append(self, states: States) -> States:
        """As `CacheSide.append`; the first tokens become sinks, which attention reads before all others."""
        rest = self._keep(states)
        return self._after_sinks(None if rest is None else super().append(rest))

    def moves(self, queries: int, head: int = 0) -> Transitions:
        """As `CacheSide.moves`, for the tokens after the sinks; new tokens that become sinks are never encoded."""
        room = self.most_sinks - self.sink_tokens
        sinks = min(room, head + queries)
        start = self.sink_tokens + sinks
        if head + queries == sinks:
            return Transitions(start + self.packed_tokens, ())
        together = max(head - room, 0)
        rest = super().moves(head + queries - sinks - together, together)
        return Transitions(rest.start + start, tuple(query + sinks for query in rest.queries))

    def append_in_steps(self, states: States) -> tuple[States, States | None]:
        """As `CacheSide.append_in_steps`; the sinks, in front of the states, have no decoded form."""
        rest = self._keep(states)
        if rest is None:
            return self._after_sinks(None), None
        visible, decoded = super().append_in_steps(rest)
        return visible if visible.shape[2] == self.tokens else self._after_sinks(visible), decoded

    def _keep(self, states: Tensor) -> Tensor | None:
        """Store the states that are sinks and return those after them; None: there are none."""
        count = min(self.most_sinks - self.sink_tokens, states.shape[2])
        if not count:
            return states
        super()._receive(states)
        first = states[:, :, :count]
        self._first = append_rows(self._first, first.clone() if self._first is None else first)
        return states[:, :, count:] if states.shape[2] > count else None

    def _receive(self, states: Tensor) -> bool:
        """Check new states as `CacheSide._receive`; return whether they are the first after the sinks."""
        super()._receive(states)
        return not self.packed_tokens and not self.residual_tokens

    def _after_sinks(self, states: Tensor | None) -> Tensor:
        """The sinks followed by `states` (None: by nothing), joined along the tokens."""
        if self._first is None:
            assert states is not None
            return states
        return self._first.view if states is None else torch.cat([self._first.view, states], 2)

    def check_finite(self) -> None:
        """As `CacheSide.check_finite`, for the sinks too."""
        if self._first is not None:
            self._require(torch.isfinite(self._first.view).all())
        super().check_finite()

    def select(self, index: Tensor) -> None:
        super().select(index)
        if self._first is not None:
            self._first = self._first.select(index)


class PackedSinkSide(SinkSide, PackedSide):
    """A `SinkSide` that can return its tokens in stored form."""

    def append_packed(self, states: States) -> PackedStates:
        rest = self._keep(states)
        return self._stored() if rest is None else super().append_packed(rest)

    def _stored(self) -> PackedStates:
        stored = super()._stored()
        return replace(stored, full=self._after_sinks(stored.full), sinks=self.sink_tokens)


def packed_side_of(like: CacheSide) -> PackedSide:
    """An empty side that can return its tokens in stored form, with the settings of `like`."""
    if isinstance(like, SinkSide):
        return PackedSinkSide(like.codec, like.residual, like.label, sinks=like.most_sinks)
    return PackedSide(like.codec, like.residual, like.label)


def make_side(codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool, sinks: int) -> CacheSide:
    """An empty cache side: a `SinkSide` where there is a codec and `sinks` is not 0, else a plain `CacheSide`.

    Args:
        sinks: first tokens that stay in full precision.
    """
    if codec is None or not sinks:
        return CacheSide(codec, residual, label, keep_decoded)
    return SinkSide(codec, residual, label, keep_decoded, sinks)


class KeptRows(CacheSide):
    """Keys or values whose chosen tokens (`note_kept`) are also kept in full precision, and so read by attention.

    These tokens have codes as all others; their full-precision rows and their positions (int32) count in addition.

    Attributes:
        missing: error message for tokens that were added without `note_kept`.
    """

    missing: ClassVar[str]
    drops: ClassVar[bool] = False
    saved = (*CacheSide.saved, "_chosen", "_at", "_rows")

    def reset(self) -> None:
        super().reset()
        self._chosen: Chosen | None = None
        self._at: Int[Tensor, "2 kept"] | None = None
        self._rows: Growable | None = None
        self._in_parts = False

    def note_kept(self, chosen: Chosen) -> None:
        """Receive a mask of the next tokens, true for those to keep in full precision; called before `append`."""
        self._chosen = chosen if self._chosen is None else torch.cat([self._chosen, chosen], 1)

    def _states_to_encode(self, states: States, chosen: Chosen, block: int | None) -> States:
        """The states to encode, of the same shape: `states` itself, or in a subclass with others for the kept tokens.

        Args:
            states: all tokens that are to be encoded.
            chosen: true for the tokens that are kept in full precision.
            block: tokens per block of the codec; None: all in one block.
        """
        return states

    @property
    def packed_bytes(self) -> int:
        if self._rows is None or self._at is None:
            return super().packed_bytes
        return super().packed_bytes + self._rows.view.nbytes + self._at.shape[1] * 4  # of a kept token: int32

    def append_then_steps(self, states: States, head: int) -> tuple[States, States | None]:
        self._check_all_noted(states)
        self._in_parts = True
        try:
            return super().append_then_steps(states, head)
        finally:
            self._in_parts = False

    def _receive(self, states: Tensor) -> bool:
        """Check that `note_kept` covered these tokens, and check their states; return whether they are the first."""
        if not self._in_parts:
            self._check_all_noted(states)
        return super()._receive(states)

    def _check_all_noted(self, states: Tensor) -> None:
        """Raise `Unsupported` unless `note_kept` has covered exactly the cached tokens and `states`."""
        if self._chosen is None or self._chosen.shape != (states.shape[0], self.tokens + states.shape[2]):
            raise Unsupported(f"{self.label}: {self.missing}; reset() the cache")

    def _encode(self, states: Tensor, block: int | None, decoded: bool = False) -> Tensor | None:
        """As `CacheSide._encode`; also stores the kept tokens in full precision, which decoded states contain."""
        start = self.packed_tokens
        assert self._chosen is not None
        chosen = self._chosen[:, start : start + states.shape[2]]
        out = super()._encode(self._states_to_encode(states, chosen, block), block, decoded)
        at = chosen.nonzero().T
        rows = states[at[0], :, at[1]].transpose(0, 1)
        if at.shape[1]:
            moved = at + torch.tensor([[0], [start]], device=at.device)
            self._at = moved if self._at is None else torch.cat([self._at, moved], 1)
            self._rows = append_rows(self._rows, rows)
        return None if out is None else _with_rows_at(out, at, rows)

    def _past(self) -> Tensor:
        """The packed tokens, decoded, with the kept ones in full precision."""
        past = super()._past()
        return past if self._at is None or self._rows is None else _with_rows_at(past, self._at, self._rows.view)

    def select(self, index: Tensor) -> None:
        super().select(index)
        if self._chosen is not None:
            self._chosen = self._chosen.index_select(0, index.to(self._chosen.device))
        if self._at is not None and self._rows is not None:
            kept = [(self._at[0] == entry).nonzero()[:, 0] for entry in index.tolist()]
            entries = torch.cat([torch.full_like(one, number) for number, one in enumerate(kept)])
            which = torch.cat(kept)
            self._at = torch.stack([entries, self._at[1, which]])
            self._rows = Growable(self._rows.view.index_select(-2, which))

    def forget(self, tokens: int) -> None:
        if self._chosen is not None:
            self._chosen = self._chosen[:, :tokens]


def _with_rows_at(states: States, at: Int[Tensor, "2 kept"], rows: Tensor) -> Tensor:
    """A copy of the states in which tokens `at` (batch, then token indices) are `rows`, `[heads, kept, head_dim]`."""
    out = states.clone()
    out[at[0], :, at[1]] = rows.transpose(0, 1)
    return out


@dataclass(frozen=True)
class KeptKeys(Policy):
    """Tokens, given as text, whose keys some layers keep in full precision in addition to their codes.

    Attributes:
        texts: text of the tokens, such as `","`; all with it are kept, also those with white space around it (`" ,"`).
        layers: layers that keep them; negative numbers count from the last.
        ids: ids of the tokens; None before `bind_kept_keys`.

    Source: NSNQuant (arXiv 2505.18231), section 3.1, where commas' keys are kept in the first layer of CQ-4c9b.
    """

    texts: tuple[str, ...]
    layers: tuple[int, ...]
    ids: tuple[int, ...] | None = None
    setting = "kept_keys"
    does = "keeps keys of chosen tokens"
    needs = frozenset({"own_tokens"})
    excludes = CHOOSES_TOKENS

    def bind_tokenizer(self, tokenizer: Any) -> KeptKeys:
        """A copy with the ids of the tokens. Raises: ConfigError: a text that is not one token."""
        texts, vocabulary = {*self.texts}, tokenizer.get_vocab().items()
        strings = ((number, tokenizer.convert_tokens_to_string([token])) for token, number in vocabulary)
        found = {number: those for number, string in strings if (those := texts & {string, string.strip()})}
        if missing := sorted(texts.difference(*found.values())):
            count = len(tokenizer.encode(missing[0], add_special_tokens=False))
            raise ConfigError(f"method.kept_keys.texts: '{missing[0]}' is {count} tokens of this model; one each")
        return replace(self, ids=tuple(sorted(found)))

    def wrap_side(self, like: CacheSide, side: str, layer: int, layers: int) -> CacheSide:
        """A `KeptSide` for keys of the chosen layers. Raises: ConfigError: `bind_kept_keys` has not been called."""
        if side != "key" or layer not in layer_indices(self.layers, layers):
            return like
        if self.ids is None:
            raise ConfigError("method.kept_keys: texts, not yet tokens; kvq.bind_kept_keys(method, tokenizer)")
        return KeptSide(like.codec, like.residual, like.label, like.keep_decoded, self.ids)


def layer_indices(chosen: Iterable[int], layers: int) -> set[int]:
    """Layer indices from 0 to `layers` - 1; negative numbers count from the last, those out of range are left out."""
    return {number % layers for number in chosen if -layers <= number < layers}


class KeptSide(KeptRows):
    """Keys of a layer; those of tokens with chosen ids are also kept in full precision and read in place of codes.

    Args:
        ids: tokens of the vocabulary whose keys are kept.
    """

    version: ClassVar[int] = 2
    missing = "method.kept_keys needs the ids of all tokens"

    def __init__(
        self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool, ids: tuple[int, ...]
    ) -> None:
        self._ids = torch.tensor(ids)
        super().__init__(codec, residual, label, keep_decoded)

    def receive_tokens(self, tokens: Int[Tensor, "batch tokens"] | None) -> None:
        """Receive the ids of the next tokens before their keys. Raises: Unsupported: there are no ids."""
        if tokens is None:
            raise Unsupported(f"{self.label}: method.kept_keys chooses tokens by input_ids, of which there are none")
        self.note_kept(torch.isin(tokens, self._ids.to(tokens.device)))
