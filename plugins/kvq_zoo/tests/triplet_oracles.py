"""Rivals of TurboQuant from their definitions, one number at a time, in doubles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy import integrate

Quaternion = Sequence[float]


def hamilton(a: Quaternion, b: Quaternion) -> list[float]:
    """The product of two quaternions (w, x, y, z)."""
    return [
        a[0] * b[0] - a[1] * b[1] - a[2] * b[2] - a[3] * b[3],
        a[0] * b[1] + a[1] * b[0] + a[2] * b[3] - a[3] * b[2],
        a[0] * b[2] - a[1] * b[3] + a[2] * b[0] + a[3] * b[1],
        a[0] * b[3] + a[1] * b[2] - a[2] * b[1] + a[3] * b[0],
    ]


def around(axis: Sequence[float], angle: float, v: Sequence[float]) -> list[float]:
    """Rodrigues' formula."""
    c, s, dot = math.cos(angle), math.sin(angle), sum(a * b for a, b in zip(axis, v, strict=True))
    x, y, z = axis
    cross = [y * v[2] - z * v[1], z * v[0] - x * v[2], x * v[1] - y * v[0]]
    return [c * own + s * other + (1 - c) * dot * a for own, other, a in zip(v, cross, axis, strict=True)]


def to_square(v: Sequence[float]) -> tuple[float, float]:
    total = sum(map(abs, v))
    x, y, z = (part / total for part in v)
    if z >= 0:
        return x, y
    return math.copysign(1 - abs(y), x), math.copysign(1 - abs(x), y)


def to_direction(xi: float, eta: float) -> list[float]:
    x, y, z = xi, eta, 1 - abs(xi) - abs(eta)
    if z < 0:
        x, y = math.copysign(1 - abs(eta), xi), math.copysign(1 - abs(xi), eta)
    length = math.sqrt(x * x + y * y + z * z)
    return [x / length, y / length, z / length]


def square_density(xi: float) -> float:
    """Of a coordinate of a uniform direction's point, on [0, 1]: a small square has its area / |p|^3 as solid angle."""

    def solid(eta: float) -> float:
        point = (xi, eta, 1 - xi - eta) if eta <= 1 - xi else (1 - eta, 1 - xi, xi + eta - 1)
        return sum(part * part for part in point) ** -1.5 / math.pi

    return integrate.quad(solid, 0, 1, points=[1 - xi], epsabs=1e-13)[0]


def nearest(levels: Sequence[float], value: float) -> int:
    return min(range(len(levels)), key=lambda place: (abs(levels[place] - value), place))


def octopus(row: Sequence[float], square: Sequence[float], norms: Sequence[float]) -> list[float]:
    """A rotated unit vector, decoded: joint rounding of directions, then the norm nearest to t·n."""
    out: list[float] = []
    filled = [*row, *[0.0] * (-len(row) % 3)]
    for start in range(0, len(filled), 3):
        t = filled[start : start + 3]
        places = [nearest(square, part) for part in to_square(t)] if any(t) else [nearest(square, 0.0)] * 2
        tried = []
        for moves in itertools.product((0, -1, 1), repeat=2):
            at = [min(max(place + move, 0), len(square) - 1) for place, move in zip(places, moves, strict=True)]
            direction = to_direction(square[at[0]], square[at[1]])
            tried.append((sum(a * b for a, b in zip(direction, t, strict=True)), direction))
        along, direction = max(tried, key=lambda one: one[0])
        norm = norms[nearest(norms, along)]
        out += [norm * part for part in direction]
    return out[: len(row)]


def nexus(row: Sequence[float], bits: int) -> list[float]:
    """Lattice points of 8 channels as released, the scale rounded to 16 bits for decoding."""
    top = 2 ** (bits - 1)
    scale = max(max(map(abs, row)), 1e-8) / top
    stored = float(np.float16(scale))
    out: list[float] = []
    for start in range(0, len(row), 8):
        x = [v / scale for v in row[start : start + 8]]
        whole = [float(round(v)) for v in x]
        if sum(whole) % 2:
            gaps = [abs(v - w) for v, w in zip(x, whole, strict=True)]
            place = gaps.index(min(gaps))
            whole[place] += 1 if x[place] - whole[place] >= 0 else -1
        half = [round(v - 0.5) + 0.5 for v in x]
        errors = [sum((v - p) ** 2 for v, p in zip(x, point, strict=True)) for point in (whole, half)]
        chosen = half if errors[1] < errors[0] else whole
        out += [min(max(p, -top), top) * stored for p in chosen]
    return out


