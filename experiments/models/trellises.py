"""`make trellises`: train the trellises for N(0, 1) that kvq ships, and record how far each is from the bound.

The value of state s starts at the quantile of rank s a mod 2^L of N(0, spread^2), for an odd multiplier a: states that
share the code have values all over the line, and so have states that share what came before, as Ungerboeck's set
partition has it. Of many multipliers and random orders the best few, as they are, are trained by Lloyd's iteration
through Viterbi's search on fresh draws. The errors are those of fresh draws too, in strings of 256 components.

    python experiments/models/trellises.py [--out kvq/codecs/trellis.safetensors] [--record bench/trellises.json]

About 5 minutes on one CPU core. Other versions of numpy may give other last digits.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from scipy import special

from kvq.codecs.lloyd_max import optimal_levels
from kvq.codecs.trellis import FILE, MOST_MEMORY, WIDEST, books_name
from kvq.codecs.trellis import LEAST_MEMORY as LEAST
from kvq.codecs.trellis_loops import loops_for

Array = NDArray[np.float64]
SPREADS = (1.0, 1.1, 1.25)
CANDIDATES = 64
TRAINED = 3
ROUNDS = 40
TRAIN = (32, 1024)
TRIED = (4, 1024)
TESTED = (2048, 256)
SEED = 20261123


def coded(book: Array, memory: int, width: int, x: NDArray[np.float32]) -> NDArray[np.int64]:
    """States of the path of least error, of rows of components."""
    books = np.zeros((WIDEST, 1 << memory), np.float32)
    books[width - 1] = book
    count, codes = x.shape[1], np.zeros(x.shape, np.uint8)
    loops_for(memory).search(x, np.full(count, width, np.uint8), np.ones(count, np.float32), books, codes)
    state, states = np.zeros(len(x), np.int64), np.empty(x.shape, np.int64)
    for place in range(count):
        state = ((state << width) | codes[:, place]) & ((1 << memory) - 1)
        states[:, place] = state
    return states


def error(book: Array, memory: int, width: int, x: NDArray[np.float32]) -> float:
    """Mean squared error of rows of components."""
    return float(np.square(x - book[coded(book, memory, width, x)]).mean())


def starts(memory: int, generator: np.random.Generator) -> list[Array]:
    """Values of all states, in the orders that are tried."""
    count = 1 << memory
    quantiles = special.ndtri((np.arange(count) + 0.5) / count)
    orders = [np.arange(count) * a % count for a in sorted(set(generator.integers(0, count // 2, CANDIDATES) * 2 + 1))]
    orders += [generator.permutation(count) for _ in range(4)]
    return [spread * quantiles[order] for order in orders for spread in SPREADS]


def trained(book: Array, memory: int, width: int, generator: np.random.Generator) -> Array:
    """Lloyd's iteration: each value becomes the mean of what its state stood for, of draws that fade out."""
    hits, sums = np.zeros(len(book)), np.zeros(len(book))
    for number in range(ROUNDS):
        x = generator.standard_normal(TRAIN).astype(np.float32)
        states = coded(book, memory, width, x).ravel()
        fading = 0.5 if number < ROUNDS // 2 else 0.9
        hits = fading * hits + np.bincount(states, minlength=len(book))
        sums = fading * sums + np.bincount(states, x.ravel(), minlength=len(book))
        book = np.where(hits > 0.1, sums / np.maximum(hits, 0.1), book)
    return book


def best(memory: int, width: int, generator: np.random.Generator) -> tuple[Array, float]:
    """The trellis of least error and that error, on draws that it was not trained on."""
    if width == memory:  # no state behind the code: Lloyd-Max levels
        half = optimal_levels(width, math.inf)
        found = [np.concatenate([-half[::-1], half])]
    else:
        x = generator.standard_normal(TRIED).astype(np.float32)
        tried = sorted(starts(memory, generator), key=lambda book: error(book, memory, width, x))[:TRAINED]
        found = [trained(book, memory, width, generator) for book in tried]
    found = [book.astype(np.float16).astype(np.float64) for book in found]
    x = generator.standard_normal(TESTED).astype(np.float32)
    errors = [error(book, memory, width, x) for book in found]
    return found[int(np.argmin(errors))], min(errors)


def main() -> None:
    """Write the trellises and the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--record", type=Path, default=Path(__file__).parents[2] / "results/bench/trellises.json")
    args = parser.parse_args()
    tables, rows = {}, []
    for memory in range(LEAST, MOST_MEMORY + 1):
        errors = np.full(WIDEST, np.nan)
        for width in range(1, min(memory, WIDEST) + 1):
            book, errors[width - 1] = best(memory, width, np.random.default_rng([SEED, memory, width]))
            tables[books_name(memory, width)] = book.astype(np.float16)
            away = 10 * math.log10(errors[width - 1] * 4**width)
            rows.append({"memory": memory, "bits": width, "mse": round(errors[width - 1], 9), "db": round(away, 3)})
            print(f"L={memory:2} {width} bits: {errors[width - 1]:.6f}, {away:.2f} dB above the bound", flush=True)
        tables[f"{memory}.errors"] = errors
    args.out.write_bytes(save(tables))
    about = {"what": "mean squared error on N(0, 1) in strings of 256 components; dB above the bound 4^-bits"}
    args.record.write_text(json.dumps(about | {"seed": SEED, "trellises": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
