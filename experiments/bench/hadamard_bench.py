"""A fast Walsh-Hadamard transform beside the matrix product: `python experiments/bench/hadamard_bench.py [repeats]`.

Both transform the channels of 4,096 tokens in 8 heads, in float32 on one thread, in turn, by size of the head. The fast
transform adds and subtracts halves, log2(d) times, in place: in torch, and in a compiled loop over rows. In float64
both equal the product to rounding. The table has ratios of one run: `results/bench/hadamard.json`.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from pathlib import Path

import numba
import numpy as np
import torch
from jaxtyping import Float
from joint_bench import core_seconds
from torch import Tensor

from kvq.codecs.rotations import hadamard_matrix
from kvq.results.provenance import cpu_name

OUT = Path(__file__).parents[2] / "results" / "bench" / "hadamard.json"
HEADS, TOKENS = 8, 4096
SIZES = (64, 128, 256, 512)


def transform_in_torch(x: Float[Tensor, "*lead dim"]) -> None:
    """Multiply the last dimension, a power of two, by the unscaled Hadamard matrix, in place."""
    half = 1
    while half < x.shape[-1]:
        pairs = x.view(*x.shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        first += second
        second.mul_(-2).add_(first)  # (a + b) - 2 b
        half *= 2


@numba.njit(fastmath=True, boundscheck=False)
def transform_rows(rows: np.ndarray) -> None:
    """As `transform_in_torch`, of rows `[tokens, dim]`."""
    dim = rows.shape[1]
    for row in range(rows.shape[0]):
        x = rows[row]
        half = 1
        while half < dim:
            for start in range(0, dim, 2 * half):
                for place in range(start, start + half):
                    a, b = x[place], x[place + half]
                    x[place], x[place + half] = a + b, a - b
            half *= 2


def largest_error(dim: int) -> float:
    """Largest difference of both fast transforms from the product, in float64, relative to the largest entry."""
    x = torch.randn(64, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, ours, compiled = x @ hadamard_matrix(dim), x.clone(), x.clone()
    transform_in_torch(ours)
    transform_rows(compiled.numpy())
    return max(float((found - expected).abs().max() / expected.abs().max()) for found in (ours, compiled))


def measure(dim: int, repeats: int) -> dict[str, float]:
    """Median of paired ratios to the product's time, of both fast transforms; each pair runs in turn."""
    x = torch.randn(HEADS * TOKENS, dim, generator=torch.Generator().manual_seed(0))
    matrix, out = hadamard_matrix(dim).float() / dim**0.5, torch.empty_like(x)
    ratios: dict[str, list[float]] = {"torch": [], "compiled": []}
    for turn in range(repeats + 1):
        product = core_seconds(lambda: torch.matmul(x, matrix, out=out))
        in_torch = core_seconds(lambda: transform_in_torch(x))
        compiled = core_seconds(lambda: transform_rows(x.numpy()))
        x.div_(dim)  # the two transforms multiplied every entry by it
        if turn:  # the first compiles
            ratios["torch"].append(in_torch / product)
            ratios["compiled"].append(compiled / product)
    return {name: round(statistics.median(found), 2) for name, found in ratios.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    table = {str(dim): measure(dim, count) | {"error_in_fp64": largest_error(dim)} for dim in SIZES}
    for dim, row in table.items():
        print(f"{dim:>4} channels: {row['torch']:.2f} in torch, {row['compiled']:.2f} compiled, of the product's time")
    found = {"cpu": cpu_name() or platform.processor(), "tokens": TOKENS, "heads": HEADS, "repeats": count}
    OUT.write_text(json.dumps(found | {"times_of_the_product": table}, indent=1) + "\n", encoding="utf-8")
