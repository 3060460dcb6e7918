"""Encoding in one pass on a GPU: launches of `triton_encode` over the groups or tiles of all blocks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from kvq.codecs import VectorQuantizer
from kvq.codecs.quantizers import Parts
from kvq_kernels import triton_encode, triton_loops
from kvq_kernels.uniform_chain import UniformChain, book_columns, parts_of_search

TILE = 32
"""Tokens of a program where statistics are per token, or of groups that no program can hold."""
LONGEST = 128
"""Tokens of the longest group that a program holds at once."""
SHARED = 32 * 1024
"""Bytes of a rotation's rows that a program may keep in addition to its tokens."""
VECTORS = 32
"""Vectors of 8 channels whose 256 scores a program holds in registers."""
FIELDS = 256
"""Fields of a string that a program reads."""
BACK = 2**28
"""Bytes of a trellis's predecessors that are in memory at once."""
WIDEST = 256
"""Channels of a head that fit the memory of a program, at most."""
GAINS = {"none": 0, "l2": 1, "norm": 2, "parallel": 3, "unit": 4}


def fits(chain: UniformChain, blocks: Float[Tensor, "batch blocks heads tokens head_dim"]) -> bool:
    """Whether heads are narrow enough, and the groups of blocks align with the bytes and tiles of the kernels."""
    tokens, dim = blocks.shape[-2:]
    size, groups = chain.group(tokens, dim)
    if dim > WIDEST:
        return False
    if not chain.per_channel:
        return groups == 1 or (size.bit_count() == 1 and dim % size == 0)
    return groups == 1 or size % (8 if size <= LONGEST else TILE) == 0


