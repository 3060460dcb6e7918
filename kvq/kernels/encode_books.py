"""Search of NSNQuant's codebooks on a CPU: the nearest of 256 entries, 16 of them at a time, for 8 channels.

The nearest entry c of a vector v has the largest v·c - |c|²/2. Entries stand in columns, so that each channel is one
multiplication by 16 entries; two vectors share what is loaded. Of equal scores the first entry wins, as in the codec.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import no_type_check

import torch
from jaxtyping import Float
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from kvq.codecs import Rope, VectorQuantizer
from kvq.codecs.machine_code import compiled
from kvq.codecs.quantizers import Parts
from kvq.kernels.cpu import pool
from kvq.kernels.cpu_tables import GROUP
from kvq.kernels.cpu_vectors import BYTE, INT, LANES, Step
from kvq.kernels.encode_cpu import ROWS
from kvq.kernels.uniform_chain import book_columns, searched

ENTRIES = 256
TOGETHER = 2
"""Vectors of a step."""


def in_slices(
    encode: Callable[[Tensor, Rope | None], Parts],
    blocks: Float[Tensor, "batch blocks heads tokens head_dim"],
    rope: Rope | None,
) -> Parts:
    """The parts that `encode` makes of the blocks, a few at a time, so that stages read what the cache still holds."""
    heads, tokens = blocks.shape[2:4]
    step = max(1, ROWS // (heads * tokens))
    slices = [slice(start, start + step) for start in range(0, blocks.shape[1], step)]

    def one(some: slice) -> Parts:
        turned = None if rope is None else replace(rope, cos=rope.cos[:, some], sin=rope.sin[:, some])
        return encode(blocks[:, some], turned)

    threads = min(torch.get_num_threads(), len(slices))
    found = [one(some) for some in slices] if threads == 1 else list(pool(threads).map(one, slices))
    return {name: torch.cat([parts[name] for parts in found], 1) for name in found[0]}


def search(
    quantizer: VectorQuantizer, y: Float[Tensor, "*lead tokens dim"]
) -> tuple[Parts, Float[Tensor, "*lead tokens 1"] | None]:
    """Codes and gains of `y` (fp32), see `searched`."""
    signed, count = quantizer.bits == 2, y.numel() // GROUP
    # A last vector may have no partner: one of zeros.
    rows = torch.zeros(count + count % TOGETHER, GROUP)
    rows[:count] = y.reshape(-1, GROUP)
    codes = torch.empty(2 if signed else 1, len(rows), dtype=torch.uint8)
    scores = torch.empty(len(rows))
    columns = book_columns(quantizer.codebook, quantizer.bits, y.device).numpy()
    _search(signed)(rows.numpy(), columns, codes[0].numpy(), codes[-1].numpy(), scores.numpy())
    return searched(quantizer, y, codes[:, :count], scores[:count])


@functools.cache
@no_type_check
def _search(signed):
    """A loop `(rows, columns, codes, signs, scores)` over an even number of vectors `[count, 8]`."""

    def build(context, builder, signature, args):
        step = _Vectors(context, builder, signature, args, 8, LANES)
        at = [builder.add(args[5], step.size(index)) for index in range(TOGETHER)]
        vectors = [step.vector_of(row, signed) for row in at]
        wide = ir.VectorType(INT, LANES)
        lanes = ir.Constant(wide, list(range(LANES)))
        best, where = [None] * TOGETHER, [ir.Constant(wide, [0] * LANES)] * TOGETHER
        for first in range(0, ENTRIES, LANES):
            columns = [step.load(1, step.size(channel), step.size(first)) for channel in range(GROUP + 1)]
            for index, channels in enumerate(vectors):
                score = columns[GROUP]
                for column, channel in zip(columns[:GROUP], channels, strict=True):
                    score = step.add_product(channel, column, score)
                if first == 0:
                    best[index] = score
                    continue
                more = builder.fcmp_ordered(">", score, best[index])
                best[index] = builder.select(more, score, best[index])
                here = ir.Constant(wide, [first] * LANES)
                where[index] = builder.select(more, here, where[index])
        for index, row in enumerate(at):
            top, place = step.highest(best[index], builder.add(where[index], lanes))
            builder.store(builder.trunc(place, BYTE), step.pointer(2, BYTE, row))
            builder.store(top, step.pointer(4, ir.FloatType(), row))
            if signed:
                builder.store(step.signs_of(row), step.pointer(3, BYTE, row))
        return context.get_dummy_value()

    @intrinsic
    def two(typing_context, rows, columns, codes, signs, scores, first):
        return types.void(rows, columns, codes, signs, scores, types.intp), build

    @compiled({"nogil": True, "boundscheck": False, "error_model": "numpy"}, keep=True)
    def loop(rows, columns, codes, signs, scores):
        for first in range(0, rows.shape[0], TOGETHER):
            two(rows, columns, codes, signs, scores, first)

    return loop


@no_type_check
class _Vectors(Step):
    """Reads vectors of 8 channels from argument 0."""

    def _vector(self, row):
        kind = ir.VectorType(ir.FloatType(), GROUP)
        found = self.builder.load(self.pointer(0, kind, row, self.size(0)), typ=kind)
        found.align = 4
        return found

    def vector_of(self, row, signed):
        """Each channel of the vector (of a signed codebook: its magnitude) in all lanes."""
        vector = self._vector(row)
        if signed:
            kind = ir.VectorType(INT, GROUP)
            bits = self.builder.and_(self.builder.bitcast(vector, kind), ir.Constant(kind, [0x7FFFFFFF] * GROUP))
            vector = self.builder.bitcast(bits, vector.type)
        places = [ir.Constant(ir.VectorType(INT, LANES), [channel] * LANES) for channel in range(GROUP)]
        return [self.builder.shuffle_vector(vector, vector, place) for place in places]

    def signs_of(self, row):
        """A byte with bit i set where channel i is below zero."""
        vector = self._vector(row)
        negative = self.builder.fcmp_ordered("<", vector, ir.Constant(vector.type, [0.0] * GROUP))
        return self.builder.bitcast(negative, BYTE)

    def highest(self, scores, places):
        """The highest score, and the least place that has it."""
        top = self._reduced("fmax", scores, ir.FloatType(), "f32")
        one = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), top, INT(0))
        zeros = ir.Constant(ir.VectorType(INT, LANES), [0] * LANES)
        equal = self.builder.fcmp_ordered("==", scores, self.builder.shuffle_vector(one, one, zeros))
        none = ir.Constant(ir.VectorType(INT, LANES), [ENTRIES - 1] * LANES)
        return top, self._reduced("umin", self.builder.select(equal, places, none), INT, "i32")

    def _reduced(self, how, vector, kind, suffix):
        name = f"llvm.vector.reduce.{how}.v{LANES}{suffix}"
        reduce = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kind, [vector.type]), name)
        return self.builder.call(reduce, [vector])
