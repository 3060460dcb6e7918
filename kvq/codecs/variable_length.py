"""Codecs that store a varying number of bytes per token: lists of outliers, and Huffman codes of indices."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvq.codecs.codec import Codec, States, blocks_at_once
from kvq.codecs.fitted import INDICES
from kvq.codecs.packed import Packed, merge_runs, pack_parts, plane_widths, unpack_parts
from kvq.codecs.quantizers import Quantizer
from kvq.codecs.stages import Rope, Stage
from kvq.errors import Unsupported

_LISTS: dict[str, Callable[[int], int]] = {
    "outlier.value": lambda width: 0,
    "outlier.index": lambda width: width - INDICES // 2,
}
"""Parts that are lists, and the value of an empty entry where a token has `width` channels."""
MAX_BITS = 8
STREAM, _LENGTHS, SIZE = "stream", "lengths", "size"
Symbols = NDArray[np.uint8]


class SparseCodec(Codec):
    """A codec whose quantizer stores a varying number of outliers per token.

    They are stored as lists, `outlier.value` and `outlier.index` `[batch, 1, entries, 1]` in the order of tokens;
    `outlier.count` has the number of each token. The sequences of a batch have lists of equal length: a shorter one is
    padded with entries that name no channel and count evenly for its tokens.
    """

    version: ClassVar[int] = 1
    stores_lists = True

    def encode(self, x: States, block: int | None = None, rope: Rope | None = None) -> Packed:
        batch, heads, tokens, head_dim = x.shape
        self._check_rope(rope, tokens)  # of all tokens: pieces of a longer table would pass
        size = min(block or tokens, tokens) or 1
        whole, step = tokens - tokens % size, size * blocks_at_once(batch, heads, size, head_dim)
        pieces = []
        for start, end in itertools.pairwise([*range(0, whole, step), whole, tokens]):
            if start < end or not tokens:
                turned = None if rope is None else rope.narrow(start, end - start)
                pieces.append(self._to_lists(super().encode(x[:, :, start:end], size, turned)))
        parts = {name: torch.cat([piece.parts[name] for piece in pieces], 2) for name in pieces[0].parts}
        runs = functools.reduce(merge_runs, (piece.runs for piece in pieces))
        return replace(pieces[0], parts=parts, runs=runs)

    @staticmethod
    def _to_lists(packed: Packed) -> Packed:
        """The same blocks with outlier rows as lists without padding, as the class stores them."""
        if "outlier.count" not in packed.parts:
            return packed
        parts = dict(packed.parts)
        count = parts["outlier.count"].int()
        total = count.sum(2, keepdim=True)
        places = torch.arange(count.shape[2], device=count.device)[:, None]
        count += (total.max() - total + places) // count.shape[2]
        most = int(count.max())
        held = torch.arange(most, device=count.device) < count
        for name, empty in _LISTS.items():
            missing = max(most - parts[name].shape[-1], 0)
            rows = torch.nn.functional.pad(parts[name], (0, missing), value=empty(packed.heads * packed.head_dim))
            parts[name] = rows[..., :most][held].view(packed.batch, 1, -1, 1)
        parts["outlier.count"] = count.to(torch.int16)
        runs = [replace(run, rows={n: rows for n, rows in run.rows.items() if n not in _LISTS}) for run in packed.runs]
        return replace(packed, parts=parts, runs=tuple(runs))

    def decode(self, packed: Packed, rope: Rope | None = None) -> States:
        if "outlier.count" not in packed.parts:
            return super().decode(packed, rope)
        parts = dict(packed.parts)
        count = parts["outlier.count"].int()
        most = int(count.max())
        held = torch.arange(most, device=count.device) < count
        for name, empty in _LISTS.items():
            rows = parts[name].new_full((*count.shape[:-1], most), empty(packed.heads * packed.head_dim))
            rows[held] = parts[name].flatten()
            parts[name] = rows
        runs = tuple(replace(run, rows=run.rows | dict.fromkeys(_LISTS, run.tokens)) for run in packed.runs)
        return super().decode(replace(packed, parts=parts, runs=runs), rope)


@dataclass(frozen=True)
class Rate:
    """The number of coded indices, and the total bits of their Shannon entropy and of their code words.

    The entropy is that of each block's frequencies, as each block has its code.
    """

    indices: int
    entropy: float
    coded: int

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.indices + other.indices, self.entropy + other.entropy, self.coded + other.coded)


class CodedBlocks(Codec, abc.ABC):
    """A codec whose blocks are stored in a form of varying length, in streams of bytes; decoding undoes it first."""

    stores_lists = True

    @abc.abstractmethod
    def planes(self, packed: Packed) -> Packed:
        """The same blocks in the form that `Codec` stores, without variable-length codes."""

    def uncoded_bytes(self, packed: Packed) -> int | None:
        """Bytes of the blocks without variable-length codes; None (the default): not reported for this class."""
        return None

    def decode(self, packed: Packed, rope: Rope | None = None) -> States:
        return super().decode(self.planes(packed), rope)


class HuffmanCodec(CodedBlocks):
    """A codec whose indices are stored in code words of a Huffman code, one code for each block of each sequence.

    It takes the place of `Codec` around a quantizer that stores indices of up to 8 bits (`Quantizer.index_bits`). What
    is decoded is the same, bit for bit; all other parts are stored as they are.

    Stores, in place of the planes of each kind of index `<name>`: `<name>.stream` (uint8 `[batch, 1, bytes, 1]`), the
    code words of all blocks, each from a byte of its own, the last with the zero bytes that make the streams of a batch
    equally long; `<name>.lengths` (uint8 `[batch, 1, blocks, 2^bits]`), the lengths in bits of the code words of the
    canonical code; `<name>.size` (int32 `[batch, 1, blocks, 2]`), the bits and the bytes of a block's stream.

    Source: KVQuant++, section 2.2.5; Huffman 1952. Codes are bitarray's; they are computed on the CPU.
    """

    version: ClassVar[int] = 1

    def __init__(self, stages: Mapping[str, Stage | None], order: Sequence[str], quantizer: Quantizer) -> None:
        super().__init__(stages, order, quantizer)
        if not quantizer.index_bits:
            raise Unsupported(f"HuffmanCodec: {type(quantizer).__name__} stores no indices; use kvq.codecs.Codec")
        for name, bits in quantizer.index_bits.items():
            if bits > MAX_BITS:
                raise Unsupported(f"HuffmanCodec: '{name}' has {bits} bits; indices of 1 to {MAX_BITS} bits are coded")

    @property
    def token_group(self) -> int | None:
        """None: the tokens of a block share its code."""
        return None

    def encode(self, x: States, block: int | None = None, rope: Rope | None = None) -> Packed:
        packed = super().encode(x, block, rope)
        planes = {plane for name, bits in self.quantizer.index_bits.items() for plane in _planes(name, bits)}
        parts = {name: part for name, part in packed.parts.items() if name not in planes}
        runs = [replace(run, rows={n: rows for n, rows in run.rows.items() if n in parts}) for run in packed.runs]
        for name, bits in self.quantizer.index_bits.items():
            blocks: list[list[_Block]] = [[] for _ in range(packed.batch)]
            for run, own in packed.by_run():
                stored = run.blocks({plane: own[plane] for plane in _planes(name, bits)})
                codes = unpack_parts(stored, bits, run.tokens, name).flatten(2).cpu().numpy()
                for sequence, symbols in zip(blocks, codes, strict=True):
                    sequence += [_encode_block(some, bits) for some in symbols]
            stream, taken = streams([[block.stream for block in own] for own in blocks])
            lengths = np.stack([[block.lengths for block in own] for own in blocks])
            sizes = np.stack([np.array([[block.bits for block in own] for own in blocks], np.int32), taken], -1)
            for kind, held in ((STREAM, stream[..., None]), (_LENGTHS, lengths), (SIZE, sizes)):
                device = packed.parts[f"{name}.0"].device
                parts[f"{name}.{kind}"] = torch.from_numpy(held)[:, None].to(device)
            for run in runs:
                run.rows.update({f"{name}.{_LENGTHS}": 1, f"{name}.{SIZE}": 1})
        return replace(packed, parts=parts, runs=tuple(runs))

    def planes(self, packed: Packed) -> Packed:
        own = tuple(f"{name}.{kind}" for name in self.quantizer.index_bits for kind in (STREAM, _LENGTHS, SIZE))
        parts = {name: part for name, part in packed.parts.items() if name not in own}
        runs = [replace(run, rows={n: rows for n, rows in run.rows.items() if n not in own}) for run in packed.runs]
        for name, bits in self.quantizer.index_bits.items():
            pieces = []
            blocks = [_split(packed, name, sequence) for sequence in range(packed.batch)]
            for run in runs:
                flat = [np.stack([_decode_block(next(one)) for _ in range(run.count)]) for one in blocks]
                codes = torch.from_numpy(np.stack(flat)).to(packed.parts[f"{name}.{SIZE}"].device)
                codes = codes.unflatten(2, (packed.heads, run.tokens, -1))
                planes = pack_parts(codes, bits, name)
                run.rows.update({plane: part.shape[-2] for plane, part in planes.items()})
                pieces.append({plane: part.transpose(1, 2).flatten(2, 3) for plane, part in planes.items()})
            parts |= {plane: torch.cat([piece[plane] for piece in pieces], 2) for plane in pieces[0]}
        return replace(packed, parts=parts, runs=tuple(runs))

    def rate(self, packed: Packed) -> Rate:
        """The rate of the indices that `packed` holds."""
        total = Rate(0, 0.0, 0)
        for name, bits in self.quantizer.index_bits.items():
            for sequence in range(packed.batch):
                for block in _split(packed, name, sequence):
                    counts = np.bincount(_decode_block(block), minlength=2**bits)
                    total += Rate(int(counts.sum()), entropy(counts) * int(counts.sum()), block.bits)
        return total


def _planes(name: str, bits: int) -> list[str]:
    """Names of the bit planes, as `Codec` stores them, of `bits`-bit indices of the kind `name`."""
    return [f"{name}.{index}" for index in range(len(plane_widths(bits)))]


@dataclass(frozen=True)
class _Block:
    """Code words of a block: the length of each index's word (0: it does not occur), the bytes, their used bits."""

    lengths: Symbols
    stream: bytes
    bits: int


