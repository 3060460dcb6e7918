"""The stored form of keys or values: tensors whose bytes are counted, and codes of b bits packed into b bits each.

Packing: a b-bit code, b from 1 to 16, is split into planes of 8, 4, 2 or 1 bits (a 3-bit code is a 2-bit and a 1-bit
plane, the wider plane holding the lower bits), and a plane of w bits packs 8/w *consecutive tokens* of one channel into
a byte. Planes therefore concatenate along tokens, and unpacking is a shift and a mask over contiguous channels.

Layout: `Packed.parts` maps a name to a tensor `[batch, heads or 1, rows, columns]` whose rows run along tokens, so
packed blocks of one codec concatenate along rows into one contiguous tensor per layer. Names are `codes.<plane>`
(uint8), `scale` and `zero_point` of a quantizer, `<stage>.<name>` for a stage's side information. `Packed.runs` says
how the rows divide into blocks. A codec decodes from nothing but these tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

from kvq.errors import ConfigError

MAX_BITS = 16
_WIDTHS = (8, 4, 2, 1)
UNIT = 32
"""Tokens of a unit; a multiple of 8, because 8 one-bit codes share a byte."""
PLANES = (1, 2, 4)
"""Widths of planes in which consecutive tokens share bytes."""
Queries = Float[Tensor, "batch 1 heads group dim"]
ByToken = Float[Tensor, "batch blocks heads group tokens"]
"""What attention on packed blocks gives a quantizer: queries of each KV head, and a score or weight for each token."""


def plane_widths(bits: int) -> tuple[int, ...]:
    """Widths in bits of the planes that hold a `bits`-bit code, widest (lowest bits) first: 3 -> (2, 1)."""
    if not 1 <= bits <= MAX_BITS:
        raise ConfigError(f"bits={bits}: codes of 1 to {MAX_BITS} bits can be packed")
    widths, left = [], bits
    for width in _WIDTHS:
        while left >= width:
            widths.append(width)
            left -= width
    return tuple(widths)


def pack(codes: Integer[Tensor, "*lead tokens cols"], bits: int) -> list[UInt8[Tensor, "*lead _rows cols"]]:
    """Pack codes in `[0, 2**bits)` into one byte tensor per plane; plane w has `ceil(tokens * w / 8)` rows.

    A last byte that the tokens do not fill is padded with zeros (its bytes count).
    """
    planes, shift = [], 0
    for width in plane_widths(bits):
        plane = codes if width == bits else (codes >> shift) & ((1 << width) - 1)
        planes.append(_pack_plane(plane.to(torch.uint8), width))
        shift += width
    return planes


def unpack(planes: list[Tensor], bits: int, tokens: int) -> Integer[Tensor, "*lead tokens cols"]:
    """Inverse of `pack`: uint8 codes up to 8 bits, int32 above."""
    dtype = torch.uint8 if bits <= 8 else torch.int32
    codes, shift = None, 0
    for plane, width in zip(planes, plane_widths(bits), strict=True):
        part = _unpack_plane(plane, width, tokens).to(dtype)
        codes = part if codes is None else codes | (part << shift)
        shift += width
    assert codes is not None
    return codes


def pack_parts(codes: Tensor, bits: int, name: str = "codes") -> dict[str, Tensor]:
    """Stored parts `<name>.<plane>` of whole numbers in `[0, 2**bits)` of any dtype, `[..., tokens, cols]`."""
    planes = pack(codes.to(torch.uint8 if bits <= 8 else torch.int32), bits)
    return {f"{name}.{index}": plane for index, plane in enumerate(planes)}


def unpack_parts(
    parts: Mapping[str, Tensor], bits: int, tokens: int, name: str = "codes"
) -> Integer[Tensor, "*lead tokens cols"]:
    """Inverse of `pack_parts`, as `unpack`."""
    return unpack([parts[f"{name}.{index}"] for index in range(len(plane_widths(bits)))], bits, tokens)


def _pack_plane(codes: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    if per_byte == 1:
        return codes.contiguous()
    short = -codes.shape[-2] % per_byte
    if short:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, short))
    slots = codes.unflatten(-2, (-1, per_byte))
    out = slots[..., 0, :].clone()
    for i in range(1, per_byte):
        out |= slots[..., i, :] << (width * i)
    return out


def _unpack_plane(plane: Tensor, width: int, tokens: int) -> Tensor:
    per_byte = 8 // width
    if per_byte == 1:
        return plane
    rows, cols = plane.shape[-2:]
    out = plane.new_empty(*plane.shape[:-2], rows, per_byte, cols)
    for i in range(per_byte):
        torch.bitwise_and(plane >> (width * i), (1 << width) - 1, out=out[..., i, :])
    return out.flatten(-3, -2)[..., :tokens, :]


@dataclass(frozen=True)
class BlockRun:
    """`count` consecutive blocks of `tokens` tokens each; `rows[name]` rows of part `name` belong to each block."""

    tokens: int
    count: int
    rows: dict[str, int]

    def blocks(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The run's parts `[batch, heads, rows, columns]` cut into blocks, `[batch, blocks, heads, rows, columns]`.

        A part that belongs to all blocks (`Packed.by_run`) is repeated for each, without a copy.
        """
        return {
            name: part.unflatten(2, (self.count, self.rows[name])).transpose(1, 2)
            if name in self.rows
            else part.unsqueeze(1).expand(-1, self.count, *part.shape[1:])
            for name, part in parts.items()
        }


