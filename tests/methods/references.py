"""What codecs compute, by the equations of papers and by what released code does, in loops over numpy numbers.

Arrays are `[heads, tokens, dim]` in fp64. What a method stores is rounded to fp16 here too. Draws (rotations, sketches,
starts) are given: a reference is of what is done with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import integrate

from kvq.codecs import Rope
from tests.codecs.oracles import Grid, hadamard, quantize, stored
from tests.codecs.test_rope import turned

store = np.vectorize(stored)


def integer_grid(x: np.ndarray, bits: int, clip: float, divisor: int, with_zero: bool = False) -> np.ndarray:
    """Values of a row on 2^b codes with a rounded zero point; `with_zero`: the range always holds 0."""
    low, high = min(x) * clip, max(x) * clip
    if with_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / divisor
    zero = round(-low / step)
    return np.array([stored(step) * (min(max(round(v / step) + zero, 0), 2**bits - 1) - zero) for v in x])


def along_rows(x: np.ndarray, each: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """A function of the channels of one token of one head, of every one."""
    return np.stack([np.stack([each(token) for token in head]) for head in x])


def rotated_integer(x: np.ndarray, rotation: np.ndarray, bits: int, clip: float, with_zero: bool) -> np.ndarray:
    """QuaRot and SpinQuant: rotated, one clipped range per head and token, rounded zero point."""
    grid = along_rows(x @ rotation, lambda row: integer_grid(row, bits, clip, 2**bits - 1, with_zero))
    return grid @ rotation.T


def rotatekv_keys(x: np.ndarray, calibration: np.ndarray, ropes: tuple[Rope, Rope], bits: int) -> np.ndarray:
    """Before RoPE: 4 heads joined and rotated, channels sorted by their sums over the calibration, groups of 128."""
    matrix = hadamard(x.shape[0] * x.shape[2])

    def joined(states: np.ndarray, rope: Rope) -> np.ndarray:
        before = turned(torch.from_numpy(states)[None], rope, back=True)[0]
        return np.concatenate(list(before), -1) @ matrix

    order = np.argsort(joined(calibration, ropes[0]).sum(0), kind="stable")
    rows = joined(x, ropes[1])[:, order]
    groups = rotatekv_grid(np.stack(np.split(rows, x.shape[0], -1)), bits)
    back = np.empty_like(rows)
    back[:, order] = np.concatenate(list(groups), -1)
    heads = np.stack(np.split(back @ matrix.T, x.shape[0], -1))
    return turned(torch.from_numpy(heads)[None], ropes[1])[0]


def rotatekv_grid(x: np.ndarray, bits: int) -> np.ndarray:
    """One group per row, 0.8 of its range at 2 bits."""
    return quantize(x, Grid(bits, "per_token", x.shape[-1], clip=0.8 if bits == 2 else 1.0)).values


def qjl_scores(
    x: np.ndarray, queries: np.ndarray, sketch: np.ndarray, outlier_rows: int, outliers: int = 8, group: int = 32
) -> np.ndarray:
    """Inner products `[heads, queries, tokens]` by the released kernels, with E|s·u| of the sketch's rows."""
    dim = x.shape[-1]
    height = math.sqrt(dim) * 2 * integrate.quad(lambda t: t * sphere(t, dim), 0, 1)[0]
    out = np.empty((x.shape[0], len(queries), x.shape[1]))
    for head, token in np.ndindex(x.shape[:2]):
        first = token - token % group
        energy = np.sqrt((x[head, first : first + group] ** 2).sum(0))
        apart = np.zeros(dim, bool)
        apart[np.argsort(-energy)[:outliers]] = True
        key, rest = x[head, token], np.where(apart, 0.0, x[head, token])
        outlying = np.where(apart, key, 0.0)
        whole, part = stored(np.linalg.norm(key)), stored(np.linalg.norm(outlying))
        signs, outlier_signs = np.where(sketch @ rest > 0, 1, -1), np.where(sketch @ outlying > 0, 1, -1)[:outlier_rows]
        left = math.sqrt(max(whole**2 - part**2, 0)) / (len(sketch) * height)
        for number, query in enumerate(queries):
            asked, asked_apart = sketch @ np.where(apart, 0.0, query), sketch @ np.where(apart, query, 0.0)
            score = part / (outlier_rows * height) * (outlier_signs @ asked_apart[:outlier_rows])
            out[head, number, token] = left * (signs @ asked) + score
    return out


def sphere(t: float, dim: int) -> float:
    """Density of one coordinate of a random unit vector."""
    constant = math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi)
    return float(constant * (1 - t * t) ** ((dim - 3) / 2))


def lloyd(density: Callable[[float], float], count: int, low: float, high: float, start: Sequence[float]) -> np.ndarray:
    """Levels that are the means of their cells, by Lloyd's iteration with numerical integrals."""
    levels = np.array(start, dtype=float)
    assert len(levels) == count
    for _ in range(2000):
        ends = [low, *((levels[1:] + levels[:-1]) / 2), high]
        cells = list(itertools.pairwise(ends))
        mass = [integrate.quad(density, *cell, epsabs=1e-14)[0] for cell in cells]
        mean = [integrate.quad(lambda t: t * density(t), *cell, epsabs=1e-14)[0] for cell in cells]
        moved = np.array(mean) / np.array(mass)
        if np.abs(moved - levels).max() < 1e-14:
            return moved
        levels = moved
    return levels


