"""DEFLATE around a codec: all that it stores of a few tokens in one compressed stream."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from kvq.codecs.codec import Codec, States
from kvq.codecs.packed import BlockRun, Packed
from kvq.codecs.quantizers import Quantizer, shared_group
from kvq.codecs.stages import Rope, Stage
from kvq.codecs.variable_length import SIZE, STREAM, CodedBlocks, pieces, streams
from kvq.errors import DataError, Unsupported, at_least

_RAW, _DEFLATE = b"\0", b"\1"


class DeflateCodec(CodedBlocks):
    """A codec all of whose parts are compressed by DEFLATE (RFC 1951), each block of each sequence in a stream.

    It takes the place of `Codec` around any quantizer. What is decoded is the same, bit for bit.

    Stores, in place of all other parts: `stream` (uint8 `[batch, 1, bytes, 1]`), of each block a byte that says how it
    is stored, then the bytes of its parts in alphabetical order, compressed, or as they are where that is not longer;
    `size` (int32 `[batch, 1, blocks, 1]`), the bytes of a block's stream. All of it counts. The last of the blocks
    that are encoded together also has the zero bytes that make the streams of a batch equally long.

    Args:
        tokens: of a block where tokens are independent of each other and leave a sliding residual: so many together.

    Raises:
        ConfigError: `tokens` below 2: bytes of one token have no form beside those of another.
        Unsupported: a quantizer whose number of bytes follows the values before they are compressed.

    Source: KVTC (arXiv 2511.01815), whose last step it is. Streams are zlib's at its usual level, without a header or a
    checksum; they are computed on the CPU.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, stages: Mapping[str, Stage | None], order: Sequence[str], quantizer: Quantizer, tokens: int = 16
    ) -> None:
        super().__init__(stages, order, quantizer)
        at_least("tokens", tokens, 2)
        if quantizer.variable_rows:
            raise self._variable_size_error()
        self.tokens = tokens
        self._known: dict[tuple[Any, ...], dict[str, _Form]] = {}

    def _variable_size_error(self) -> Unsupported:
        """The error for a quantizer whose number of bytes depends on the values."""
        kind = type(self.quantizer).__name__
        return Unsupported(f"DeflateCodec: the bytes of a {kind} follow the values; use kvq.codecs.Codec")

    def with_stages(self, stages: Iterable[tuple[str, Stage]], quantizer: Quantizer | None = None) -> Codec:
        """A codec with other stages, and another quantizer if one is given, compressed in the same way."""
        chain = list(stages)
        return type(self)(dict(chain), [name for name, _ in chain], quantizer or self.quantizer, self.tokens)

    @property
    def token_group(self) -> int | None:
        """Tokens that leave a sliding residual together: `tokens`, or more where those share statistics."""
        return shared_group([super().token_group, self.tokens])

    def encode(self, x: States, block: int | None = None, rope: Rope | None = None) -> Packed:
        """As `Codec.encode`, with the parts compressed into `stream` and `size`."""
        packed = super().encode(x, block, rope)
        by_sequence: list[list[bytes]] = [[] for _ in range(packed.batch)]
        for run, parts in packed.by_run():
            if self._forms(packed, run.tokens) != _forms_of(run, parts):
                raise self._variable_size_error()
            flat = [_bytes_of(part).flatten(2) for _, part in sorted(run.blocks(parts).items())]
            for found, sequence in zip(by_sequence, torch.cat(flat, 2).cpu().numpy(), strict=True):
                found += [_compress(own.tobytes()) for own in sequence]
        stream, taken = streams(by_sequence)
        parts = {
            STREAM: torch.from_numpy(stream)[:, None, :, None].to(x.device),
            SIZE: torch.from_numpy(taken)[:, None, :, None].to(x.device),
        }
        return replace(packed, parts=parts, runs=tuple(replace(run, rows={SIZE: 1}) for run in packed.runs))

    def planes(self, packed: Packed) -> Packed:
        """Decompress: the parts as the codec inside made them. Raises: DataError: a damaged stream."""
        stream, size = packed.parts[STREAM], packed.parts[SIZE]
        both = zip(stream[:, 0, :, 0].cpu().numpy(), size[:, 0, :, 0].cpu().numpy(), strict=True)
        sequences = [pieces(*own) for own in both]
        runs, found = [], []
        for run in packed.runs:
            forms = self._forms(packed, run.tokens)
            sizes = [form.nbytes for form in forms.values()]
            raw = [np.stack([_decompress(next(own), sum(sizes)) for _ in range(run.count)]) for own in sequences]
            cut = torch.from_numpy(np.stack(raw)).to(stream.device).split(sizes, 2)
            parts = {name: form.from_bytes(part) for (name, form), part in zip(forms.items(), cut, strict=True)}
            found.append({name: part.transpose(1, 2).flatten(2, 3) for name, part in parts.items()})
            runs.append(replace(run, rows={name: part.shape[-2] for name, part in parts.items()}))
        joined = {name: torch.cat([parts[name] for parts in found], 2) for name in found[0]}
        return replace(packed, parts=joined, runs=tuple(runs))

    def uncoded_bytes(self, packed: Packed) -> int:
        """Bytes of the parts before compression, of all sequences."""
        of_runs = (run.count * sum(f.nbytes for f in self._forms(packed, run.tokens).values()) for run in packed.runs)
        return packed.batch * sum(of_runs)

    def _forms(self, like: Packed, tokens: int) -> dict[str, _Form]:
        """Shape and dtype of each part of a block of `tokens` tokens, in alphabetical order."""
        known = (tokens, like.heads, like.head_dim, like.dtype)
        if known not in self._known:
            zeros = torch.zeros(1, like.heads, tokens, like.head_dim, dtype=like.dtype)
            nothing = torch.zeros(1, tokens, 0)
            packed = super().encode(zeros, None, Rope(nothing, nothing) if self.uses_rope else None)
            self._known[known] = _forms_of(packed.runs[0], packed.parts)
        return self._known[known]


