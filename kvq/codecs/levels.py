"""Scalar levels and codebooks of vectors: looking them up, and fitting them by Lloyd's conditions or by k-means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Integer, UInt8
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

Array = NDArray[np.float64]
Points = Float[Tensor, "sets rows channels"]
Weights = Float[Tensor, "sets rows"]
Centroids = Float[Tensor, "sets count channels"]
"""Sets are fitted and searched apart; each of its rows is a vector of so many channels."""
_COMPARED = 8  # up to so many thresholds, a sum of comparisons is faster than a binary search
_RESIDUAL = 1e-10  # largest distance of a level from its centroid
_SCORES = 2**19  # of rows by centroids that exist at once: 2 MiB in fp32
_BINS = 2**16  # that many values in one dimension are replaced by the means of so many bins
_REACHED = 1e-4  # relative change of the error below which Lloyd's iterations stop
_TINY = 1e-30  # a row of zeros counts as this large
_CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Of a row's largest magnitude, those that are tried as the end of its levels."""


def nearest_level(x: Float[Tensor, "*shape"], middles: Float[Tensor, " _thresholds"]) -> UInt8[Tensor, "*shape"]:
    """Index of the nearest of ascending levels: the number of `middles` (between neighbours, at most 255) below x."""
    if len(middles) > _COMPARED:
        return torch.bucketize(x.contiguous(), middles, out_int32=True).to(torch.uint8)
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for middle in middles:
        codes += x > middle
    return codes


def look_up(table: Tensor, codes: Integer[Tensor, "*shape"]) -> Tensor:
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
    solution = optimize.root(lambda levels: centroids(levels) - levels, start, method="hybr", tol=1e-13)
    # `solution.success` is false where rounding keeps the solver from the last digits, so the residual decides.
    if not np.abs(solution.fun).max() < _RESIDUAL or not (np.diff(solution.x) > 0).all():
        raise ArithmeticError(f"levels: no convergence for {len(start)} levels")
    return solution.x


