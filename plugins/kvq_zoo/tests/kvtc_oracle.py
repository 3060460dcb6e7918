"""KVTC in loops over fp64 numbers: its components, the errors of its groups, the groups, and what a token becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.codecs.oracles import stored
from tests.codecs.test_block_formats import e4m3_numbers

KINDS = {0: 0, 2: 32, 4: 32, 8: 32}
"""Bits of a coefficient, and those of a group's scale and shift."""
Group = tuple[int, int]
"""Size and kind."""
Chain = tuple[Any, ...]
"""The groups before a group, and it; nothing before the first."""
_FLOATS = e4m3_numbers()


def components(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and right singular vectors, the largest entry positive, of rows `[tokens, n]`, as fp32 has them."""
    mean = rows.mean(0)
    vectors = np.linalg.svd(rows - mean, full_matrices=True)[2].T
    for column in vectors.T:
        if column[np.abs(column).argmax()] < 0:
            column *= -1
    return mean.astype(np.float32).astype(np.float64), vectors.astype(np.float32).astype(np.float64)


def decoded(group: Sequence[float], kind: int) -> list[float]:
    """A group of one token as it is read."""
    if kind == 0:
        return [0.0] * len(group)
    low, high = min(group), max(group)
    if kind == 8:
        shift, scale = (low + high) / 2, (high - low) / 896
    else:
        shift, scale = low, (high - low) / (2**kind - 1)
    out = []
    for value in group:
        step = (value - shift) / scale if scale else 0.0
        code = _FLOATS[np.abs(_FLOATS - step).argmin()] if kind == 8 else min(max(round(step), 0), 2**kind - 1)
        out.append(stored(scale) * float(code) + stored(shift))
    return out


def error(z: np.ndarray, start: int, group: Group) -> float:
    """Squared error of one group over all tokens of `[tokens, n]`."""
    size, kind = group
    part = z[:, start : start + size]
    return float(((part - np.array([decoded(row, kind) for row in part.tolist()])) ** 2).sum())


def errors_of(z: np.ndarray, sizes: Sequence[int]) -> dict[tuple[int, Group], float]:
    """As `error`, of all groups, all tokens of a group at a time."""
    found: dict[tuple[int, Group], float] = {}

    def keep(numbers: np.ndarray) -> np.ndarray:
        return np.clip(numbers, -65504, 65504).astype(np.float32).astype(np.float16).astype(np.float64)

    edges = (_FLOATS[1:] + _FLOATS[:-1]) / 2
    for size in sizes:
        for start in range(z.shape[1] - size + 1):
            part = z[:, start : start + size]
            found[start, (size, 0)] = float((part**2).sum())
            low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
            for kind in (2, 4, 8):
                shift, scale = (
                    (low, (high - low) / (2**kind - 1)) if kind < 8 else ((low + high) / 2, (high - low) / 896)
                )
                steps = (part - shift) / np.where(scale == 0, 1, scale)
                codes = _FLOATS[np.searchsorted(edges, steps)] if kind == 8 else np.rint(steps)
                found[start, (size, kind)] = float(((codes * keep(scale) + keep(shift) - part) ** 2).sum())
    return found


def cost(group: Group) -> int:
    size, kind = group
    return size * kind + KINDS[kind]


def every(n: int, sizes: Sequence[int]) -> Iterator[list[Group]]:
    """All ways to cut n coefficients into groups, and all kinds of them."""
    if not n:
        yield []
    for size in (size for size in sizes if size <= n):
        for rest in every(n - size, sizes):
            for kind in KINDS:
                yield [(size, kind), *rest]


def best(errors: dict[tuple[int, Group], float], n: int, sizes: Sequence[int], bits: int) -> list[Group]:
    """The groups of least error within `bits`: the least at each number of bits spent, coefficient by coefficient."""
    reached: list[dict[int, tuple[float, Chain]]] = [{0: (0.0, ())}]
    for end in range(1, n + 1):
        found: dict[int, tuple[float, Chain]] = {}
        for size in (size for size in sizes if size <= end):
            for kind in KINDS if size > 1 else (0, 2):  # one coefficient is its shift, whatever the bits
                added, more = errors[end - size, (size, kind)], cost((size, kind))
                for spent, (before, groups) in reached[end - size].items():
                    if spent + more <= bits and before + added < found.get(spent + more, (np.inf,))[0]:
                        found[spent + more] = before + added, (groups, (size, kind))
        least, kept = np.inf, {}
        for spent in sorted(found):  # more bits for more error are of no use
            if found[spent][0] < least:
                kept[spent], least = found[spent], found[spent][0]
        reached.append(kept)
    chain, out = min(reached[n].values(), key=lambda pair: pair[0])[1], []
    while chain:
        chain, group = chain
        out.append(group)
    return out[::-1]


def token(z: Sequence[float], groups: Sequence[Group]) -> np.ndarray:
    """The coefficients of a token, as they are read."""
    out, start = np.zeros(len(z)), 0
    for size, kind in groups:
        out[start : start + size] = decoded(z[start : start + size], kind)
        start += size
    return out