def entropy(counts: NDArray[np.int64]) -> float:
    """Shannon entropy in bits of the distribution that has these counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def _encode_block(symbols: Symbols, bits: int) -> _Block:
    from bitarray import bitarray
    from bitarray.util import huffman_code, int2ba

    counts = np.bincount(symbols, minlength=2**bits)
    lengths = np.zeros(2**bits, np.uint8)
    for index, word in huffman_code({index: int(count) for index, count in enumerate(counts) if count}).items():
        lengths[index] = len(word)
    words, code, before = {}, 0, 0
    for index in _canonical(lengths):
        code <<= int(lengths[index]) - before
        before = int(lengths[index])
        words[index] = int2ba(code, before, endian="big")
        code += 1
    stream = bitarray(endian="big")
    stream.encode(words, symbols.tobytes())
    return _Block(lengths, stream.tobytes(), len(stream))


def _decode_block(block: _Block) -> Symbols:
    from bitarray import bitarray
    from bitarray.util import canonical_decode

    stream = bitarray(endian="big")
    stream.frombytes(block.stream)
    order = _canonical(block.lengths)
    counts = np.bincount(block.lengths[order]).tolist()
    return np.frombuffer(bytes(canonical_decode(stream[: block.bits], counts, order)), np.uint8)


def _canonical(lengths: Symbols) -> list[int]:
    """The indices that occur, in the order of their code words: by length, then ascending."""
    return [int(index) for index in np.argsort(lengths, kind="stable") if lengths[index]]


def _split(packed: Packed, name: str, sequence: int) -> Iterator[_Block]:
    """The blocks of a sequence, in order."""
    stream, lengths, size = (
        packed.parts[f"{name}.{kind}"][sequence, 0].cpu().numpy() for kind in (STREAM, _LENGTHS, SIZE)
    )
    for block_lengths, piece, bits in zip(lengths, pieces(stream[:, 0], size[:, 1]), size[:, 0], strict=True):
        yield _Block(block_lengths, piece, int(bits))


def streams(sequences: Sequence[Sequence[bytes]]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Pieces of each sequence in one stream `[batch, bytes]`, and the bytes of each piece `[batch, pieces]`.

    The last piece of a shorter stream also has the zero bytes that make it as long as the others.
    """
    joined = [b"".join(sequence) for sequence in sequences]
    most = max(map(len, joined))
    padded = np.stack([np.frombuffer(stream.ljust(most, b"\0"), np.uint8) for stream in joined])
    taken = np.array([[len(piece) for piece in sequence] for sequence in sequences], np.int32)
    taken[:, -1] += [most - len(stream) for stream in joined]
    return padded, taken


def pieces(stream: NDArray[np.uint8], taken: NDArray[np.int32]) -> Iterator[bytes]:
    """The pieces of a sequence, in order; inverse of `streams`."""
    start = 0
    for size in taken.tolist():
        yield stream[start : start + size].tobytes()
        start += size