def levels_1d(values: Float[Tensor, " n"], weights: Float[Tensor, " n"], count: int, seed: int) -> Tensor:
    """`count` ascending centroids in fp64 by weighted k-means of scalars; with fewer distinct values the last repeats.

    More than `_BINS` values are first replaced by the weighted means of `_BINS` bins of equal width. This changes the
    result only where a border between two clusters lies inside a bin.

    Runs on one thread, because another order of summation would change the bytes of the tables.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points, share = values.double().cpu().numpy(), weights.double().cpu().numpy()
    points, share = points[share > 0], share[share > 0]
    if not len(points):
        points, share = values.double().cpu().numpy(), np.ones(len(values))
    if len(points) > _BINS and (low := points.min()) < (high := points.max()):
        bins = np.minimum(((points - low) * (_BINS / (high - low))).astype(np.int64), _BINS - 1)
        mass = np.bincount(bins, share, _BINS)
        points, share = np.bincount(bins, share * points, _BINS)[mass > 0] / mass[mass > 0], mass[mass > 0]
    distinct = np.unique(points)
    if len(distinct) <= count:
        levels = np.concatenate([distinct, np.repeat(distinct[-1:], count - len(distinct))])
    else:
        with threadpool_limits(limits=1):
            means = KMeans(count, n_init=4, tol=1e-8, random_state=seed)
            means.fit(points[:, None], sample_weight=share / share.mean())
        levels = np.sort(means.cluster_centers_[:, 0])
    return torch.from_numpy(levels)


def nearest(points: Points, centroids: Centroids) -> Int[Tensor, "sets rows"]:
    """Index of the nearest centroid (L2) of the same set, computed in tiles to bound memory."""
    sets, rows, _ = points.shape
    count = centroids.shape[1]
    # A further channel of ones brings -|c|²/2 into the product.
    scoring = torch.cat([centroids, centroids.square().sum(-1, keepdim=True) / -2], -1).mT.contiguous()
    points = torch.nn.functional.pad(points, (0, 1), value=1)
    out = torch.empty(sets, rows, dtype=torch.int32, device=points.device)
    for some, part in tiles(sets, rows, max(1, _SCORES // count), points.device):
        out[some, part] = torch.bmm(points[some, part], scoring[some]).max(-1).indices.int()
    return out


def tiles(sets: int, rows: int, room: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield slices of sets and of rows, at most `room` rows in all: whole sets or part of one; more rows on a GPU."""
    room = room if device.type == "cpu" else 256 * room  # launches cost more than memory there
    tile = min(rows, room)
    together = max(1, room // tile)
    for first in range(0, sets, together):
        for start in range(0, rows, tile):
            yield slice(first, first + together), slice(start, start + tile)


def codebooks(points: Points, weights: Weights, count: int, iterations: int, seed: int) -> Centroids:
    """Centroids that minimise the weighted squared error of each set: greedy k-means++, then Lloyd's iterations.

    Lloyd's iterations end after `iterations`, or when no set's error falls by more than 1e-4 of itself. A centroid
    without rows keeps its place. Rows of weight 0 are ignored; where all rows of a set have weight 0, they count
    equally. Sets with fewer distinct rows than centroids repeat rows.

    Source: Arthur and Vassilvitskii (2007), section 2; greedy as in scikit-learn, the best of `2 + ln(count)` draws.
    """
    sets = len(points)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(sets, count, 2 + int(math.log(count)), generator=generator, dtype=torch.float64)
    whole = weights.sum(-1, keepdim=True)
    weights = torch.where(whole > 0, weights / whole.masked_fill(whole == 0, 1), torch.ones_like(weights)).float()
    weights = weights * weights.shape[-1]
    # On a CPU only as many sets together as have distances that stay in its cache.
    together = sets if points.device.type != "cpu" else max(1, _SCORES // drawn[0, 0].numel() // points.shape[1])
    out = []
    for first in range(0, sets, together):
        some = slice(first, first + together)
        begin = _kmeans_plus_plus(points[some], weights[some], drawn[some].to(points.device))
        out.append(_lloyd(points[some], weights[some], begin, iterations))
    return torch.cat(out)


def _kmeans_plus_plus(points: Points, weights: Weights, drawn: Float[Tensor, "sets count trials"]) -> Centroids:
    """Rows to begin with: each the one of `trials`, drawn by weighted squared distance, that lowers the error most."""
    sets, rows, channels = points.shape
    count = drawn.shape[1]
    if rows <= count:
        return points[:, torch.arange(count, device=points.device) % rows]
    length = points.square().sum(-1)
    columns = torch.cat([points.mT, torch.ones_like(length)[:, None], length[:, None]], 1)
    weighted = weights[..., None]
    chosen = torch.empty(sets, count, dtype=torch.long, device=points.device)
    distance = torch.ones_like(weights)
    for step in range(count):
        reach = (distance * weights).double().cumsum(-1)
        trials = drawn[:, step, :1] if step == 0 else drawn[:, step]
        at = torch.searchsorted(reach, trials * reach[:, -1:]).clamp_max(rows - 1)
        tried = points.gather(1, at[..., None].expand(-1, -1, channels))
        scores = torch.cat([tried * -2, tried.square().sum(-1, keepdim=True), torch.ones_like(tried[..., :1])], -1)
        distances = torch.bmm(scores, columns).clamp_(min=0)
        if step:
            distances = torch.minimum(distances, distance[:, None], out=distances)
        best = torch.bmm(distances, weighted).argmin(1)
        distance = distances.gather(1, best[..., None].expand(-1, -1, rows))[:, 0]
        chosen[:, step] = at.gather(1, best)[:, 0]
    return points.gather(1, chosen[..., None].expand(-1, -1, channels))


def _lloyd(points: Points, weights: Weights, centroids: Centroids, iterations: int) -> Centroids:
    sets, count, channels = centroids.shape
    weighted = torch.cat([points * weights[..., None], weights[..., None]], -1)
    offset = torch.arange(sets, device=points.device)[:, None] * count
    before = torch.full((sets,), torch.inf, dtype=torch.float64, device=points.device)
    for _ in range(iterations):
        chosen = nearest(points, centroids).long()
        sums = _sums((chosen + offset).flatten(), weighted.flatten(0, 1), sets * count).view(sets, count, -1)
        mass = sums[..., -1:]
        centroids = torch.where(mass > 0, sums[..., :-1] / mass.clamp_min(torch.finfo(mass.dtype).tiny), centroids)
        assigned = centroids.gather(1, chosen[..., None].expand(-1, -1, channels))
        error = ((points - assigned).square().sum(-1) * weights).sum(-1, dtype=torch.float64)
        if bool((error >= before * (1 - _REACHED)).all()):
            break
        before = error
    return centroids


def _sums(index: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sums of rows by index, in the order of rows on every device: atomic additions would not be reproducible."""
    if index.device.type == "cpu":
        return rows.new_zeros(count, rows.shape[-1]).index_add_(0, index, rows)
    order = index.argsort(stable=True)
    ends = torch.searchsorted(index[order], torch.arange(count + 1, device=index.device))
    running = torch.nn.functional.pad(rows[order].double().cumsum(0), (0, 0, 1, 0))
    return (running[ends[1:]] - running[ends[:-1]]).to(rows.dtype)


def best_row_steps(rows: Float[Tensor, "m n"], bits: Int[Tensor, " m"]) -> Float[Tensor, "m 1"]:
    """Step size per row of a symmetric uniform grid of `2^bits` levels, by a search over `_CLIPS` for least MSE."""
    half, largest = 2.0 ** (bits[:, None] - 1), rows.abs().amax(1, keepdim=True).clamp_min(_TINY)
    steps, least = largest / half, torch.full_like(largest, torch.inf)
    for clip in _CLIPS:
        tried = (clip * largest / half).float().double()
        error = (dequantize_rows(quantize_rows(rows, tried, half), tried, half) - rows).square().sum(1, keepdim=True)
        steps, least = torch.where(error < least, tried, steps), torch.minimum(error, least)
    return steps


def quantize_rows(rows: Tensor, steps: Tensor, half: Tensor) -> Tensor:
    """Codes `[m, n]`, 0 to `2 * half - 1`, on each row's grid; `half` `[m, 1]`: half its number of levels."""
    return (rows / steps + half - 0.5).round().clamp_min(0).minimum(2 * half - 1)


def dequantize_rows(codes: Tensor, steps: Tensor, half: Tensor) -> Tensor:
    """Inverse of `quantize_rows`: `(code + 0.5 - half) * step`, `[m, n]`."""
    return (codes + 0.5 - half) * steps


def pack_rows(codes: Float[Tensor, "m n"], bits: Sequence[int]) -> UInt8[Tensor, " nbytes"]:
    """Pack codes, row after row, row i in `bits[i]` bits per code; rows of 0 bits are not stored."""
    fields = [
        (row[:, None] >> np.arange(width - 1, -1, -1) & 1).ravel()
        for row, width in zip(codes.numpy().astype(np.int64), bits, strict=True)
    ]
    return torch.from_numpy(np.packbits(np.concatenate(fields).astype(np.uint8)))


def unpack_rows(packed: UInt8[Tensor, " nbytes"], bits: Sequence[int], columns: int) -> Float[Tensor, "m n"]:
    """Inverse of `pack_rows`: the codes `[len(bits), columns]`, zeros where a row has 0 bits."""
    flat, out, start = np.unpackbits(packed.numpy()), np.zeros((len(bits), columns)), 0
    for row, width in enumerate(bits):
        field = flat[start : start + width * columns].reshape(columns, width)
        out[row], start = field @ 2 ** np.arange(width - 1, -1, -1), start + width * columns
    return torch.from_numpy(out)
