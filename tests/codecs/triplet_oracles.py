"""Block rotations, OCTOPUS, NexusQuant and NOVA-KV's keys from their definitions, one number at a time, in doubles."""

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
