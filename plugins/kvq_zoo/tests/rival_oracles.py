"""KVarN, Kitty and Block-GTQ from their definitions, one number at a time, in plain loops and double precision.

An oracle takes the states of one block of one head, `[tokens, dim]`, and gives what is stored, and the decoded states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from kvq_zoo.tests.engine_oracles import clamp, half_even, half_up, nearest_levels
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


def variance_balance(tile: Matrix, iterations: int, variances: bool) -> list[tuple[list[float], list[float]]]:
    """KVarN's scales of the rows and of the columns of a tile: columns first, the least imbalance kept.

    Where bounds are met, later iterates may differ from an early one by a factor that moves from rows to columns. Their
    imbalances are equal then up to rounding, which decides: all that are within 1e-12 of the least, the latest first.
    """
    rows, columns = [0.0] * len(tile), [0.0] * len(tile[0])

    def balanced() -> Matrix:
        return [
            [v / math.exp(rows[i]) / math.exp(columns[j]) for j, v in enumerate(line)] for i, line in enumerate(tile)
        ]

    found = [(imbalance(tile, variances), list(rows), list(columns))]
    for _ in range(iterations):
        columns = [clipped_log(log, deviation(line)) for log, line in zip(columns, transposed(balanced()), strict=True)]
        rows = [clipped_log(log, deviation(line)) for log, line in zip(rows, balanced(), strict=True)]
        found.append((imbalance(balanced(), variances), list(rows), list(columns)))
    least = min(one for one, _, _ in found)
    return [
        ([math.exp(log) for log in own], [math.exp(log) for log in other])
        for one, own, other in reversed(found)
        if one <= least * (1 + 1e-12)
    ]


def kvarn(
    x: np.ndarray, side: str, bits: int, iterations: int = 8, variances: bool = False
) -> list[tuple[Stored, Matrix]]:
    """Rows are channels of keys, tokens of values; their scales are folded into scale and offset of the grid.

    One answer for each of the scales between which rounding decides.
    """
    turned = (x @ hadamard(x.shape[1])).tolist()
    tile = transposed(turned) if side == "key" else turned
    return [
        _kvarn(x, tile, side, bits, rows, columns) for rows, columns in variance_balance(tile, iterations, variances)
    ]


def _kvarn(
    x: np.ndarray, tile: Matrix, side: str, bits: int, rows: list[float], columns: list[float]
) -> tuple[Stored, Matrix]:
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


def uniform(line: Sequence[float], bits: int, kernel: bool) -> tuple[list[int], float, float]:
    """Kitty's codes, scale and offset of a line."""
    low, top = min(line), 2**bits - 1
    span = max(line) - low
    step = max(span / top, 1e-6) if kernel else max(span, 1e-6) / top
    return (
        [clamp((half_up if kernel else half_even)((v - low) / step), 0, top) for v in line],
        stored(step),
        stored(low),
    )


def kitty_keys(x: np.ndarray, boosted: int, kernel: bool) -> tuple[Stored, Matrix]:
    """A page: channels of largest mean magnitude with 4 bits, the others with 2; a byte says which is which."""
    channels = transposed(x.tolist())
    sizes = [sum(abs(v) for v in channel) / len(channel) for channel in channels]
    first = sorted(sorted(range(len(channels)), key=lambda c: -sizes[c])[:boosted])
    out: Stored = {"place": [first.index(c) if c in first else boosted for c in range(len(channels))]}
    decoded: Matrix = [[] for _ in channels]
    for group, bits, members in (
        ("high", 4, first),
        ("low", 2, [c for c in range(len(channels)) if c not in first]),
    ):
        lines = [uniform(channels[c], bits, kernel) for c in members]
        out[f"{group}.codes"] = transposed([codes for codes, _, _ in lines])
        out[f"{group}.scale"] = [step for _, step, _ in lines]
        out[f"{group}.zero_point"] = [low for _, _, low in lines]
        for channel, (codes, step, low) in zip(members, lines, strict=True):
            decoded[channel] = [q * step + low for q in codes]
    return out, transposed(decoded)


def kitty_values(x: np.ndarray, kernel: bool) -> tuple[Stored, Matrix]:
    """Each token over all channels."""
    lines = [uniform(token, 2, kernel) for token in x.tolist()]
    out: Stored = {
        "codes": [codes for codes, _, _ in lines],
        "scale": [step for _, step, _ in lines],
        "zero_point": [low for _, _, low in lines],
    }
    return out, [[q * step + low for q in codes] for codes, step, low in lines]


def pair_energies(keys: np.ndarray, queries: np.ndarray) -> list[float]:
    """Half the sum of the mean squared norms of each pair (i, i + D/2), keys `[tokens, dim]`, queries of all heads."""
    half = keys.shape[-1] // 2
    out = []
    for pair in range(half):
        means = [
            sum(v[pair] ** 2 + v[pair + half] ** 2 for v in vectors) / len(vectors)
            for vectors in (keys.tolist(), queries.reshape(-1, keys.shape[-1]).tolist())
        ]
        out.append(sum(means) / 2)
    return out


def best_widths(energies: Sequence[float], total: int, most: int) -> list[int]:
    """Of all ways to give `total` bits to pairs, 1 to `most` each, that of the least sum of energy / 4^bits."""
    ways = (way for way in itertools.product(range(1, most + 1), repeat=len(energies)) if sum(way) == total)
    return list(min(ways, key=lambda way: sum(s / 4**b for s, b in zip(energies, way, strict=True))))


def turboquant(token: Sequence[float], bits: int, rotation: np.ndarray) -> tuple[list[int], float, list]:
    """Codes, norm and decoded vector of a token in the Lloyd-Max codebook for N(0, 1/size), with its norm corrected."""
    norm = math.sqrt(sum(v * v for v in token))
    codes, levels = nearest_levels(list(np.array(token) / norm @ rotation), bits)
    length = math.sqrt(sum(v * v for v in levels))
    return codes, stored(norm), list(np.array(levels) / length @ rotation.T * stored(norm))


def block_gtq_keys(
    x: np.ndarray, widths: Sequence[int], rotation: Callable[[int], np.ndarray]
) -> tuple[Stored, np.ndarray]:
    """Pairs of equal bits in a group with its own norm, rotation and codebook; `x` before RoPE."""
    out: Stored = {}
    decoded, half = np.zeros(x.shape), len(widths)
    for width in sorted(set(widths)):
        pairs = [pair for pair in range(half) if widths[pair] == width]
        channels = pairs + [pair + half for pair in pairs]
        found = [turboquant([token[c] for c in channels], width, rotation(len(channels))) for token in x]
        out[f"bits{width}.codes"] = [codes for codes, _, _ in found]
        out[f"bits{width}.norm.scale"] = [norm for _, norm, _ in found]
        decoded[:, channels] = [vector for _, _, vector in found]
    return out, decoded
