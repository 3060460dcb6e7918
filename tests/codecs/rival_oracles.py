"""KVarN, Kitty and Block-GTQ from their definitions, one number at a time, in plain loops and double precision.

An oracle takes the states of one block of one head, `[tokens, dim]`, and gives what is stored, and the decoded states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.codecs.engine_oracles import clamp, half_even
from tests.codecs.oracles import hadamard, stored

Matrix = list[list[float]]
Stored = dict[str, list]


def transposed(tile: Matrix) -> Matrix:
    return [list(column) for column in zip(*tile, strict=True)]


def deviation(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((v - mean) ** 2 for v in numbers) / (len(numbers) - 1))


def imbalance(tile: Matrix, variances: bool) -> float:
    total = 0.0
    for lines in (tile, transposed(tile)):
        spread = [deviation(line) ** (2 if variances else 1) for line in lines]
        total += max(spread) / min(spread)
    return total


def clipped_log(log: float, spread: float) -> float:
    return min(max(log + math.log(min(max(spread, 1e-3), 1e3)), -0.3), 10)


def variance_balance(tile: Matrix, iterations: int, variances: bool) -> tuple[list[float], list[float]]:
    """KVarN's scales of the rows and of the columns of a tile: columns first, the least imbalance kept."""
    rows, columns = [0.0] * len(tile), [0.0] * len(tile[0])

    def balanced() -> Matrix:
        return [
            [v / math.exp(rows[i]) / math.exp(columns[j]) for j, v in enumerate(line)] for i, line in enumerate(tile)
        ]

    best, least = (list(rows), list(columns)), imbalance(tile, variances)
    for _ in range(iterations):
        columns = [clipped_log(log, deviation(line)) for log, line in zip(columns, transposed(balanced()), strict=True)]
        rows = [clipped_log(log, deviation(line)) for log, line in zip(rows, balanced(), strict=True)]
        if (found := imbalance(balanced(), variances)) <= least:
            best, least = (list(rows), list(columns)), found
    return [math.exp(log) for log in best[0]], [math.exp(log) for log in best[1]]


def kvarn(x: np.ndarray, side: str, bits: int, iterations: int = 8, variances: bool = False) -> tuple[Stored, Matrix]:
    """Rows are channels of keys, tokens of values; their scales are folded into scale and offset of the grid."""
    turned = (x @ hadamard(x.shape[1])).tolist()
    tile = transposed(turned) if side == "key" else turned
    rows, columns = variance_balance(tile, iterations, variances)
    out: Stored = {"codes": [], "scale": [], "zero_point": [], "balance.scale": [stored(scale) for scale in columns]}
    decoded = []
    for line, own in zip(tile, rows, strict=True):
        even = [v / own / other for v, other in zip(line, columns, strict=True)]
        low = min(even)
        step = max((max(even) - low) / (2**bits - 1), 1e-10)
        codes = [clamp(half_even((v - low) / step), 0, 2**bits - 1) for v in even]
        scale, offset = stored(own * step), stored(own * low)
        out["codes"].append(codes)
        out["scale"].append(scale)
        out["zero_point"].append(offset)
        decoded.append([(q * scale + offset) * stored(other) for q, other in zip(codes, columns, strict=True)])
    if side == "key":
        out["codes"], decoded = transposed(out["codes"]), transposed(decoded)
    return out, (np.array(decoded) @ hadamard(x.shape[1]).T).tolist()