@dataclass(frozen=True)
class Packed:
    """Blocks of one tensor `[batch, heads, tokens, head_dim]` in stored form.

    Attributes:
        parts: stored tensors by name, each `[batch, heads or 1, rows, columns]`.
        runs: the blocks, in token order.
        batch, heads, head_dim: shape of the decoded tensor; `dtype` is its dtype.
    """

    parts: dict[str, Tensor]
    runs: tuple[BlockRun, ...]
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """Number of tokens in all blocks."""
        return sum(run.tokens * run.count for run in self.runs)

    def by_run(self) -> Iterator[tuple[BlockRun, dict[str, Tensor]]]:
        """Each run and its rows of every part, as views; a part without rows of blocks belongs to all, and is whole."""
        start = dict.fromkeys(self.runs[0].rows, 0)
        for run in self.runs:
            rows = {name: run.rows[name] * run.count for name in start}
            yield run, self.parts | {name: self.parts[name].narrow(2, start[name], rows[name]) for name in start}
            start = {name: start[name] + rows[name] for name in start}

    def whole_block_tokens(self, tokens: int) -> int:
        """The largest number of tokens, at most `tokens`, that the first blocks make up exactly."""
        total = 0
        for run in self.runs:
            count = min(run.count, (tokens - total) // run.tokens)
            total += count * run.tokens
            if count < run.count:
                break
        return total

    def without_first(self, tokens: int) -> Packed:
        """Views of the blocks after the first `tokens` tokens, an end of a block; not for lists of varying length."""
        runs: list[BlockRun] = []
        start, gone = dict.fromkeys(self.parts, 0), tokens
        for run in self.runs:
            count = min(run.count, gone // run.tokens)
            gone -= count * run.tokens
            start = {name: first + run.rows[name] * count for name, first in start.items()}
            if count < run.count:
                runs.append(dataclasses.replace(run, count=run.count - count))
        parts = {name: part[:, :, start[name] :] for name, part in self.parts.items()}
        return dataclasses.replace(self, parts=parts, runs=tuple(runs))

    def select(self, index: Tensor) -> Packed:
        """The same blocks for the batch entries `index` (beam search, repeats)."""
        parts = {name: part.index_select(0, index.to(part.device)) for name, part in self.parts.items()}
        return dataclasses.replace(self, parts=parts, batch=int(index.numel()))

    @property
    def token_widths(self) -> dict[str, int]:
        """Bits each token takes in a byte column of each part, from the rows per `UNIT`; 8: one row per token."""
        return {name: 8 * rows // UNIT for name, rows in self.runs[0].rows.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of every stored tensor, codes and side information alike."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def bits_per_element(self) -> float:
        """Stored bits for each element of the original tensor: measured, not computed from a formula."""
        return 8 * self.nbytes / (self.batch * self.heads * self.tokens * self.head_dim)


def merge_runs(first: tuple[BlockRun, ...], second: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
    """Concatenate two lists of runs, joining neighbours of the same block size."""
    runs = list(first)
    for run in second:
        if runs and (runs[-1].tokens, runs[-1].rows) == (run.tokens, run.rows):
            runs[-1] = dataclasses.replace(run, count=runs[-1].count + run.count)
        else:
            runs.append(run)
    return tuple(runs)


@dataclass
class _Shared:
    """A tensor with reserved rows that several `Growable` may read; `used` rows are written, the rest are free."""

    data: Tensor
    used: int


class Growable:
    """A tensor that grows along rows (dim -2), geometrically; written rows never change, so forks share them."""

    def __init__(self, first: Tensor) -> None:
        self._shared = _Shared(first.contiguous(), first.shape[-2])
        self.rows = first.shape[-2]

    @property
    def view(self) -> Tensor:
        """The rows written so far, without copying."""
        return self._shared.data.narrow(-2, 0, self.rows)

    @property
    def capacity(self) -> int:
        """Rows that fit before the tensor has to be copied."""
        return self._shared.data.shape[-2]

    def append(self, more: Tensor) -> None:
        """Write rows in place where they are free; copy first where the tensor is full or a fork has written there."""
        rows = self.rows + more.shape[-2]
        if rows > self.capacity or self._shared.used != self.rows:
            capacity = max(rows, self.rows + self.rows // 2 + 1)
            data = more.new_empty(*more.shape[:-2], capacity, more.shape[-1])
            data.narrow(-2, 0, self.rows).copy_(self.view)
            self._shared = _Shared(data, self.rows)
        self._shared.data.narrow(-2, self.rows, more.shape[-2]).copy_(more)
        self.rows = self._shared.used = rows

    def __reduce__(self) -> tuple[type[Growable], tuple[Tensor]]:
        """Pickled as the rows written, without free ones."""
        return Growable, (self.view,)

    def fork(self) -> Growable:
        """A second handle on the rows written so far, not a copy; neither handle sees what the other appends later."""
        other = Growable.__new__(Growable)
        other._shared, other.rows = self._shared, self.rows
        return other

    def select(self, index: Tensor) -> Growable:
        """A copy of the rows for the entries `index` of the first axis."""
        return Growable(self.view.index_select(0, index.to(self.view.device)))


def append_rows(held: Growable | None, more: Tensor) -> Growable:
    """Append rows to `held` and return it; None: return a new `Growable` of these rows."""
    if held is None:
        return Growable(more)
    held.append(more)
    return held


class PackedStore:
    """The growing, append-only packed prefix of one layer's keys or values."""

    def __init__(self, first: Packed) -> None:
        self._meta = dataclasses.replace(first, parts={}, runs=())
        self._parts = {name: Growable(part) for name, part in first.parts.items()}
        self._runs = first.runs

    def append(self, more: Packed) -> None:
        """Add the blocks of `more` after the ones held."""
        for name, part in more.parts.items():
            self._parts[name].append(part)
        self._runs = merge_runs(self._runs, more.runs)

    @property
    def packed(self) -> Packed:
        """Everything held, as one `Packed` whose parts are views."""
        views = {name: part.view for name, part in self._parts.items()}
        return dataclasses.replace(self._meta, parts=views, runs=self._runs)

    def fork(self) -> PackedStore:
        """A copy that shares the rows written so far."""
        other = copy.copy(self)
        other._parts = {name: part.fork() for name, part in self._parts.items()}
        return other

    def select(self, index: Tensor) -> PackedStore:
        """A copy that holds the batch entries `index` (beam search, repeats)."""
        return PackedStore(self.packed.select(index))


def unpack_tokens(parts: Mapping[str, Tensor], widths: Mapping[str, int], tokens: int) -> dict[str, Tensor]:
    """Every part with one row for each of `tokens` tokens: planes of 1, 2 or 4 bits are unpacked."""
    return {
        name: unpack([part], widths[name], tokens) if widths[name] in PLANES else part[..., :tokens, :]
        for name, part in parts.items()
    }


def pack_tokens(parts: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Inverse of `unpack_tokens`: the codes of consecutive tokens share bytes again."""
    return {name: pack(x, widths[name])[0] if widths[name] in PLANES else x.clone() for name, x in parts.items()}