def encode(chain: UniformChain, blocks: Float[Tensor, "batch blocks heads tokens head_dim"]) -> Parts:
    """The parts of `Codec.encode_block`, each `[batch, blocks, heads, rows, columns]`."""
    x = blocks.detach()
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, count, heads, tokens, dim = x.shape
    quantizer, (size, groups) = chain.quantizer, chain.group(tokens, dim)

    def room(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, heads, count, rows, columns, dtype=dtype, device=x.device)

    planes = [room(-(-tokens * width // 8), dim, torch.uint8) for width in chain.widths]
    shape = (groups, dim) if chain.per_channel else (tokens, groups)
    parts = {f"codes.{index}": plane for index, plane in enumerate(planes)}
    parts["scale"] = low = room(*shape, torch.float16)
    if not quantizer.symmetric:
        integer = quantizer.zero_point == "integer"
        parts["zero_point"] = low = room(*shape, torch.int16 if integer else torch.float16)
    norm = chain.gain_name if chain.norm is None else f"{chain.norm}.scale"
    if norm is not None:
        parts[norm] = room(tokens, 1, torch.float16)
    turn, d = _Transform.of(chain, x), max(16, triton.next_power_of_2(dim))
    held = chain.per_channel and size <= LONGEST
    known = chain.per_channel and not held
    given = _ranges(chain, x, turn, d, size) if known else (x, x)
    step = size if held else min(TILE, tokens)
    n, tiles = max(16, triton.next_power_of_2(step)), triton.cdiv(tokens, step)
    levels = 2 ** (quantizer.bits - 1) - 1 if quantizer.symmetric else 2**quantizer.bits - 1
    with torch.cuda.device_of(x):
        triton_encode.encode_tile[(count * tiles, batch * heads)](
            x, turn.matrix, *planes, *[planes[0]] * (3 - len(planes)), parts["scale"], low,
            parts["scale"] if norm is None else parts[norm], *given,
            *x.stride()[:4], heads, count, tokens, tiles, size, groups, quantizer.clip, float(levels), float(chain.top),
            turn.root, turn.norm_root, dim, *chain.widths, *(0,) * (3 - len(chain.widths)),
            chain.per_channel, d if groups == 1 else size, known, _grid_kind(chain), GAINS[quantizer.gain],
            turn.rotated, chain.signs, chain.norm is not None, step, n, d, _rows_at_once(turn.matrix, d),
            num_warps=8 if n * d > 8192 else 4,
        )  # fmt: skip
    return {name: part.transpose(1, 2) for name, part in parts.items()}


def _ranges(chain: UniformChain, x: Tensor, turn: _Transform, d: int, size: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest values `[batch, heads, blocks, groups, dim]` of groups of several tiles."""
    batch, count, heads, tokens, dim = x.shape
    tiles = triton.cdiv(tokens, TILE)
    low, high = torch.empty(2, batch, heads, count, tiles, dim, device=x.device)
    with torch.cuda.device_of(x):
        triton_encode.ranges[(count * tiles, batch * heads)](
            x, turn.matrix, low, high, *x.stride()[:4], heads, count, tokens, tiles, turn.root, turn.norm_root, dim,
            turn.rotated, chain.signs, chain.norm is not None, TILE, d, _rows_at_once(turn.matrix, d),
        )  # fmt: skip
    together = triton.cdiv(min(size, tokens), TILE)
    short = (0, 0, 0, -tiles % together)
    grouped = (
        functional.pad(part, short, value=value).unflatten(3, (-1, together))
        for part, value in ((low, math.inf), (high, -math.inf))
    )
    least, most = grouped
    return least.amin(4).contiguous(), most.amax(4).contiguous()


def search(
    quantizer: VectorQuantizer, y: Float[Tensor, "*lead tokens dim"]
) -> tuple[Parts, Float[Tensor, "*lead tokens 1"] | None]:
    """Codes and gains of `y` (fp32), see `parts_of_search`."""
    vectors = y.reshape(-1, 8).contiguous()
    codes = torch.empty(quantizer.bits, len(vectors), dtype=torch.uint8, device=y.device)
    scores = torch.empty(len(vectors), device=y.device)
    columns = book_columns(quantizer.codebook, quantizer.bits, y.device)
    with torch.cuda.device_of(y):
        triton_encode.search[(triton.cdiv(len(vectors), VECTORS),)](
            vectors, columns, codes[0], codes[-1], scores, len(vectors), quantizer.bits == 2, VECTORS
        )
    return parts_of_search(quantizer, y, codes, scores)


@dataclass(frozen=True)
class _Transform:
    """Arguments of kernels for rotation and norm.

    Attributes:
        rotated: whether there is a rotation.
        matrix: its signs in the states' dtype, to be multiplied by `root`, or (unequal magnitudes) itself in fp32.
        norm_root: what norms are divided by.
    """

    rotated: bool
    matrix: Tensor
    root: float
    norm_root: float

    @staticmethod
    def of(chain: UniformChain, x: Tensor) -> _Transform:
        dim = x.shape[-1]
        norm_root = dim**0.5 if chain.rms else 1.0
        if chain.rotation is None:
            return _Transform(False, x, 1.0, norm_root)
        if chain.signs:
            return _Transform(True, _sign_matrix(chain, dim, x.dtype, x.device), dim**-0.5, norm_root)
        matrix = chain.matrix(dim, torch.empty(0, device=x.device))
        assert matrix is not None
        return _Transform(True, matrix.contiguous(), 1.0, norm_root)


@functools.lru_cache(maxsize=64)
def _sign_matrix(chain: UniformChain, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The signs of the rotation `[dim, dim]` in a dtype, cached."""
    matrix = chain.matrix(dim, torch.empty(0, device=device))
    assert matrix is not None
    return matrix.sign().to(dtype).contiguous()


def _rows_at_once(matrix: Tensor, d: int) -> int:
    """Rows of a rotation that a program multiplies by at a time."""
    return min(d, max(16, SHARED // (d * matrix.element_size())))


def _grid_kind(chain: UniformChain) -> int:
    """How a group's lowest value is stored, as a constant of `triton_loops`: fp16, integer zero point, or not."""
    if chain.quantizer.symmetric:
        return triton_loops.SYMMETRIC
    return getattr(triton_loops, chain.quantizer.zero_point.upper())


def codes_of(
    x: Float[Tensor, "rows components"],
    widths: tuple[int, ...],
    weights: Float[Tensor, " components"],
    books: Float[Tensor, "widths states"],
) -> UInt8[Tensor, "rows components"]:
    """The codes of a trellis (`kvq.codecs.trellis.Loops.codes_of`), for as many rows at once as `BACK` bytes allow."""
    fields, states = torch.tensor(widths, dtype=torch.uint8, device=x.device), books.shape[1]
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    rows = max(1, BACK // (states // 2 * max(1, x.shape[1])))
    for part, out in zip(x.split(rows), codes.split(rows), strict=True):
        if part.numel():
            back = torch.empty(*part.shape, states // 2, dtype=torch.uint8, device=x.device)
            with torch.cuda.device_of(x):
                triton_encode.search_trellis[(len(part),)](
                    part.contiguous(), fields, weights, books, back, out, x.shape[1], states.bit_length() - 1,
                    len(books), num_warps=max(1, min(8, states // 128)), enable_fp_fusion=False,
                )  # fmt: skip
    return codes


def values_of(
    strings: UInt8[Tensor, "rows bytes_around"],
    starts: Int[Tensor, " fields"],
    shifts: Int[Tensor, " fields"],
    masks: Int[Tensor, " fields"],
    entries: Int[Tensor, " fields"],
    books: Float[Tensor, " entries_in_all"],
) -> Float[Tensor, "rows fields"]:
    """The values of strings of trellis codes (`kvq.codecs.trellis.Loops.values_of`)."""
    rows, fields = len(strings), len(starts)
    out = torch.empty(rows, fields, dtype=books.dtype, device=strings.device)
    if rows and fields:
        grid = (rows, triton.cdiv(fields, FIELDS))
        places = (starts, shifts, masks, entries)
        with torch.cuda.device_of(books):
            triton_encode.read_fields[grid](strings, *places, books, out, fields, strings.shape[1], FIELDS)
    return out
