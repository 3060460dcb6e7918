"""How often a table of equal methods has a false mark, and what it finds: `experiments/bench/noise_levels.py [draws]`.

Windows are drawn from a normal distribution with the covariance between methods that the committed sliding-window
protocols have, each window on its own (`serial=0`) or correlated with the one before it. A false mark is a row that
differs from full precision, or one that beats another, and so could have a ring, be bold or rise by a width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kvq.report.comparisons import Comparisons, Verdicts, frontier
from kvq.results import Record, Store
from kvq.results.noise import max_t
from kvq.results.statistics import ALPHA, losses

ROOT = Path(__file__).parents[2]
WINDOWS = (4, 6, 8, 12, 16, 29)
ROWS, LEAST = 40, 29
TOKENS = 512
POWER = 0.8
OFFSET = MOST = 30.0
Differences = Float[np.ndarray, "rows windows"]


def protocols(results: Path = ROOT / "results") -> dict[str, Differences]:
    """Differences from full precision of the runs of each protocol of `LEAST` windows or more, in nats per token."""
    store = Store(results)
    records = {record.key: record for record in store.scan()[0] if record.task == "ppl" and record.status == "done"}
    found: dict[str, list[np.ndarray]] = {}
    for record in records.values():
        full = records.get(record.baseline_key or "")
        if full is not None and record.metrics["windows"] >= LEAST:
            ours, theirs = (losses(store.samples_of(run)) for run in (record, full))
            found.setdefault(record.model, []).append((ours.nll - theirs.nll) / ours.tokens)
    return {model: np.array(rows) for model, rows in sorted(found.items())}


def residuals(differences: Differences) -> Differences:
    """Differences without their means."""
    return differences - differences.mean(axis=1, keepdims=True)


def serial_correlation(differences: Differences) -> float:
    """Correlation of a window's difference with that of the next, over all rows; without correlation 0 on average."""
    left = residuals(differences)
    found = np.sum(left[:, 1:] * left[:, :-1], axis=1) / np.sum(left**2, axis=1)
    return float(found.mean() + 1 / differences.shape[1])


def drawn(
    source: Differences, windows: int, generator: np.random.Generator, serial: float = 0.0, rows: int = ROWS
) -> Differences:
    """Windows of `rows` methods that equal full precision, with the covariance of as many rows of `source`."""
    own = residuals(source)[generator.choice(len(source), rows, replace=False)]
    normal = generator.normal(size=(own.shape[1], windows))
    for window in range(1, windows):
        normal[:, window] = serial * normal[:, window - 1] + np.sqrt(1 - serial**2) * normal[:, window]
    return own @ normal / np.sqrt(own.shape[1] - 1)


class Marks(NamedTuple):
    """Rows that differ from full precision, pairs told apart, and rows on the frontier; rows by growing bits."""

    differ: list[int]
    pairs: int
    frontier: list[int]


def marks(differences: Differences) -> Marks:
    """The marks of a table, as `kvq.report` makes them."""
    noisy = [p > ALPHA for p in max_t(differences).p]
    runs = [
        Record.model_construct(key=str(place), metrics={"within_noise": float(noise), "effective_bits": float(place)})
        for place, noise in enumerate(noisy)
    ]
    samples = {run.key: _samples(row) for run, row in zip(runs, differences, strict=True)}
    verdicts = Verdicts(runs, Comparisons(lambda run: samples[run.key]))
    told = sum(verdicts.beats(a, b) for a in runs for b in runs)
    return Marks(
        [int(run.key) for run in runs if run.metrics["within_noise"] == 0],
        told,
        sorted(map(int, frontier(runs, verdicts, lambda run: run.metrics["effective_bits"]))),
    )


def _samples(row: Sequence[float] | np.ndarray) -> list[dict[str, float]]:
    return [{"window": place, "tokens": TOKENS, "nll": TOKENS * float(value)} for place, value in enumerate(row)]


def false_marks(
    source: Differences, windows: int, draws: int, *, offset: float = 0.0, serial: float = 0.0, seed: int = 0
) -> int:
    """Tables of equal methods, of `draws`, with a mark that is wrong.

    Args:
        source: `protocols`' differences, whose covariance the methods have.
        windows: of each table.
        draws: tables.
        offset: loss of all methods over full precision, in standard deviations of the noisiest; 0: they equal it too.
        serial: correlation of neighbouring windows.
        seed: of the draws.
    """
    generator, wrong = np.random.default_rng(seed), 0
    for _ in range(draws):
        noise = drawn(source, windows, generator, serial)
        found = marks(noise + offset * noise.std(axis=1).max())
        wrong += bool(found.pairs or found.frontier not in ([], [0]) or (found.differ and not offset))
    return wrong


def smallest_found(source: Differences, windows: int, draws: int, *, pairs: bool = False, seed: int = 1) -> float:
    """The least difference of one of `ROWS` methods that 80% of `draws` find, in nats per token; infinite: none.

    Args:
        source, windows, draws, seed: as in `false_marks`.
        pairs: the difference from another method, tested with all pairs of them; else that from full precision.
    """
    generator = np.random.default_rng(seed)
    first, second = np.triu_indices(ROWS, 1)
    tables = [drawn(source, windows, generator) for _ in range(draws)]
    if pairs:
        tables = [table[first] - table[second] for table in tables]  # the first is that of the first two methods
    spread = float(np.median([table[0].std(ddof=1) for table in tables]))
    low, high = 0.25, MOST
    for _ in range(7):
        middle = float(np.sqrt(low * high))
        moved = (np.vstack([table[:1] + middle * table[0].std(ddof=1), table[1:]]) for table in tables)
        enough = np.mean([max_t(table).p[0] <= ALPHA for table in moved]) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return spread * high if high < MOST else float("inf")


def share(sources: Sequence[Differences], windows: int, draws: int, offset: float = 0.0, serial: float = 0.0) -> str:
    """The share of tables with a false mark, over all sources, with its standard error (%)."""
    wrong = sum(
        false_marks(source, windows, draws, offset=offset, serial=serial, seed=seed)
        for seed, source in enumerate(sources)
    )
    part, tables = wrong / (draws * len(sources)), draws * len(sources)
    return f"{100 * part:.1f} ± {100 * np.sqrt(part * (1 - part) / tables):.1f}"


def lines(draws: int) -> Iterator[str]:
    """The figures as lines of a Markdown table, and the serial correlation of the committed windows."""
    found = protocols()
    for model, source in found.items():
        size = f"{source.shape[0]} rows, {source.shape[1]} windows"
        yield f"{model}: {size}, correlation of neighbours {serial_correlation(source):+.3f}"
    sources = list(found.values())
    yield "| windows | equal to full precision (%) | equal, but worse (%) | found from full precision | of a pair |"
    yield "|---:|---:|---:|---:|---:|"
    for windows in WINDOWS:
        shares = " | ".join(share(sources, windows, draws, offset) for offset in (0.0, OFFSET))
        least = [
            np.median([smallest_found(source, windows, max(draws // 5, 20), pairs=pairs) for source in sources])
            for pairs in (False, True)
        ]
        yield f"| {windows} | {shares} | {least[0]:.4f} | {least[1]:.4f} |"
    for serial in (0.05, 0.1, 0.2):
        yield f"neighbours that correlate by {serial}: {share(sources, LEAST, draws, serial=serial)} at {LEAST} windows"


def main() -> int:
    """Print the figures."""
    for line in lines(int(sys.argv[1]) if len(sys.argv) > 1 else 500):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
