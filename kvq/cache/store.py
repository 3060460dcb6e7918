"""Packed tokens of one side of a layer: in blocks, or in units of 32 where tokens are encoded independently; and files.

A file has plain numbers as JSON data, and tensors by name, written by `Writer` and read by `Reader`. A class with state
names in `saved` the attributes that it keeps from one forward to the next. What is read is taken as it is: the digest
of a file shows that a cache wrote it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import BlockRun, Codec, Growable, Packed, PackedStore
from kvq.codecs.packed import PLANES, UNIT, append_rows, pack_tokens, unpack_tokens
from kvq.codecs.stages import Rope


class Writer:
    """Collects the state of a part of a cache.

    `tree`: JSON data, in which other values are pairs of kind and content; `tensors`: by name, shared by all parts.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None, prefix: str = "") -> None:
        self.tree: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {} if tensors is None else tensors
        self._prefix = prefix

    def part(self, name: str) -> Writer:
        """A writer whose tree is `name` in this one, and whose names of tensors begin with it."""
        inner = Writer(self.tensors, f"{self._prefix}{name}.")
        self.tree[name] = inner.tree
        return inner

    def fields(self, owner: Any, names: Iterable[str]) -> None:
        """Write the attributes `names` of `owner`."""
        for name in names:
            self.tree[name] = self._data(f"{self._prefix}{name}", getattr(owner, name))

    def _data(self, name: str, value: Any) -> Any:
        """A value as JSON data; the tensors in it are written under names that begin with `name`."""
        if isinstance(value, Tensor):
            self.tensors[name] = value
            return ["tensor", name]
        if isinstance(value, Growable):
            return ["rows", self._data(name, value.view)]
        if isinstance(value, PackedStore):
            return ["store", self._data(name, value.packed)]
        if isinstance(value, Packed):
            parts = [[part, self._data(f"{name}.{part}", tensor)] for part, tensor in value.parts.items()]
            runs = [[run.tokens, run.count, run.rows] for run in value.runs]
            return ["packed", [parts, runs, value.batch, value.heads, value.head_dim, self._data(name, value.dtype)]]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, tuple):
            return ["tuple", [self._data(f"{name}.{place}", item) for place, item in enumerate(value)]]
        if isinstance(value, dict):
            return ["dict", [[key, self._data(f"{name}.{key}", item)] for key, item in value.items()]]
        return value


