"""Packed tokens of one side of a layer: in blocks, or in units of 32 where tokens are encoded independently.

The class attribute `saved` lists the attributes that hold a store's state between forwards; files contain them.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import BlockRun, Codec, Growable, Packed, PackedStore
from kvq.codecs.packed import UNIT, append_rows, pack_tokens, unpack_tokens
from kvq.codecs.stages import Rope

States = Float[Tensor, "batch heads _tokens head_dim"]


class Recompression(NamedTuple):
    """Error of encoding packed tokens again with other bits; `moves`: how often a token of one head was.

    `lost`: sum of squared differences between decoded states before and after; `energy`: sum of squares before.
    """

    moves: int
    lost: float
    energy: float


class BlockStore:
    """The packed tokens of a side: encodes new ones in blocks and decodes all, once if `keep_decoded` is set."""

    saved: ClassVar[tuple[str, ...]] = ("_store",)
    """Attributes that a file holds; classes with more state add to it."""

    def __init__(self, codec: Codec, keep_decoded: bool) -> None:
        self.codec, self.keep_decoded = codec, keep_decoded
        self._store: PackedStore | None = None
        self._decoded: Growable | None = None

    @property
    def tokens(self) -> int:
        return 0 if self._store is None else self._store.packed.tokens

    @property
    def nbytes(self) -> int:
        return 0 if self._store is None else self._store.packed.nbytes

    @property
    def packed(self) -> list[Packed]:
        """The stored parts, oldest tokens first."""
        return [] if self._store is None else [self._store.packed]

    def add(self, states: States, block: int | None, rope: Rope | None, decoded: bool = False) -> States | None:
        """Encode `states` in blocks of `block` tokens (None: as one block); return them decoded if `decoded` is set.

        `rope`: RoPE rotations of the stored tokens and the new ones, for codecs that undo RoPE (None: other codecs).
        """
        rope = narrow_rope(rope, self.tokens, states.shape[2])
        codec = self.codec.for_later_tokens(None if self._store is None else self._store.packed)
        return self._seal(codec, codec.encode(states, block, rope), rope, decoded)

    def _seal(self, codec: Codec, packed: Packed, rope: Rope | None, decoded: bool) -> States | None:
        """Append encoded tokens to the store; return them decoded if `decoded` or `keep_decoded` is set."""
        if self._store is None:
            self._store = PackedStore(packed)
        else:
            self._store.append(packed)
        out = codec.decode(packed, rope) if decoded or self.keep_decoded else None
        if out is not None and self.keep_decoded:
            self._decoded = append_rows(self._decoded, out)
        return out

    def past(self, rope: Rope | None) -> States:
        """Decode all stored tokens; `rope`: their RoPE rotations, for codecs that undo RoPE (None: other codecs)."""
        if self._decoded is not None:
            return self._decoded.view
        assert self._store is not None
        packed = self._store.packed
        return self.codec.decode(packed, narrow_rope(rope, 0, packed.tokens))

    def droppable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens fill whole blocks, which can be dropped; 0: the codec stores lists."""
        return 0 if self._store is None or self.codec.stores_lists else self._store.packed.whole_block_tokens(tokens)

    def drop(self, tokens: int) -> None:
        """Drop the first `tokens` tokens, at most as many as `droppable` says."""
        assert self._store is not None
        left = self._store.packed.without_first(tokens)
        parts = {name: part.clone() for name, part in left.parts.items()}  # what is dropped gives its memory back
        self._store = PackedStore(dataclasses.replace(left, parts=parts)) if left.tokens else None
        if self._decoded is not None:
            self._decoded = Growable(self._decoded.view[:, :, tokens:].clone()) if left.tokens else None

    def write(self) -> dict[str, Any]:
        """Return the state to save in a file: attributes by name."""
        return {name: getattr(self, name) for name in self.saved}

    def read(self, state: dict[str, Any], rope: Rope | None) -> None:
        """Restore into this empty store the state that `write` returned; `rope`: RoPE rotations of its tokens."""
        vars(self).update({name: state[name] for name in self.saved})
        if self.keep_decoded and self._store is not None:
            self._decoded = Growable(BlockStore.past(self, rope))

    def fork(self) -> BlockStore:
        other = copy.copy(self)
        other._store = None if self._store is None else self._store.fork()
        other._decoded = None if self._decoded is None else self._decoded.fork()
        return other

    def select(self, index: Tensor) -> None:
        self._store = None if self._store is None else self._store.select(index)
        if self._decoded is not None:
            self._decoded = self._decoded.select(index)


