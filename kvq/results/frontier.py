"""Sets of points of which less is better in every coordinate: which are beaten, and what they dominate."""

from __future__ import annotations

from collections.abc import Sequence


def dominated(points: Sequence[Sequence[float]]) -> list[bool]:
    """Of each point, whether another is at least as good in every coordinate and better in one."""
    return [
        any(all(a <= b for a, b in zip(other, own, strict=True)) and list(other) != list(own) for other in points)
        for own in points
    ]


def hypervolume(points: Sequence[Sequence[float]], worst: Sequence[float]) -> float:
    """Volume that points dominate within the box from 0 to `worst`, as a share of the box; 1: a point at 0.

    Coordinates below 0 count as 0. By slices along the last coordinate.
    """
    inside = [[max(value, 0.0) for value in point] for point in points]
    inside = [point for point in inside if all(value < most for value, most in zip(point, worst, strict=True))]
    return _volume(inside, list(worst)) / _box(worst)


def _box(worst: Sequence[float]) -> float:
    size = 1.0
    for side in worst:
        size *= side
    return size


def _volume(points: list[list[float]], worst: list[float]) -> float:
    if not points:
        return 0.0
    if len(worst) == 1:
        return worst[0] - min(point[0] for point in points)
    heights = sorted({point[-1] for point in points})
    total = 0.0
    for low, high in zip(heights, [*heights[1:], worst[-1]], strict=True):
        slice_ = [point[:-1] for point in points if point[-1] <= low]
        total += (high - low) * _volume(slice_, worst[:-1])
    return total