class Reader:
    """Reads what a `Writer` wrote as `tree` and `tensors`; tensors go to `device`."""

    def __init__(self, tree: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
        self.tree, self.tensors, self.device = tree, tensors, device

    def part(self, name: str, device: torch.device | None = None) -> Reader:
        """A reader for the part `name`, on this reader's device or another."""
        return Reader(self.tree[name], self.tensors, self.device if device is None else device)

    def fields(self, owner: Any, names: Iterable[str]) -> None:
        """Set the attributes `names` of `owner` to what was written."""
        for name in names:
            setattr(owner, name, self._value(self.tree[name]))

    def _value(self, data: Any) -> Any:
        """The value that `Writer._data` wrote as `data`."""
        if not isinstance(data, list):
            return data
        kind, held = data
        if kind == "tensor":
            return self.tensors[held].to(self.device)
        if kind == "rows":
            return Growable(self._value(held))
        if kind == "store":
            return PackedStore(self._value(held))
        if kind == "packed":
            parts, runs, batch, heads, head_dim, dtype = held
            tensors = {name: self._value(part) for name, part in parts}
            blocks = tuple(BlockRun(*run) for run in runs)
            return Packed(tensors, blocks, batch, heads, head_dim, self._value(dtype))
        if kind == "dtype":
            return getattr(torch, held)
        return tuple(map(self._value, held)) if kind == "tuple" else {key: self._value(item) for key, item in held}


States = Float[Tensor, "batch heads _tokens head_dim"]


class Recompression(NamedTuple):
    """Count and error of tokens that were decoded and encoded again with other bits.

    Attributes:
        moves: number of tokens of one head, each as often as it was encoded again.
        lost: sum of squared differences between their decoded forms, before and after.
        energy: sum of squares of those before.
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

        `rope`: rotations of the tokens held and of the new ones.
        """
        rope = narrow_rope(rope, self.tokens, states.shape[2])
        codec = self.codec.for_later_tokens(None if self._store is None else self._store.packed)
        return self._seal(codec, codec.encode(states, block, rope), rope, decoded)

    def _seal(self, codec: Codec, packed: Packed, rope: Rope | None, decoded: bool) -> States | None:
        """Append encoded tokens for good; return them decoded if `decoded` or `keep_decoded` is set."""
        if self._store is None:
            self._store = PackedStore(packed)
        else:
            self._store.append(packed)
        out = codec.decode(packed, rope) if decoded or self.keep_decoded else None
        if out is not None and self.keep_decoded:
            self._decoded = append_rows(self._decoded, out)
        return out

    def past(self, rope: Rope | None) -> States:
        """All tokens held, decoded; `rope`: their rotations."""
        if self._decoded is not None:
            return self._decoded.view
        assert self._store is not None
        packed = self._store.packed
        return self.codec.decode(packed, narrow_rope(rope, 0, packed.tokens))

    def droppable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens fill whole blocks, which can be dropped; 0 where parts are lists."""
        return 0 if self._store is None or self.codec.stores_lists else self._store.packed.whole_block_tokens(tokens)

    def drop(self, tokens: int) -> None:
        """Drop the first `tokens` tokens, at most as many as `droppable` says."""
        assert self._store is not None
        left = self._store.packed.without_first(tokens)
        own = {name: part.clone() for name, part in left.parts.items()}  # what is dropped gives its memory back
        self._store = PackedStore(dataclasses.replace(left, parts=own)) if left.tokens else None
        if self._decoded is not None:
            self._decoded = Growable(self._decoded.view[:, :, tokens:].clone()) if left.tokens else None

    def write(self, out: Writer) -> None:
        out.fields(self, self.saved)

    def read(self, given: Reader, rope: Rope | None) -> None:
        """Fill the empty store from a file; `rope`: rotations of its tokens."""
        given.fields(self, self.saved)
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
            self._decoded = Growable(_select_rows(self._decoded.view, index))


class TokenStore(BlockStore):
    """A store of tokens that are encoded independently of each other, though consecutive tokens share bytes.

    Complete units of `UNIT` tokens never change. A token that comes alone is put into the bytes behind the last, short
    unit; several are packed again with it. Both give the same codes.
    """

    saved = (*BlockStore.saved, "_tail")

    def __init__(self, codec: Codec, keep_decoded: bool) -> None:
        super().__init__(codec, keep_decoded)
        self._tail: Packed | None = None
        self._widths: dict[str, int] | None = None

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
        """Encode `states` after the ones held; return them decoded if `decoded` is set. `block` is ignored."""
        count, sealed = states.shape[2], super().tokens
        if count == 1 and self._tail is not None:
            return self._add_one(states, rope, decoded)
        # In a whole unit, the number of rows of a part gives the bits that a token takes in it, hence the padding.
        packed, turned = self._encode_units(states, narrow_rope(rope, self.tokens, count))
        self._widths = widths = packed.token_widths
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

    def _encode_units(self, states: States, rope: Rope | None) -> tuple[Packed, Rope | None]:
        """Encode `states`, filled up to whole units with the last token; return also the rotations of these tokens."""
        count = states.shape[2]
        index = torch.arange(-(-count // UNIT) * UNIT, device=states.device).clamp_max(count - 1)
        if rope is not None:
            rope = dataclasses.replace(rope, cos=rope.cos[:, index], sin=rope.sin[:, index])
        return self.codec.encode(states.index_select(2, index), UNIT, rope), rope

    def _add_one(self, states: States, rope: Rope | None, decoded: bool) -> States | None:
        """`add` for one token: append its codes to the bytes of the short unit."""
        assert self._tail is not None
        place, sealed, turned = self._tail.tokens, super().tokens, narrow_rope(rope, self.tokens, 1)
        if self.codec.stages or self._widths is None:  # a matrix product of one row may be rounded otherwise
            packed, turned = self._encode_units(states, turned)
            self._widths = packed.token_widths
        else:
            packed = self.codec.encode(states, 1)
        parts = {
            name: _append_one(held, packed.parts[name], place, self._widths[name])
            for name, held in self._tail.parts.items()
        }
        rows = {name: part.shape[2] for name, part in parts.items()}
        self._tail = dataclasses.replace(self._tail, parts=parts, runs=(BlockRun(place + 1, 1, rows),))
        if place + 1 == UNIT:
            self._seal(self.codec, self._tail, narrow_rope(rope, sealed, UNIT), False)
            self._tail = None
        return self.codec.decode(packed, turned)[:, :, :1] if decoded else None

    def past(self, rope: Rope | None) -> States:
        if self._tail is None:
            return super().past(rope)
        tail = self.codec.decode(self._tail, narrow_rope(rope, super().tokens, self._tail.tokens))
        return torch.cat([super().past(rope), tail], 2) if super().tokens else tail

    def select(self, index: Tensor) -> None:
        super().select(index)
        if self._tail is not None:
            parts = {name: _select_rows(part, index) for name, part in self._tail.parts.items()}
            self._tail = dataclasses.replace(self._tail, parts=parts, batch=int(index.numel()))


def _append_one(held: Tensor, new: Tensor, place: int, width: int) -> Tensor:
    """Append the first token of a part `new` to the `place` tokens of `held`; a token takes `width` bits."""
    if width not in PLANES:
        return torch.cat([held, new[:, :, :1]], 2)
    row, shift = divmod(place * width, 8)
    first = new[:, :, 0] & ((1 << width) - 1)
    if not shift:
        return torch.cat([held, first[:, :, None]], 2)
    held = held.clone()  # forks share it
    held[:, :, row] |= first << shift
    return held


def narrow_rope(rope: Rope | None, start: int, length: int) -> Rope | None:
    """The rotations of `length` tokens from `start` on; None for None."""
    return None if rope is None else rope.narrow(start, length)


def _select_rows(part: Tensor, index: Tensor) -> Tensor:
    """The sequences `index` of a batch."""
    return part.index_select(0, index.to(part.device))


def _repack(like: Packed, widths: dict[str, int], joined: dict[str, Tensor], start: int, length: int) -> Packed:
    """Pack `length` tokens of `joined` from `start` on, as units or one short block; `joined`: see `unpack_tokens`."""
    parts = pack_tokens({name: part[:, :, start : start + length] for name, part in joined.items()}, widths)
    size = min(UNIT, length)
    own = {name: part.shape[2] * size // length for name, part in parts.items()}
    return dataclasses.replace(like, parts=parts, runs=(BlockRun(size, length // size, own),))
