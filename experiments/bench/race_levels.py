"""How often `kvq choose` drops a format that it should keep: `python experiments/bench/race_levels.py [races]`.

Races of twelve formats whose expected losses are known; four rounds of 8, 8, 16 and 32 windows. A race has a false drop
where any format leaves of which none with at most its bytes has a smaller expected loss. `results/bench/race_levels.md`
is the table that it writes.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float
from kvq_lab.racing import round_sizes, run_race

from kvq.results import Store
from kvq.results.statistics import losses

ROOT = Path(__file__).parents[2]
FORMATS, WINDOWS, TEXT_WINDOWS = 12, 64, 512
SIZES = [float(place // 2 + 1) for place in range(FORMATS)]  # two formats of each size
LOSSES = {
    "all equal": np.zeros(FORMATS),
    "one step worse in each pair": np.array([0.0, 0.5] * (FORMATS // 2)),
    "a ladder of small steps": -0.2 * np.arange(FORMATS // 2).repeat(2),
    "a ladder, half of it worse": np.array([0.0, 1.0] * (FORMATS // 2)) - 0.7 * np.arange(FORMATS // 2).repeat(2),
    "one best and smallest": np.array([0.0, *[0.4] * (FORMATS - 1)]),
}
"""Expected losses by format, in standard deviations of a window's difference."""
NOISES = ("measured", "normal", "heavy-tailed", "errors like losses", "correlated text", "skewed")


@functools.cache
def measured() -> Float[np.ndarray, "formats windows"]:
    """Losses of the 29 windows on record without their means: engines' formats on tiny_hard."""
    store = Store(ROOT / "results")
    found: dict[str | None, list[tuple[float, np.ndarray]]] = defaultdict(list)
    for record in store.scan()[0]:
        is_format = record.method.startswith("engine/") and record.metrics.get("windows") == 29
        if is_format and (record.model, record.task, record.status) == ("tiny_hard", "ppl", "done"):
            ours = losses(store.samples_of(record))
            found[record.baseline_key].append((record.metrics["bits_per_element"], ours.nll / ours.tokens))
    rows = sorted(max(found.values(), key=len), key=lambda pair: pair[0])
    kept = np.array([rows[at][1] for at in np.linspace(0, len(rows) - 1, FORMATS).round().astype(int)])
    kept -= kept[-1]  # what all windows share
    kept -= kept.mean(axis=1, keepdims=True)
    return kept / np.sqrt(np.mean(kept**2))


def drawn(noise: str, generator: np.random.Generator) -> Float[np.ndarray, "formats windows"]:
    """Noise of mean 0, in part common to all formats.

    `measured`: windows drawn from those on record; `correlated text`: windows drawn without replacement from a text of
    512, neighbours of which have a correlation of .5, as `kvq choose` draws them; `errors like losses` and `skewed` (a
    chi-square of three degrees): the smaller a format, the noisier.
    """
    shape = (FORMATS + 1, WINDOWS)
    if noise == "measured":
        return measured()[:, generator.integers(measured().shape[1], size=WINDOWS)]
    if noise == "skewed":
        made = (generator.chisquare(3, shape) - 3) / np.sqrt(6)
    elif noise == "heavy-tailed":
        made = generator.standard_t(3, shape) / np.sqrt(3)
    elif noise == "correlated text":
        text = generator.standard_normal((FORMATS + 1, TEXT_WINDOWS))
        for at in range(1, TEXT_WINDOWS):
            text[:, at] = 0.5 * text[:, at - 1] + np.sqrt(1 - 0.5**2) * text[:, at]
        made = text[:, generator.permutation(TEXT_WINDOWS)[:WINDOWS]]
    else:
        made = generator.standard_normal(shape)
    own = made[1:] * (np.linspace(2.0, 0.3, FORMATS)[:, None] if noise in ("skewed", "errors like losses") else 1.0)
    return (own + made[0]) / np.sqrt(2)


def false_drops(expected: Float[np.ndarray, " formats"], dropped: set[int]) -> set[int]:
    """The formats among `dropped` that are on the true frontier."""
    best = [min(expected[b] for b in range(FORMATS) if SIZES[b] <= SIZES[a]) for a in range(FORMATS)]
    return {a for a in dropped if expected[a] <= best[a]}


def levels(races: int, seed: int = 0) -> Iterator[tuple[str, str, float, float, float]]:
    """Of each case: share of races with a false drop, share of the rest that is dropped, share of windows saved."""
    counts = list(round_sizes(WINDOWS))
    cuts = np.cumsum(counts)[:-1]
    for name, expected in LOSSES.items():
        worse = FORMATS - len(false_drops(expected, set(range(FORMATS))))
        for noise in NOISES:
            generator = np.random.default_rng([seed, *name.encode(), *noise.encode()])
            false, right, saved = 0, 0, 0.0
            for _ in range(races):
                rounds = np.split(expected[:, None] + drawn(noise, generator), cuts, axis=1)
                race = run_race(rounds, SIZES)
                wrong = false_drops(expected, set(race.dropped))
                false += bool(wrong)
                right += len(race.dropped) - len(wrong)
                saved += sum(sum(counts[when:]) for _, when in race.dropped.values()) / (FORMATS * WINDOWS)
            yield name, noise, false / races, right / races / worse if worse else float("nan"), saved / races


def table(races: int) -> str:
    """The table as Markdown."""
    lines = [
        f"False drops in {races} simulated races of {FORMATS} formats (`python experiments/bench/race_levels.py`)\n",
        "| Expected losses | Noise of windows | Races with a false drop (%) | Others dropped (%) | Windows saved (%) |",
        "| :--- | :--- | ---: | ---: | ---: |",
    ]
    for name, noise, false, right, saved in levels(races):
        others = "–" if np.isnan(right) else f"{100 * right:.0f}"
        lines.append(f"| {name} | {noise} | {100 * false:.1f} | {others} | {100 * saved:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    made = table(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
    (ROOT / "results" / "bench" / "race_levels.md").write_text(made, encoding="utf-8")
    print(made)