class TokenStore(BlockStore):
    """A store of tokens that are encoded independently of each other, though consecutive tokens share bytes.

    Complete units of `UNIT` tokens never change. New tokens are packed again with those of the last, short unit.
    """

    saved = (*BlockStore.saved, "_tail")

    def __init__(self, codec: Codec, keep_decoded: bool) -> None:
        super().__init__(codec, keep_decoded)
        self._tail: Packed | None = None

    @property
    def tokens(self) -> int:
        return super().tokens + (0 if self._tail is None else self._tail.tokens)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._tail is None else self._tail.nbytes)

    @property
    def packed(self) -> list[Packed]:
        return super().packed + ([] if self._tail is None else [self._tail])

    def add(self, states: States, block: int | None, rope: Rope | None, decoded: bool = False) -> States | None:
        """Encode `states` after the stored tokens; return them decoded if `decoded` is set. `block` is ignored."""
        count, sealed = states.shape[2], super().tokens
        # In a whole unit, the number of rows of a part gives the bits that a token takes in it: filled with the last.
        index = torch.arange(-(-count // UNIT) * UNIT, device=states.device).clamp_max(count - 1)
        rope_of_new = narrow_rope(rope, self.tokens, count)
        turned = None if rope_of_new is None else rope_of_new.at(index)
        packed = self.codec.encode(states.index_select(2, index), UNIT, turned)
        widths = packed.token_widths
        joined = unpack_tokens(packed.parts, widths, count)
        if self._tail is not None:
            before = unpack_tokens(self._tail.parts, widths, self._tail.tokens)
            joined = {name: torch.cat([before[name], part], 2) for name, part in joined.items()}
        total = self.tokens + count - sealed
        whole = total // UNIT * UNIT
        if whole:
            units = _repack(packed, widths, joined, 0, whole)
            self._seal(self.codec, units, narrow_rope(rope, sealed, whole), False)
        self._tail = _repack(packed, widths, joined, whole, total - whole) if total > whole else None
        return self.codec.decode(packed, turned)[:, :, :count] if decoded else None

    def past(self, rope: Rope | None) -> States:
        if self._tail is None:
            return super().past(rope)
        tail = self.codec.decode(self._tail, narrow_rope(rope, super().tokens, self._tail.tokens))
        return torch.cat([super().past(rope), tail], 2) if super().tokens else tail

    def select(self, index: Tensor) -> None:
        super().select(index)
        self._tail = None if self._tail is None else self._tail.select(index)


def narrow_rope(rope: Rope | None, start: int, length: int) -> Rope | None:
    """The rotations of `length` tokens from `start` on; None if `rope` is None."""
    return None if rope is None else rope.narrow(start, length)


def _repack(like: Packed, widths: dict[str, int], joined: dict[str, Tensor], start: int, length: int) -> Packed:
    """Pack `length` tokens of `joined` from `start` on, as units or one short block; `joined`: see `unpack_tokens`."""
    parts = pack_tokens({name: part[:, :, start : start + length] for name, part in joined.items()}, widths)
    size = min(UNIT, length)
    rows = {name: part.shape[2] * size // length for name, part in parts.items()}
    return dataclasses.replace(like, parts=parts, runs=(BlockRun(size, length // size, rows),))
