"""Scalar levels: the nearest level of a value, values of codes, and the levels of least squared error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Integer, UInt8
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

Array = NDArray[np.float64]
_COMPARED = 8  # up to so many thresholds, a sum of comparisons is faster than a binary search
_RESIDUAL = 1e-10  # largest distance of a level from its centroid


def nearest_level(x: Float[Tensor, "*shape"], middles: Float[Tensor, " _thresholds"]) -> UInt8[Tensor, "*shape"]:
    """Index of the nearest of ascending levels: the number of `middles` (between neighbours, at most 255) below x."""
    if len(middles) > _COMPARED:
        return torch.bucketize(x.contiguous(), middles, out_int32=True).to(torch.uint8)
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for middle in middles:
        codes += x > middle
    return codes


def looked_up(table: Tensor, codes: Integer[Tensor, "*shape"]) -> Tensor:
    """`table[codes]`, in half the time of indexing."""
    return table.index_select(0, codes.flatten().int()).view(*codes.shape, *table.shape[1:])


def fixed_point(centroids: Callable[[Array], Array], start: Array) -> Array:
    """The levels that equal the means of their cells (Lloyd's conditions), by MINPACK's hybrid method.

    Args:
        centroids: ascending levels -> the mean of each level's cell.
        start: levels near the solution.

    Raises:
        ArithmeticError: no convergence.
    """
    found = optimize.root(lambda levels: centroids(levels) - levels, start, method="hybr", tol=1e-13)
    # `found.success` is false where rounding keeps the solver from the last digits, so the residual decides.
    if not np.abs(found.fun).max() < _RESIDUAL or not (np.diff(found.x) > 0).all():
        raise ArithmeticError(f"levels: no convergence for {len(start)} levels")
    levels: Array = found.x
    return levels
