"""Naive oracles: one group, one token and one element at a time, in numpy, from the definitions in the papers.

`kind` is the arithmetic that codes and statistics are computed in; what is stored is always fp16.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvq.codecs.lloyd_max import cells

FP16 = 2.0**-11
"""Largest relative error of rounding a normal number to fp16."""


@dataclass(frozen=True)
class Grid:
    """A uniform quantizer's settings, by the names of its configuration."""

    bits: int
    axis: str
    group_size: int | None = None
    symmetric: bool = False
    zero_point: str = "float"
    clip: float = 1.0


@dataclass(frozen=True)
class Quantized:
    """Codes, reconstruction, and for every element its group's step and the range that was not clipped."""

    codes: np.ndarray
    values: np.ndarray
    step: np.ndarray
    low: np.ndarray
    high: np.ndarray


def stored(x: float) -> float:
    """A number as fp16 keeps it, saturating; torch rounds fp64 to fp32 on the way."""
    return float(np.float16(np.float32(min(max(float(x), -65504.0), 65504.0))))


def quantize(x: np.ndarray, grid: Grid, kind: type = np.float64) -> Quantized:
    """Quantize `[heads, tokens, dim]`."""
    heads, tokens, dim = x.shape
    out = Quantized(np.zeros(x.shape, int), *(np.zeros(x.shape) for _ in range(4)))
    along = tokens if grid.axis == "per_channel" else dim
    size = grid.group_size or along
    for head in range(heads):
        for line in range(dim if grid.axis == "per_channel" else tokens):
            for start in range(0, along, size):
                span = slice(start, min(start + size, along))
                where = (head, span, line) if grid.axis == "per_channel" else (head, line, span)
                group = [kind(v) for v in x[where]]
                for target, numbers in zip(vars(out).values(), _group(group, grid, kind), strict=True):
                    target[where] = numbers
    return out


def _group(group: list, grid: Grid, kind: type) -> tuple:
    clip, top = kind(grid.clip), kind(2**grid.bits - 1)
    if grid.symmetric:
        half = kind(2 ** (grid.bits - 1) - 1)
        end = max(abs(v) for v in group) * clip
        step = end / half
        signed = [_clamp(_round(v / step) if step else 0, -half, half) for v in group]
        return [q + half for q in signed], [stored(step) * q for q in signed], step, -end, end
    low, high = min(group) * clip, max(group) * clip
    step = (high - low) / top
    if step == 0:
        return [0] * len(group), [stored(low)] * len(group), 0, low, high
    if grid.zero_point == "float":
        codes = [_clamp(_round((v - low) / step), 0, top) for v in group]
        return codes, [stored(step) * q + stored(low) for q in codes], step, low, high
    zero = _round(-low / step)
    if abs(zero) >= 2**15:
        return [0] * len(group), [math.nan] * len(group), step, low, high  # not defined: 16 bits cannot hold it
    codes = [_clamp(_round(v / step) + zero, 0, top) for v in group]
    return codes, [stored(step) * (q - zero) for q in codes], step, low, high


def _round(x: float) -> int:
    return round(float(x))


def _clamp(x: float, low: float, high: float) -> int:
    return int(min(max(x, low), high))


def hadamard(dim: int) -> np.ndarray:
    """Sylvester's matrix over the square root of its order: entry (i, j) has the sign of the parity of `i & j`."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    return np.array(signs) / math.sqrt(dim)


def nsn(x: np.ndarray, bits: int, symmetric: bool = False) -> np.ndarray:
    """nsn of one block: exact norms, per-channel directions scaled back to unit length."""
    norm = np.sqrt((x**2).sum(-1, keepdims=True))
    direction = quantize(x / norm, Grid(bits, "per_channel", symmetric=symmetric)).values
    return norm * direction / np.sqrt((direction**2).sum(-1, keepdims=True))


def oscar_keys(x: np.ndarray, bits: int, group: int, scope: str, zero_point: str = "float") -> np.ndarray:
    """OScaR's keys: rotate, divide by the norm of a head's token (or of the token over all heads), per channel."""
    matrix = hadamard(x.shape[-1])
    rotated = x @ matrix
    over = -1 if scope == "head" else (0, 2)
    norm = np.sqrt((rotated**2).sum(over, keepdims=True))
    y = quantize(rotated / norm, Grid(bits, "per_channel", group, zero_point=zero_point)).values
    return (y * np.vectorize(stored)(norm)) @ matrix.T


def rotated(x: np.ndarray, grid: Grid) -> np.ndarray:
    """A quantizer between a Hadamard rotation and its inverse."""
    matrix = hadamard(x.shape[-1])
    return quantize(x @ matrix, grid).values @ matrix.T


def block(heads: int, tokens: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random states `[1, heads, tokens, dim]` whose channels and tokens differ in size and offset, as keys do."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(1, heads, tokens, dim) + 2 * normal(1, heads, 1, dim)
    return (x * torch.exp(normal(1, heads, tokens, 1) / 2)).to(dtype)


def merged(weights: list[float]) -> float:
    """The sum of the weights of all of Huffman's merges: bits of all code words; their mean if weights are shares."""
    heap, total = list(weights), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        total += joined
        heapq.heappush(heap, joined)
    return total


def cell_probabilities(levels: np.ndarray, dim: int) -> np.ndarray:
    """Probability of each level of a symmetric codebook, lowest first, given its positive levels `levels`."""
    half, _ = cells(levels, dim)
    return np.concatenate([half[::-1], half])


def level_error(levels: np.ndarray, dim: int) -> float:
    """E|x - x̂|² / E|x|² of unit vectors whose coordinates take these levels: 1 - dim · Σ p c²."""
    return float(1 - 2 * dim * (cells(levels, dim)[0] * levels**2).sum())
