"""`make trellises`: train the trellises for N(0, 1) that kvq ships, and record how far each is from the bound.

The value of state s starts at the quantile of rank s a mod 2^L of N(0, spread^2), for an odd multiplier a: states that
share the code have values all over the line, and so have states that share what came before, as Ungerboeck's set
partition has it. Of many multipliers (up to 2^8 states of random orders, too) the best few, as they are, are trained by
Lloyd's iteration through Viterbi's search on fresh draws. From 2^9 states on there are more multipliers and spreads,
more draws choose among them, and the best is trained for longer. The errors are those of fresh draws too, in strings
of 256 components.

    python experiments/models/trellises.py [--memory 10] [--out trellis.safetensors] [--record trellises.json]

About 40 minutes on one CPU core, 2 up to 2^8 states. Other versions of numpy may give other last digits.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvq_kernels.trellis_cpu import searcher
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from scipy import special

from kvq.codecs.lloyd_max import optimal_levels
from kvq.codecs.trellis import FILE, MOST_MEMORY, WIDEST
from kvq.codecs.trellis import LEAST_MEMORY as LEAST

Array = NDArray[np.float64]
TESTED = (2048, 256)
SEED = 20261123


@dataclass(frozen=True)
class Plan:
    """How many starts are tried and trained; draws as rows and components.

    Attributes:
        multipliers, orders: how many there are at most, the latter random. spreads: of each.
        tried: how many starts are kept, and the draws that choose them, one choice after the other.
        rounds: of Lloyd's iteration for the starts that are left, on draws of `trained`.
        longer: rounds and draws by which the best of these is trained on.
    """

    multipliers: int
    orders: int
    spreads: tuple[float, ...]
    tried: tuple[tuple[int, tuple[int, int]], ...]
    rounds: int
    trained: tuple[int, int] = (32, 1024)
    longer: tuple[tuple[int, tuple[int, int]], ...] = ()


PLANS = {
    8: Plan(64, 4, (1.0, 1.1, 1.25), ((3, (4, 1024)),), 40),
    12: Plan(
        512,
        0,
        (1.0, 1.1, 1.2, 1.3),
        ((60, (16, 256)), (12, (256, 256))),
        60,
        longer=((300, (64, 1024)), (100, (256, 1024))),
    ),
}
"""By the largest memory that a plan is for; the first is what the records up to 2^8 states were made with."""


def coded(book: Array, memory: int, width: int, x: NDArray[np.float32]) -> NDArray[np.int64]:
    """States of the path of least error, of rows of components."""
    books = np.zeros((WIDEST, 1 << memory), np.float32)
    books[width - 1] = book
    count, codes = x.shape[1], np.zeros(x.shape, np.uint8)
    searcher(memory)(x, np.full(count, width, np.uint8), np.ones(count, np.float32), books, codes)
    state, states = np.zeros(len(x), np.int64), np.empty(x.shape, np.int64)
    for place in range(count):
        state = ((state << width) | codes[:, place]) & ((1 << memory) - 1)
        states[:, place] = state
    return states


def error(book: Array, memory: int, width: int, x: NDArray[np.float32]) -> float:
    """Mean squared error of rows of components."""
    return float(np.square(x - book[coded(book, memory, width, x)]).mean())


def starts(memory: int, plan: Plan, generator: np.random.Generator) -> list[Array]:
    """Values of all states, in the orders that are tried."""
    count = 1 << memory
    quantiles = special.ndtri((np.arange(count) + 0.5) / count)
    drawn = sorted(set(generator.integers(0, count // 2, plan.multipliers) * 2 + 1))
    orders = [np.arange(count) * a % count for a in drawn]
    orders += [generator.permutation(count) for _ in range(plan.orders)]
    return [spread * quantiles[order] for order in orders for spread in plan.spreads]


def trained(
    book: Array, memory: int, width: int, generator: np.random.Generator, rounds: int, shape: tuple[int, int]
) -> Array:
    """Lloyd's iteration: each value becomes the mean of what its state stood for, of draws that fade out."""
    hits, sums = np.zeros(len(book)), np.zeros(len(book))
    for number in range(rounds):
        x = generator.standard_normal(shape).astype(np.float32)
        states = coded(book, memory, width, x).ravel()
        fading = 0.5 if number < rounds // 2 else 0.9
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
        plan = next(plan for most, plan in PLANS.items() if memory <= most)
        draws = [generator.standard_normal(shape).astype(np.float32) for _, shape in plan.tried]
        found = starts(memory, plan, generator)
        for (kept, _), x in zip(plan.tried, draws, strict=True):
            found = ordered(found, memory, width, x)[:kept]
        found = [trained(book, memory, width, generator, plan.rounds, plan.trained) for book in found]
        if plan.longer:
            found = ordered(found, memory, width, generator.standard_normal(TESTED).astype(np.float32))[:1]
        for rounds, shape in plan.longer:
            found = [trained(book, memory, width, generator, rounds, shape) for book in found]
    found = [book.astype(np.float16).astype(np.float64) for book in found]
    x = generator.standard_normal(TESTED).astype(np.float32)
    errors = [error(book, memory, width, x) for book in found]
    return found[int(np.argmin(errors))], min(errors)


def ordered(books: list[Array], memory: int, width: int, x: NDArray[np.float32]) -> list[Array]:
    """Those of the least errors first, on rows of components."""
    return sorted(books, key=lambda book: error(book, memory, width, x))


def main() -> None:
    """Write the trellises and the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = range(LEAST, MOST_MEMORY + 1)
    parser.add_argument("--memory", type=int, choices=every, help="of so many bits alone, and keep the others")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--record", type=Path, default=Path(__file__).parents[2] / "results/bench/trellises.json")
    args = parser.parse_args()
    tables = load_file(args.out) if args.memory else {}
    rows = json.loads(args.record.read_text(encoding="utf-8"))["trellises"] if args.memory else []
    rows = [row for row in rows if row["memory"] != args.memory]
    for memory in every if args.memory is None else [args.memory]:
        errors = np.full(WIDEST, np.nan)
        for width in range(1, min(memory, WIDEST) + 1):
            book, errors[width - 1] = best(memory, width, np.random.default_rng([SEED, memory, width]))
            tables[f"{memory}.{width}"] = book.astype(np.float16)
            away = 10 * math.log10(errors[width - 1] * 4**width)
            rows.append({"memory": memory, "bits": width, "mse": round(errors[width - 1], 9), "db": round(away, 3)})
            print(f"L={memory:2} {width} bits: {errors[width - 1]:.6f}, {away:.2f} dB above the bound", flush=True)
        tables[f"{memory}.errors"] = errors
    args.out.write_bytes(save(tables))
    rows.sort(key=lambda row: (row["memory"], row["bits"]))
    about = {"what": "mean squared error on N(0, 1) in strings of 256 components; dB above the bound 4^-bits"}
    args.record.write_text(json.dumps(about | {"seed": SEED, "trellises": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