def nearest(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Every number's nearest level."""
    return levels[np.abs(x[..., None] - levels).argmin(-1)]


def turboquant(x: np.ndarray, rotation: np.ndarray, bits: int) -> np.ndarray:
    """Norms apart; rotated directions to the least-error levels of a coordinate of the sphere."""
    dim = x.shape[-1]
    spread = np.linspace(-1.5, 1.5, 2**bits) / math.sqrt(dim)
    levels = lloyd(lambda t: sphere(t, dim), 2**bits, -0.7, 0.7, spread)
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return nearest(x / norm @ rotation, levels) @ rotation.T * store(norm)


def polarquant(x: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Rotated, then 16 channels at a time as a radius and 15 angles: of pairs in 16 arcs, above in 4 levels each."""
    books = [np.linspace(0, 2 * math.pi, 17)[:-1] + math.pi / 16]
    for level in (2, 3, 4):
        power = 2 ** (level - 1) - 1
        guess = (np.arange(4) + 0.5) * math.pi / 8
        books.append(lloyd(lambda t, p=power: math.sin(2 * t) ** p, 4, 0.0, math.pi / 2, guess))  # type: ignore[misc]

    def group(radii: np.ndarray) -> np.ndarray:
        angles = []
        for book in books:
            first, second = radii[0::2], radii[1::2]
            angle = np.arctan2(second, first) % (2 * math.pi)
            angles.append(nearest(angle, book))
            radii = np.sqrt(first**2 + second**2)
        out = store(radii)
        for angle in reversed(angles):
            out = np.stack([out * np.cos(angle), out * np.sin(angle)], -1).ravel()
        return out

    def token(row: np.ndarray) -> np.ndarray:
        return np.concatenate([group(row[start : start + 16]) for start in range(0, len(row), 16)])

    return along_rows(x @ rotation, token) @ rotation.T


def gear(x: np.ndarray, bits: int, per_channel: bool, start: np.ndarray, share: float = 0.02) -> np.ndarray:
    """A quantized backbone, the largest and smallest 1% of each vector as they are, the rest at the start's rank."""
    heads, tokens, dim = x.shape
    vectors = x if per_channel else x.transpose(1, 0, 2).reshape(1, tokens, heads * dim)
    kept, out = vectors.copy(), np.zeros(vectors.shape, bool)
    along = 1 if per_channel else 2
    count = max(round(share / 2 * vectors.shape[along]), 1)
    lines = [(h, slice(None), c) for h in range(heads) for c in range(dim)]
    for line in lines if per_channel else [(0, t, slice(None)) for t in range(tokens)]:
        order = np.argsort(vectors[line], kind="stable")
        ends = np.concatenate([order[:count], order[-count:]])
        chosen = np.zeros(len(order), bool)
        chosen[ends] = True
        out[line] = chosen
        kept[line] = np.where(chosen, vectors[line][~chosen].mean(), vectors[line])
    extremes = store(vectors)
    if not per_channel:
        kept, out, extremes = (a.reshape(tokens, heads, dim).transpose(1, 0, 2) for a in (kept, out, extremes))
    backbone = quantize(kept, Grid(bits, "per_channel" if per_channel else "per_token", 64)).values
    rest = np.where(out, 0, kept - backbone)
    for head in range(heads):
        right = start
        for _ in range(3):
            left = np.linalg.qr(rest[head] @ right)[0]
            right = rest[head].T @ left
        backbone[head] += store(left) @ store(right).T
    return np.where(out, extremes, backbone)


def fp8(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The nearest number of the format, on one scale for the block."""
    scale = np.abs(x).max() / 448
    return nearest(x / scale, numbers) * stored(scale)


def kvquant(
    x: np.ndarray, thresholds: tuple[np.ndarray, np.ndarray] | None, levels: np.ndarray, decoded: np.ndarray
) -> np.ndarray:
    """The released simulation: 0.5% and 99.5% quantiles of channels as `thresholds` (keys), or of each token (values).

    What lies beyond is kept, of values also what lies on them; values are scaled to the extremes of the rest.
    """
    heads, tokens, dim = x.shape
    out = np.empty((tokens, heads * dim))
    for token in range(tokens):
        row = x[:, token].reshape(-1)
        low, high = thresholds or tuple(np.full(row.size, np.quantile(row, q)) for q in (0.005, 0.995))
        apart = (row < low) | (row > high) if thresholds else (row <= low) | (row >= high)
        center, reach = (high + low) / 2, (high - low) / 2
        if thresholds is None:
            rest = np.where(apart, np.median(row), row)
            center, reach = stored((rest.max() + rest.min()) / 2), (rest.max() - rest.min()) / 2
            scaled = (row - (rest.max() + rest.min()) / 2) / reach
            reach = stored(reach)
        else:
            scaled = (row - center) / reach
        chosen = decoded[np.abs(scaled[:, None] - levels).argmin(-1)]
        out[token] = np.where(apart, store(row), chosen * reach + center)
    return out.reshape(tokens, heads, dim).transpose(1, 0, 2)


def coupled(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """CQ: the nearest centroid, of the head's own for each group of neighbouring channels."""
    out = np.empty_like(x)
    width = centroids.shape[-1]
    for head, token, group in np.ndindex(*x.shape[:2], centroids.shape[1]):
        part = slice(group * width, (group + 1) * width)
        own = centroids[head, group]
        out[head, token, part] = own[((own - x[head, token, part]) ** 2).sum(-1).argmin()]
    return out
