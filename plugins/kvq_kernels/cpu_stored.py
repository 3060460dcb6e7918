"""What a side stores for a token or a block next to its codes, as loops for a CPU read it, in fp32 and for some heads.

The norms of tokens and the vectors of shifts. Numbers in fp16 and codes of one plane are decoded by compiled loops, so
that heads are decoded in the threads that attend to them; others as the codec does it. A shift of NSNQuant is one
vector per block, which each token's norm scales: it adds to the scores of keys, turned by each token's angles (RoPE)
where that was undone before it, and to the sums of values.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import DoubleQuant, plane_widths
from kvq.codecs.packed import BlockRun
from kvq.kernels.linear_chain import LinearChain, PackedStates
from kvq_kernels.cpu_values import OPTIONS, TILE, single, value_loops


@dataclass(frozen=True)
class Heads:
    """Consecutive KV heads of one sequence."""

    batch: int
    first: int
    count: int

    @property
    def index(self) -> tuple[int, slice]:
        """The index of these heads in an array `[batch, heads, ...]`."""
        return self.batch, slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class Flat:
    """A stored part `[batch, heads or 1, rows, columns]` as a flat array, for compiled loops.

    Attributes:
        part: the part itself.
        numbers: the flat array, head by head; fp16 as int16.
        batch: stride, in numbers, from one sequence to the next.
        place: stride, in numbers, from head to head (0: heads share them); rows; columns.
    """

    part: Tensor
    numbers: Any
    batch: int
    place: tuple[int, int, int]

    @staticmethod
    def of(part: Tensor) -> Flat:
        """A view where rows are contiguous, as a cache stores them, else a copy."""
        (sequences, heads, rows, columns), (batch, head, row, column) = part.shape, part.stride()
        if (column != 1 and columns > 1) or (row != columns and rows > 1):
            return Flat.of(part.contiguous())
        reach = (sequences - 1) * batch + (heads - 1) * head + rows * columns
        flat = part.as_strided((reach if part.numel() else 0,), (1,))
        numbers = flat.view(torch.int16) if flat.dtype is torch.float16 else flat
        return Flat(part, numbers.numpy(), batch, (head if heads > 1 else 0, rows, columns))

    def from_head(self, heads: Heads) -> Any:
        """The flat numbers, from the first one of `heads` on."""
        return self.numbers[heads.batch * self.batch + heads.first * self.place[0] :]

    def of_heads(self, heads: Heads) -> Tensor:
        """The part of `heads`, `[heads or 1, rows, columns]`."""
        return self.part[heads.index] if self.place[0] else self.part[heads.batch]


@dataclass(frozen=True)
class Stored:
    """What a chain stores next to the codes of a run of blocks.

    Attributes:
        index: number of the run.
        start: index of the first token.
        run: layout of the blocks.
        parts: stored parts by name, without those of the quantizer.
    """

    index: int
    start: int
    run: BlockRun
    parts: dict[str, Flat]

    def rows(self, name: str, quantized: DoubleQuant | None, heads: Heads, tokens: bool, length: int) -> Any:
        """Decode part `name` to `[heads or 1, blocks, length]` in fp32: a number per token (`tokens`) or channel."""
        if quantized is None:
            return self.numbers(name, heads).reshape(-1, self.run.count, length)
        parts = {key.removeprefix(f"{name}."): part for key, part in self.parts.items() if key.startswith(f"{name}.")}
        if not _has_restore_loop(quantized, tokens, length):
            decodable = {key: part.of_heads(heads).unflatten(1, (self.run.count, -1)) for key, part in parts.items()}
            decodable = {key: part.float() if part.is_floating_point() else part for key, part in decodable.items()}
            numbers = quantized.decode(decodable, *((length, 1) if tokens else (1, length)), torch.float32)
            return numbers.flatten(2).contiguous().numpy()
        codes, steps = parts["codes.0"], parts["step"]
        size = min(quantized.group_size or length, length)
        out = scratch(f"{name}.{self.index}", (heads.count if codes.place[0] else 1, self.run.count, length))
        first = 2 ** (quantized.bits - 1) - 1 if quantized.signed else 0
        at = codes.place[0], steps.place[0]
        restore_loop(quantized.bits)(codes.from_head(heads), steps.from_head(heads), at, size, first, out)
        return out

    def numbers(self, name: str, heads: Heads) -> Any:
        """A part without codes, `[heads or 1, numbers]` in fp32."""
        part = self.parts[name]
        if part.part.dtype is not torch.float16:
            return part.of_heads(heads).float().flatten(1).contiguous().numpy()
        step, rows, columns = part.place
        out = scratch(f"{name}.{self.index}", (heads.count if step else 1, rows * columns))
        halves(part.from_head(heads), step, out)
        return out


def scratch(name: str, shape: tuple[int, ...]) -> Any:
    """A thread's buffer in fp32, reused at the next call: allocating new pages takes longer than writing them."""
    held, count = getattr(_KEPT, name, None), math.prod(shape)
    if held is None or held.size < count:
        held = np.empty(count + count // 4, np.float32)
        setattr(_KEPT, name, held)
    return held[:count].reshape(shape)


_KEPT = threading.local()


@dataclass(frozen=True)
class NormsAndShifts:
    """The decoded norms and shifts of some heads.

    They are overwritten when those of other heads, or of another side, are decoded in the same thread.

    Attributes:
        norms: factor of each token, `[heads or 1, tokens]`.
        shifts: for each shift, the factor of each token, and for each run, its blocks' vectors `[heads or 1, blocks,
            dim]`.
    """

    norms: Any
    shifts: list[tuple[Any, list[Any]]]


def list_stored(states: PackedStates) -> list[Stored]:
    """What the chain stores next to the codes of each run of blocks, in order."""
    return [
        Stored(index, start, run, {key: Flat.of(part) for key, part in parts.items() if "." in key or key == "gain"})
        for index, (start, run, parts) in enumerate(states.runs())
    ]


def norms_and_shifts(chain: LinearChain, stored: Sequence[Stored], heads: Heads, dim: int) -> NormsAndShifts:
    """Decode the norms and shifts of `heads`, each once."""
    product: Any = None
    before: list[Any] = []  # the product of the first norms, by their number

    def times(parts: list[Any]) -> Any:
        part = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        if product is None:
            return part
        return np.multiply(product, part, out=part if len(part) >= len(product) else None)

    for name, stage in chain.norms.items():
        before.append(product)
        rows = [each.rows(f"{name}.scale", stage.double_quant, heads, True, each.run.tokens) for each in stored]
        product = times([part.reshape(len(part), -1) for part in rows])
    before.append(product)
    if "gain" in stored[0].parts:
        product = times([each.numbers("gain", heads) for each in stored])
    ones = ones_for(sum(each.run.tokens * each.run.count for each in stored))
    shifts = []
    for shift in chain.shifts:
        factors = before[len(shift.norms)]
        vectors = [each.rows(f"{shift.name}.offset", shift.stage.double_quant, heads, False, dim) for each in stored]
        shifts.append((ones if factors is None else factors, vectors))
    return NormsAndShifts(ones if product is None else product, shifts)


def ones_for(tokens: int) -> Any:
    """Ones `[1, tokens]`, as norms of tokens without; a view of one array as long as a cache grows within its size."""
    return _ones(1 << tokens.bit_length())[:, :tokens]


@functools.lru_cache(maxsize=1)
def _ones(tokens: int) -> Any:
    return np.ones((1, tokens), np.float32)


def _has_restore_loop(quantized: DoubleQuant, tokens: bool, length: int) -> bool:
    """Whether `restore_loop` decodes numbers per token (`tokens`) or channel: one plane, groups begin on a byte."""
    along = "per_channel" if tokens else "per_token"
    if quantized.axis != along or quantized.bits > 8 or len(plane_widths(quantized.bits)) > 1:
        return False
    return min(quantized.group_size or length, length) % (8 // quantized.bits) == 0


@numba.njit(**OPTIONS)
@no_type_check
def halves(numbers, step, out):
    """Convert fp16, held as int16, to fp32: each row of `out` from `numbers[row * step]` on."""
    for row in range(out.shape[0]):
        line, held = out[row], numbers[row * step :]
        for i in range(line.shape[0]):
            line[i] = single(held[i])


@functools.cache
@no_type_check
def restore_loop(width: int):
    """The loop that decodes codes of `width` bits, `(codes, steps, at, size, first, out)`, into `out[head, row]`.

    A row of codes begins on a byte and has a step for each `size` of them, in fp16 held as int16; `at`: codes and
    steps from head to head. Code `first` stands for 0.
    """
    places, mask = 8 // width, 2**width - 1

    @numba.njit(**OPTIONS)
    def restore(codes, steps, at, size, first, out):
        heads, rows, length = out.shape
        columns, groups = (length + places - 1) // places, (length + size - 1) // size
        for head in range(heads):
            for row in range(rows):
                begin, row_steps = head * at[0] + row * columns, steps[head * at[1] + row * groups :]
                line, held = out[head, row], codes[begin : begin + columns]
                for byte in range(length // places):
                    code = np.int32(held[byte])
                    for place in range(places):
                        line[byte * places + place] = np.float32(np.int32((code >> (place * width)) & mask) - first)
                for i in range(length // places * places, length):
                    line[i] = np.float32(((np.int32(held[i // places]) >> (i % places * width)) & mask) - first)
                for group in range(groups):
                    step, near = single(row_steps[group]), line[group * size : (group + 1) * size]
                    for i in range(near.shape[0]):
                        near[i] *= step

    return restore


@dataclass(frozen=True)
class KeyShifts:
    """The shifts of keys, and the queries whose products with them are added to scores.

    Attributes:
        stored: the runs of blocks.
        steps: by shift the loop, the queries `[batch, heads, group, dim]` and the cosines and sines of all tokens
            `[batch or 1, tokens, pairs]`.
    """

    stored: Sequence[Stored]
    steps: list[tuple[Any, Any, tuple[Any, Any]]]

    @staticmethod
    def of(
        states: PackedStates,
        chain: LinearChain,
        stored: Sequence[Stored],
        query: Float[Tensor, "batch heads group dim"],
    ) -> KeyShifts:
        """The shifts of `chain` for a query, which is rotated as the keys were before each shift was taken."""
        steps = []
        for shift in chain.shifts:
            rope = states.rope if shift.after_rope else None
            angles = [torch.zeros(1, 1, 1)] * 2 if rope is None else [rope.cos, rope.sin]
            pairs = 0 if rope is None else rope.cos.shape[-1]
            half = angles[0].dtype is torch.bfloat16
            cos, sin = ((part.view(torch.int16) if half else part.float()).contiguous().numpy() for part in angles)
            loop = turned_loop(pairs, half, rope is not None and rope.interleaved)
            steps.append((loop, chain.rotate(query, shift.rotations).contiguous().numpy(), (cos, sin)))
        return KeyShifts(stored, steps)

    def add(self, heads: Heads, decoded: NormsAndShifts, scores: Any) -> None:
        """Add the products of queries and shifts to the `scores` `[heads, group, tokens]` of some heads."""
        for (loop, queries, angles), (factors, offsets) in zip(self.steps, decoded.shifts, strict=True):
            turns = tuple(part[min(heads.batch, len(part) - 1)] for part in angles)
            for each, vectors in zip(self.stored, offsets, strict=True):
                loop(queries[heads.index], vectors, turns, factors, each.start, each.run.tokens, scores)


def mix_shifts(
    stored: Sequence[Stored], heads: Heads, decoded: NormsAndShifts, weights: Any, out: Sequence[Any]
) -> None:
    """Add the weighted sums of the shifts of values to `out`, one array `[batch, heads, group, dim]` per shift."""
    for (factors, offsets), total in zip(decoded.shifts, out, strict=True):
        for each, vectors in zip(stored, offsets, strict=True):
            _mix_blocks(weights, factors, vectors, each.start, each.run.tokens, total[heads.index])


@numba.njit(**OPTIONS)
@no_type_check
def _mix_blocks(weights, factors, vectors, start, length, out):
    """Add to `out[head, row]` each block's vector times the sum of its weights times their factors."""
    for head in range(out.shape[0]):
        near, head_vectors = factors[min(head, len(factors) - 1)], vectors[min(head, len(vectors) - 1)]
        for row in range(out.shape[1]):
            line, sums = weights[head, row], out[head, row]
            for block in range(head_vectors.shape[0]):
                first, offset, total = start + block * length, head_vectors[block], np.float32(0)
                here, by = line[first : first + length], near[first : first + length]
                for t in range(length):
                    total += here[t] * by[t]
                for channel in range(sums.shape[0]):
                    sums[channel] += total * offset[channel]


@functools.cache
@no_type_check
def turned_loop(pairs: int, half: bool, interleaved: bool):
    """The loop that adds the scores of a shift of keys, turned by each token's angles (`score_rotated`), to `out`.

    `(queries, vectors, angles, factors, start, length, out)`: `queries` `[heads, group, dim]`, one of `vectors`
    `[heads or 1, blocks, dim]` for each `length` tokens from `start` on, `angles`: cosines and sines `[tokens, pairs]`
    in fp32 (`half`: bf16, held as int16), `factors` `[heads or 1, tokens]`, `out` `[heads, group, tokens]`. A token's
    angles are what a query's products with the vector are multiplied by, as if they were the values of codes.
    """
    dots, _ = value_loops("numbers", (16 if half else 32,), pairs, 4)
    step, apart = (2, 1) if interleaved else (1, pairs)

    @numba.njit(**OPTIONS)
    def turn(queries, vectors, block, products, rest):
        """The products that cosines and sines are multiplied by, and those of channels that are not turned."""
        heads, group, dim = queries.shape
        for row in range(heads * group):
            head_query, vector = queries[row // group, row % group], vectors[min(row // group, len(vectors) - 1), block]
            one, two, still = products[0, row], products[1, row], np.float32(0)
            for p in range(pairs):
                a, b = p * step, p * step + apart
                one[p] = head_query[a] * vector[a] + head_query[b] * vector[b]
                two[p] = head_query[b] * vector[a] - head_query[a] * vector[b]
            for channel in range(2 * pairs, dim):
                still += head_query[channel] * vector[channel]
            rest[row] = still

    @numba.njit(**OPTIONS)
    def turned(queries, vectors, angles, factors, start, length, out):
        group, rows = queries.shape[1], queries.shape[0] * queries.shape[1]
        whole = (rows + 3) // 4 * 4
        totals, rest = np.zeros((2, whole, TILE), np.float32), np.empty(rows, np.float32)
        products = np.zeros((2, whole, pairs), np.float32)
        for block in range(vectors.shape[1]):
            first = start + block * length
            turn(queries, vectors, block, products, rest)
            for token in range(first, first + length, TILE):
                count = min(TILE, first + length - token)
                if pairs > 0:
                    for part in range(2):
                        turns = (angles[part], angles[part], angles[part])
                        dots(products[part], turns, turns, token, 0, count, totals[part])
                for row in range(rows):
                    head, one, two, still = row // group, totals[0, row], totals[1, row], rest[row]
                    line = out[head, row % group, token : token + count]
                    near = factors[min(head, len(factors) - 1), token : token + count]
                    for t in range(count):
                        line[t] += (one[t] + two[t] + still) * near[t]

    return turned
