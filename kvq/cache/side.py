"""Keys or values of one layer: a packed, immutable prefix followed by a full-precision residual."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvq.cache.chunk_masks import Transitions
from kvq.cache.rotary import RopeTable
from kvq.cache.store import BlockStore, States, TokenStore
from kvq.codecs import Codec, Growable, Packed
from kvq.codecs.packed import append_rows
from kvq.codecs.stages import Rope
from kvq.config.method import Policy, PrefillBlock, ResidualSide, leaving
from kvq.errors import DataError, Unsupported


def reads_at_once(device: torch.device) -> bool:
    """Whether a number on this device can be read without waiting for queued work, as on a CPU."""
    return device.type == "cpu"


class CacheSide:
    """The cached keys or values of one layer: `append` adds states and returns what attention reads.

    Args:
        codec: None keeps everything in full precision.
        label: names the side in errors, such as "layer 3 keys".
        keep_decoded: also keep the decoded copy, so that a long past is decoded once (bit-identical, more memory).

    Under `block`, tokens wait in the residual until it holds `size` of them and are then encoded together, *after* the
    attention that sees them; under `sliding`, the newest `size` stay and whole groups before them leave. Under `none`
    (and `block` of size 0) every update is encoded as it comes and attention reads only decoded states.
    """

    saved: ClassVar[tuple[str, ...]] = ("_shape", "_full", "dropped")
    """Attributes that a file holds, besides the packed prefix; classes with more state add to it."""

    def __init__(self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool = False) -> None:
        self.codec, self.residual, self.label, self.keep_decoded = codec, residual, label, keep_decoded
        self._kept, self._group = residual.schedule(None if codec is None else codec.token_group)
        if codec is not None and codec.fits_first_tokens and self._encodes_at_once:
            raise Unsupported(
                f"{label}: {type(codec).__name__} is fitted to the first tokens that leave full precision; use "
                "residual.policy=block or sliding with residual.size of at least 1"
            )
        self.rope: RopeTable | None = None
        """Rotations of the tokens, for a codec that undoes RoPE; they cover new tokens before these are appended."""
        self.reset()

    recompression: Any = None
    """`Recompression`: errors from encoding packed tokens again; None: that is never done."""
    wants_hidden: ClassVar[bool] = False
    """Whether the cache calls `receive_hidden`."""

    drops: ClassVar[bool] = True
    """Whether tokens outside of a window can be dropped."""

    def reset(self) -> None:
        self._store: BlockStore | None = None
        self.dropped = 0  # first tokens, outside of a window
        self._full: Growable | None = None
        self._shape: tuple[int, int, int] | None = None
        self._finite: Bool[Tensor, ""] | None = None  # whether encoded states were finite; `check_finite` reads it

    def receive_tokens(self, tokens: Int[Tensor, "batch tokens"] | None) -> None:
        """Receive the ids of the next tokens before their states; None: there are no ids."""

    def receive_hidden(self, hidden: Float[Tensor, "batch tokens channels"]) -> None:
        """Receive the hidden states of the next tokens before their keys or values."""

    @property
    def _encodes_at_once(self) -> bool:
        """Whether every token is encoded in the update that it comes in."""
        return self.residual.policy is Policy.none or self.residual.size == 0

    @property
    def uses_rope(self) -> bool:
        """Whether the codec undoes and redoes RoPE, for which it needs the rotations of the tokens."""
        return self.codec is not None and self.codec.uses_rope

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first tokens."""
        return -1 if self._shape is None else self._shape[0]

    @property
    def packed_tokens(self) -> int:
        """Tokens in the packed prefix."""
        return 0 if self._store is None else self._store.tokens

    @property
    def residual_tokens(self) -> int:
        """Cached tokens in full precision."""
        return 0 if self._full is None else self._full.rows

    @property
    def tokens(self) -> int:
        """Cached tokens."""
        return self.packed_tokens + self.residual_tokens

    @property
    def seen(self) -> int:
        """Tokens cached and dropped."""
        return self.tokens + self.dropped

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed prefix: codes and side information."""
        return 0 if self._store is None else self._store.nbytes

    @property
    def packed(self) -> list[Packed]:
        """The stored parts of the packed prefix, each of some tokens, oldest first."""
        return [] if self._store is None else self._store.packed

    @property
    def residual_bytes(self) -> int:
        """Bytes of the full-precision tokens."""
        return 0 if self._full is None else self._full.view.nbytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of the packed prefix; of the full-precision tokens where nothing is packed."""
        tokens, stored = self.packed_tokens, self.packed_bytes
        if not tokens:
            tokens, stored = self.residual_tokens, self.residual_bytes
        return 8 * stored / (tokens * self.elements_per_token) if tokens else 0.0

    @property
    def elements_per_token(self) -> int:
        """Elements of one token over the whole batch: batch x heads x head_dim."""
        if self._shape is None:
            return 0
        batch, heads, head_dim = self._shape
        return batch * heads * head_dim

    def append(self, states: States) -> States:
        """Add states and return all that attention reads now, oldest token first.

        Tokens are quantized after the attention that sees them. Without a residual (policy `none`, or size 0) every
        token is encoded first and read decoded.
        """
        return self._append(states, self._past, self._visible)

    def _append(self, states: States, past: Callable[[], Any], visible: Callable[[], Any]) -> Any:
        """Add states and return what attention reads, by `past` or by `visible`, decoded or in stored form.

        Where every update is encoded at once: `past()`, all packed tokens, called after the new ones are encoded. Else:
        `visible()`, all cached tokens, called before those that leave the residual are encoded.
        """
        first = self._receive(states)
        if self.codec is not None and self._encodes_at_once:
            size = self.residual.size
            whole = self.residual.prefill_block is PrefillBlock.whole or size == 0
            self._encode(states, None if whole else size)
            return past()
        self._hold(states)
        seen = visible()
        self._flush(first)
        return seen

    def _decoded_from(self, held: int, queries: int) -> tuple[int, ...]:
        """For each token that leaves a residual of `held` tokens, the first of the queries that reads it decoded."""
        groups = max(held + queries - 1 - self._kept, 0) // self._group
        when = [self._kept + self._group * (group + 1) - held for group in range(groups)]
        return tuple(query for query in when for _ in range(self._group))

    def moves(self, queries: int, head: int = 0) -> Transitions:
        """Tokens encoded while `queries` new tokens come one by one, and the first query that reads each decoded.

        `head`: number of new tokens that come together in one update before these; queries are counted from its first.
        """
        if self.codec is None or self._encodes_at_once:
            return Transitions(self.packed_tokens, ())
        held = self.residual_tokens + head
        gone = self._leaving(held, first=not self.seen)
        later = tuple(head + query for query in self._decoded_from(held - gone, queries))
        return Transitions(self.packed_tokens, (head,) * gone + later)

    def append_in_steps(self, states: States) -> tuple[States, States | None]:
        """Add states as if each token came in a separate update.

        Returns the states as the first query reads them, with all new tokens in full precision; and the decoded form of
        the tokens in `moves`, which later queries read (None: there are none).
        """
        if self.codec is not None and self.residual.policy is Policy.block and not self.residual.size:
            self._receive(states)
            self._encode(states, 1)
            return self._past(), None
        if self.codec is None or self._encodes_at_once:
            return self.append(states), None
        moved = len(self.moves(states.shape[2]).queries)
        self._receive(states)
        self._hold(states)
        visible = self._visible()
        decoded = self._flush(first=False, decoded=bool(moved))
        return visible, None if decoded is None else decoded[:, :, :moved]

    def append_then_steps(self, states: States, head: int) -> tuple[States, States | None]:
        """Add the first `head` tokens in one update and each of the others as if in a separate one.

        Returns what `append_in_steps` does: states as the first query reads them, new ones in full precision; and the
        decoded form of the tokens in `moves(tokens - head, head)` (None: there are none).
        """
        count = states.shape[2] - head
        moves = self.moves(count, head)
        front = self.append(states[:, :, :head])
        if not count:
            return front, None
        rest = states[:, :, head:]
        if self.codec is not None and self._encodes_at_once:
            return [self.append(token) for token in rest.split(1, 2)][-1], None
        seen, later = self.append_in_steps(rest)
        gone = len(moves.queries) - (0 if later is None else later.shape[2])
        decoded = [seen[:, :, moves.start : moves.start + gone]] + ([] if later is None else [later])
        return torch.cat([front, rest], 2), torch.cat(decoded, 2) if moves.queries else None

    def _receive(self, states: Tensor) -> bool:
        """Check the shape of new states and that their rotations are known; return whether they are the first."""
        first = not self.seen
        shape = (states.shape[0], states.shape[1], states.shape[3])
        if not first and shape != self._shape:
            raise DataError(f"{self.label}: batch, heads, head_dim {shape} after {self._shape}; reset() the cache")
        if self.uses_rope and (self.rope is None or self.rope.tokens < self.seen + states.shape[2]):
            raise Unsupported(f"{self.label}: the method undoes rotary embeddings, which the model did not hand over")
        self._shape = shape
        return first

    @property
    def _rotations(self) -> Rope | None:
        """RoPE rotations of all tokens but the dropped ones; None: the codec does not undo RoPE."""
        return None if not self.uses_rope or self.rope is None else self.rope.after(self.dropped)

    def _hold(self, states: Tensor) -> None:
        """Append states to the residual."""
        self._full = append_rows(self._full, states)

    def _visible(self) -> Tensor:
        """All cached tokens: the packed ones decoded, followed by the residual."""
        full = None if self._full is None else self._full.view
        if self._store is None:
            assert full is not None
            return full
        return self._past() if full is None else torch.cat([self._past(), full], -2)

    def _past(self) -> Tensor:
        """The packed tokens, decoded."""
        assert self._store is not None
        return self._store.past(self._rotations)

    def _flush(self, first: bool, decoded: bool = False) -> Tensor | None:
        """Encode the tokens that leave the residual; return them decoded if `decoded` is set; `first`: a prefill."""
        held = self.residual_tokens
        leaving = self._leaving(held, first)
        if self.codec is None or self._full is None or not leaving:
            return None
        whole = first and self.residual.prefill_block is PrefillBlock.whole
        states = self._full.view
        block = None if whole else self._group
        if self.codec.fits_first_tokens and self._store is None and not first:
            # Tokens that come one by one leave with the first block, whatever else came in the same forward.
            pieces = [states[:, :, : self._group], states[:, :, self._group : leaving]]
            encoded = [self._encode(piece, block, decoded) for piece in pieces if piece.shape[2]]
            out = torch.cat([piece for piece in encoded if piece is not None], 2) if decoded else None
        else:
            out = self._encode(states[:, :, :leaving], block, decoded)
        self._full = Growable(states[:, :, leaving:].clone()) if leaving < held else None
        return out

    def _leaving(self, held: int, first: bool) -> int:
        """How many of `held` full-precision tokens are to be encoded now, oldest first; `first`: they are a prefill."""
        whole = first and self.residual.prefill_block is PrefillBlock.whole
        return leaving(held, self._kept, self._group, whole)

    def _encode(self, states: Tensor, block: int | None, decoded: bool = False) -> Tensor | None:
        """Check that states are finite and encode them into the store; arguments and result as `BlockStore.add`."""
        assert self.codec is not None
        self._check_finite(states)
        if self._store is None:
            self._store = self._new_store(self.codec)
        return self._store.add(states, block, self._rotations, decoded)

    def _new_store(self, codec: Codec) -> BlockStore:
        """An empty store: `TokenStore` for a sliding residual and independently coded tokens, else `BlockStore`."""
        token_by_token = self.residual.policy is Policy.sliding and codec.token_group == 1
        return (TokenStore if token_by_token else BlockStore)(codec, self.keep_decoded)

    def write(self) -> dict[str, Any]:
        """Return the state to save in a file: attributes by name, and the store's."""
        store = None if self._store is None else self._store.write()
        return {**{name: getattr(self, name) for name in self.saved}, "store": store}

    def read(self, state: dict[str, Any]) -> None:
        """Restore into this empty side the state that `write` returned; `self.rope` already covers its tokens."""
        vars(self).update({name: state[name] for name in self.saved})
        if self.codec is not None and state["store"] is not None:
            self._store = self._new_store(self.codec)
            self._store.read(state["store"], self._rotations)

    def droppable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens can be dropped: whole blocks, or all of them without a codec."""
        if not self.drops:
            return 0
        if self.codec is None:
            return min(tokens, self.residual_tokens)
        # Tokens that wait for their block are part of its statistics.
        return 0 if self._store is None else self._store.droppable(tokens)

    def drop(self, tokens: int) -> None:
        """Drop the first `tokens` tokens, at most as many as `droppable` says."""
        self.dropped += tokens
        if self._store is not None:
            self._store.drop(tokens)
            self._store = self._store if self._store.tokens else None
        elif self._full is not None:
            left = self._full.view[:, :, tokens:].clone()
            self._full = Growable(left) if left.shape[2] else None

    def check_finite(self) -> None:
        """Raise `DataError` for NaN or infinite states: full-precision ones, and encoded ones not checked before."""
        if self._finite is not None:
            self._require(self._finite)
        if self._full is not None:
            self._require(torch.isfinite(self._full.view).all())

    def _check_finite(self, states: Tensor) -> None:
        """Raise `DataError` for NaN or infinite states: now on a CPU, elsewhere in `check_finite`, to avoid a wait."""
        finite = torch.isfinite(states).all()
        if reads_at_once(states.device):
            self._require(finite)
        else:
            self._finite = finite if self._finite is None else self._finite.logical_and(finite)

    def _require(self, finite: Bool[Tensor, ""]) -> None:
        if not bool(finite):
            raise DataError(f"{self.label}: NaN or infinite values; check the model's weights and the dtypes")

    def fork(self) -> CacheSide:
        """A copy that shares everything cached so far and grows independently."""
        other = copy.copy(self)
        for name, held in vars(self).items():  # also those of subclasses
            if isinstance(held, Growable | BlockStore):
                setattr(other, name, held.fork())
        return other

    def select(self, index: Tensor) -> None:
        """Replace the batch by its sequences `index` (beam search)."""
        if self._shape is None:
            return
        self._shape = (int(index.numel()), *self._shape[1:])
        if self._store is not None:
            self._store.select(index)
        if self._full is not None:
            self._full = self._full.select(index)

    def check_crop(self, remove: int) -> None:
        """Raise `Unsupported` unless dropping the last `remove` tokens gives the state in which they never came.

        They must all be in full precision, and their arrival must not have caused earlier tokens to be encoded.
        """
        if not remove:
            return
        left, reason = self.residual_tokens - remove, None
        if left < 0:
            reason = f"only {self.residual_tokens} are still in the residual; encoded blocks cannot be cropped"
        elif (self.packed_tokens or (self.codec is not None and self.dropped)) and left < self._kept:
            reason = f"{self._kept - left} of those before them were encoded when they came"
        if reason is not None:
            fork = "fork() the cache before the tokens instead"
            raise Unsupported(f"{self.label}: cannot remove {remove} tokens, {reason} ({fork})")

    def crop(self, remove: int) -> None:
        """Drop the last `remove` tokens."""
        self.check_crop(remove)
        if self._full is not None and remove:
            left = self._full.view[:, :, : self.residual_tokens - remove]
            self._full = Growable(left.clone()) if left.shape[2] else None
        self.forget(self.tokens)

    def forget(self, tokens: int) -> None:
        """Discard what a subclass has recorded of the tokens with index `tokens` and above."""