@dataclass(frozen=True)
class _Form:
    """Shape `[heads or 1, rows, columns]` and dtype of a part of a block."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * self.dtype.itemsize

    def from_bytes(self, raw: UInt8[Tensor, "batch blocks bytes"]) -> Tensor:
        """The part of every block from its bytes: `[batch, blocks, heads or 1, rows, columns]`."""
        if not self.nbytes:
            return raw.new_empty((*raw.shape[:2], *self.shape), dtype=self.dtype)
        own = raw.clone(memory_format=torch.contiguous_format)  # also the strides of dimensions of 1
        return own.view(self.dtype).unflatten(2, self.shape)


def _forms_of(run: BlockRun, parts: Mapping[str, Tensor]) -> dict[str, _Form]:
    """Shape and dtype of each part of a block of a run, in alphabetical order."""
    blocks = run.blocks(parts)
    return {name: _Form(tuple(blocks[name].shape[2:]), blocks[name].dtype) for name in sorted(blocks)}


def _bytes_of(part: Tensor) -> UInt8[Tensor, "*lead _bytes"]:
    """The part's memory as uint8; the last axis grows by the bytes of a number."""
    return part.contiguous().view(torch.uint8) if part.numel() else part.to(torch.uint8)


def _compress(raw: bytes) -> bytes:
    """A byte that says how, then `raw` compressed by DEFLATE, or as it is where that is not longer."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    found = packer.compress(raw) + packer.flush()
    return _DEFLATE + found if len(found) < len(raw) else _RAW + raw


def _decompress(piece: bytes, size: int) -> NDArray[np.uint8]:
    """Undo `_compress`: `size` bytes; zero bytes may follow. Raises: DataError: a damaged piece, or another size."""
    raw = piece[1 : 1 + size]
    if piece[:1] == _DEFLATE:
        try:
            raw = zlib.decompressobj(wbits=-zlib.MAX_WBITS).decompress(piece[1:], size + 1)
        except zlib.error as error:
            raise DataError(f"a stream of DEFLATE is damaged ({error})") from error
    if len(raw) != size:
        raise DataError(f"a stream of {len(raw)} bytes where {size} belong")
    return np.frombuffer(raw, np.uint8)