def query_basis(keys: np.ndarray, moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`forward`, `inverse` with columns by eigenvalue, descending: M^(1/2) V and its inverse."""
    values, vectors = np.linalg.eigh(moment)
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    centered = keys - keys.mean(0)
    spectrum, turned = np.linalg.eigh(root @ (centered.T @ centered / len(keys)) @ root)
    turned = turned[:, np.argsort(spectrum)[::-1]]
    return root @ turned, turned.T @ np.linalg.inv(root)


def spectral_levels(values: np.ndarray, bits: int) -> np.ndarray:
    """Lloyd's steps, cell by cell, from even levels between the extremes."""
    if not bits:
        return np.array([values.mean()])
    levels = np.linspace(values.min(), values.max(), 2**bits)
    for _ in range(200):
        cell = np.abs(values.reshape(-1, 1) - levels).argmin(1)
        found = np.array([values[cell == i].mean() if (cell == i).any() else v for i, v in enumerate(levels)])
        moved, levels = np.abs(found - levels).max(), found
        if moved < 1e-6:
            break
    return levels


def spectral(fitted: np.ndarray, states: np.ndarray, bits: int, water_filling: bool) -> tuple[np.ndarray, list[int]]:
    """Rows of one head, decoded, and the bits of each coordinate, by a calibration on `fitted`."""
    moment = sum(np.outer(row, row) for row in fitted) / len(fitted)
    energies, vectors = np.linalg.eigh(moment)
    order = np.argsort(energies)[::-1]
    basis = vectors[:, order]
    basis = basis * np.sign(basis[np.abs(basis).argmax(0), np.arange(len(basis))])
    basis = basis.astype(np.float32).astype(np.float64)
    seen, dim = fitted @ basis, len(basis)
    energies = (seen**2).mean(0)
    split = min(max(round(energies.sum() ** 2 / (energies**2).sum()), 1), dim - 1)
    best = None
    for high in range(8, 0, -1):
        for low in range(high, 0, -1):
            off = abs(split * high + (dim - split) * low - bits * dim)
            if best is None or off < best[0]:
                best = off, high, low
    assert best is not None
    _, high, low = best
    widths = [high] * split
    if water_filling:
        widths = [0] * split
        while sum(widths) < high * split:
            gains = [energies[i] / 4.0**width if width < 8 else -1.0 for i, width in enumerate(widths)]
            widths[gains.index(max(gains))] += 1
    tail = spectral_levels(seen[:, split:].ravel(), low)
    books = (
        [spectral_levels(seen[:, i], width) for i, width in enumerate(widths)]
        if water_filling
        else [spectral_levels(seen[:, :split].ravel(), high)] * split
    )
    books = [book.astype(np.float32).astype(np.float64) for book in [*books, *[tail] * (dim - split)]]
    rows = [[books[i][np.abs(books[i] - value).argmin()] for i, value in enumerate(row)] for row in states @ basis]
    return np.array(rows) @ basis.T, widths + [low] * (dim - split)


def grid_per_channel(tile: np.ndarray, bits: int, group: int = 32) -> np.ndarray:
    """KIVI's keys, one group of a channel at a time, decoded with 16-bit scales and offsets."""
    out = np.empty_like(tile)
    for start in range(0, len(tile), group):
        for channel in range(tile.shape[1]):
            values = tile[start : start + group, channel]
            low, scale = values.min(), (values.max() - values.min()) / (2**bits - 1)
            codes = [round((v - low) / scale) if scale else 0 for v in values]
            kept = float(np.float16(scale)), float(np.float16(low))
            out[start : start + group, channel] = [code * kept[0] + kept[1] for code in codes]
    return out


def squat(tile: np.ndarray, moment: np.ndarray, bits: int, rank: int, factor: float) -> np.ndarray:
    """Two groups of channels: the second is moved to the minimizer of |e|² + factor eᵀ M e, given the first's error."""
    half = tile.shape[1] // 2
    energies, vectors = np.linalg.eigh(moment)
    metric = np.eye(len(moment))
    for energy, vector in sorted(zip(energies, vectors.T, strict=True), key=lambda pair: -pair[0])[:rank]:
        metric = metric + factor * energy * np.outer(vector, vector)
    first = grid_per_channel(tile[:, :half], bits)
    # The gradient over the second part of the error is zero where metric[r, r] e_r = -metric[r, s] e_s.
    carried = [np.linalg.solve(metric[half:, half:], -metric[half:, :half] @ row) for row in first - tile[:, :half]]
    return np.hstack([first, grid_per_channel(tile[:, half:] + np.array(carried), bits)])
