"""Tasks made of items: each item is scored, saved at once, and compared with the same item in full precision.

A batch has `task.batch_size` prompts; by default (null) as many as `ROWS`, and no more tokens than `TOKENS`. Prompts of
unequal length share a batch where method and model hold sequences apart; elsewhere those of equal length do. Either
way answers are those of each prompt on its own, up to the last bits of what a batch rounds.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.config.tasks import ItemsConfig, Prefill
from kvq.errors import DataError
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.noise import compare_items
from kvq.results.provenance import timed
from kvq.results.statistics import paired_mean
from kvq.tasks.measurement import STORED, Baseline, Measurement, storage_metrics
from kvq.tasks.reader import Ends, Pick, Reader

ROWS = 8
"""Prompts of a batch where `task.batch_size` is null."""
TOKENS = 16_384
"""Tokens of a batch of several prompts, padding included, where `task.batch_size` is null."""
T = TypeVar("T")
Sample = dict[str, Any]
_SHOWN = 8


def has_room(prompts: int, longest: int, rows: int | None) -> bool:
    """Whether a batch may have this many prompts, the longest of this many tokens; `rows`: as `task.batch_size`."""
    return prompts <= rows if rows is not None else prompts == 1 or prompts <= min(ROWS, TOKENS // longest)


def batches_of(lengths: Sequence[int], rows: int | None, unequal: bool) -> list[list[int]]:
    """Indices of the prompts of each batch, shortest first; of equal length in a batch unless `unequal`."""
    out: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda one: lengths[one]):  # little padding
        same = bool(out) and (unequal or lengths[out[-1][0]] == lengths[index])
        if same and has_room(len(out[-1]) + 1, lengths[index], rows):
            out[-1].append(index)
        else:
            out.append([index])
    return out


def read_in_batches(
    reader: Reader, prompts: Sequence[Sequence[int]], rows: int | None
) -> Iterator[tuple[list[int], KVCache, Float[Tensor, "batch vocab"]]]:
    """Prompts in batches: indices, cache, logits; `chunked`: read in turn, what they share once, answered together."""
    if reader.prefill is Prefill.whole or not reader.can_join:
        for batch in batches_of([len(prompt) for prompt in prompts], rows, reader.can_mix_lengths):
            yield batch, *reader.begin_together([prompts[index] for index in batch])
        return
    waiting: list[tuple[int, KVCache, Tensor]] = []
    longest = 0
    for found in reader.each(prompts):
        tokens = len(prompts[found[0]])
        if waiting and not has_room(len(waiting) + 1, max(longest, tokens), rows):
            yield _join_prompts(waiting)
            waiting, longest = [], 0
        waiting.append(found)
        longest = max(longest, tokens)
    if waiting:
        yield _join_prompts(waiting)


def _join_prompts(read: Sequence[tuple[int, KVCache, Tensor]]) -> tuple[list[int], KVCache, Tensor]:
    """Join prompts that were read one by one to a batch: indices, cache and logits."""
    indices, caches, logits = zip(*read, strict=True)
    return list(indices), *Reader.join(caches, logits)


@dataclass(frozen=True)
class Scored:
    """The result of an item: `sample`, which the record keeps, and `cost`.

    `cost` has `prompt_tokens` of the prompt, `read_tokens` that went through the model (shared prefixes count once),
    `new_tokens`, seconds of `prefill` and `decode`, and the storage at the end of the answer.
    """

    sample: Sample
    cost: dict[str, float]


@dataclass(frozen=True)
class Items(Generic[T]):
    """The items of a task: batches that go through the model together, and skipped items with the reason."""

    batches: Sequence[Sequence[T]]
    name: Callable[[T], str]
    skipped: Mapping[str, str] = field(default_factory=dict)


def write_answers(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    most: int,
    ends: Ends,
    sample: Callable[[int, list[int]], Sample],
    pick: Pick | None = None,
    stay: bool = False,
) -> list[Scored]:
    """Write and score answers of at most `most` tokens to prompts that are read together.

    An answer that has ended leaves its batch, so that its storage is its own; with `stay` all rows go on until the last
    has ended, and each has its part of the cache. `sample`: what the record keeps, by the place and new tokens.
    """
    seconds, stored = dict[str, float](), dict[int, dict[str, float]]()
    device, before = reader.loaded.device, reader.tokens_read
    with timed(seconds, "prefill", device=device):
        cache, logits = reader.begin_together(prompts)
    read = (reader.tokens_read - before) / len(prompts)

    def leave(row: int, own: KVCache) -> None:
        own.check_finite()
        stored[row] = storage_metrics(own, 1)

    with timed(seconds, "decode", device=device):
        rows = reader.write(cache, logits, most, ends, pick, None if stay else leave)
    if stay:
        cache.check_finite()
        stored = dict.fromkeys(range(len(rows)), storage_metrics(cache, len(rows)))
    each = {"read_tokens": read} | {phase: took / len(rows) for phase, took in seconds.items()}
    tokens = [{"prompt_tokens": float(len(a)), "new_tokens": float(len(b))} for a, b in zip(prompts, rows, strict=True)]
    return [Scored(sample(index, row), tokens[index] | each | stored[index]) for index, row in enumerate(rows)]


def score_items(
    items: Items[T], score: Callable[[Sequence[T]], list[Scored]], journal: Journal, label: str, prefix: str = ""
) -> list[Scored]:
    """Score the batches that the journal lacks and add them; `prefix`: of names, for another scoring."""
    out: list[Scored] = []
    with tqdm(total=sum(map(len, items.batches)), desc=label, unit="item", leave=False, disable=None) as bar:
        for batch in items.batches:
            names = [prefix + items.name(item) for item in batch]
            if not all(name in journal.rows for name in names):
                journal.add([{"item": name, **vars(one)} for name, one in zip(names, score(batch), strict=True)])
            out += [Scored(journal.rows[name]["sample"], journal.rows[name]["cost"]) for name in names]
            bar.update(len(batch))
    return out


def measure_items(
    items: Items[T],
    score: Callable[[Sequence[T]], list[Scored]],
    task: ItemsConfig,
    journal: Journal,
    baseline: Baseline | None,
    label: str,
    name: str = "accuracy",
) -> Measurement:
    """Score items (`name`: of the mean) against the baseline, which is scored a second time in another order."""
    print_items(items.skipped, "skipped")
    if not any(items.batches):
        first = next((f"{item}: {why}" for item, why in sorted(items.skipped.items())), "there are none")
        raise DataError(f"task={task.name}: no item can be scored; the first: {first}")
    scored = score_items(items, score, journal, label)
    samples = [one.sample for one in scored]
    metrics = {name: mean_score(samples), **costs(scored)}
    metrics |= {"items": float(len(samples)), "skipped_items": float(len(items.skipped))}
    if baseline is not None:
        metrics |= compare(samples, baseline, task, name)
    elif task.noise_floor:
        # The same items in smaller batches, the last first.
        halves = [half for batch in items.batches for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :])]
        again = Items([half for half in halves[::-1] if half], items.name)

        def score_again(batch: Sequence[T]) -> list[Scored]:
            # For batches of one item, the second order scores the item together with a copy of itself.
            return score(batch) if len(batch) > 1 else score([*batch, *batch])[:1]

        repeated = score_items(again, score_again, journal, f"{label} again", "again/")
        metrics["noise_flips"] = changed_share(samples, [one.sample for one in repeated])
    samples += [{"item": item, "skipped": why} for item, why in sorted(items.skipped.items())]
    return Measurement(metrics, units_of(metrics, {name: "1", f"delta_{name}": "1"}), samples)


def mean_score(samples: Sequence[Sample]) -> float:
    """Mean of the scores of items."""
    return float(np.mean([sample["score"] for sample in samples]))


def by_part(samples: Sequence[Sample], field_name: str, name: str, key: str = "score") -> dict[str, float]:
    """Means of `key` for each value of a field, as metrics `name[field=value]`."""
    parts: dict[Any, list[float]] = defaultdict(list)
    for sample in samples:
        parts[sample[field_name]].append(float(sample[key]))
    return {f"{name}[{field_name}={part}]": float(np.mean(scores)) for part, scores in parts.items()}


def costs(scored: Sequence[Scored]) -> dict[str, float]:
    """Numbers of tokens and tokens per second over all items, and the mean storage at the end of an answer."""
    counted = ("prompt_tokens", "read_tokens", "new_tokens")
    total = {name: math.fsum(one.cost.get(name, 0.0) for one in scored) for name in (*counted, "prefill", "decode")}
    out = {name: total[name] for name in counted}
    for phase, tokens in (("prefill", "read_tokens"), ("decode", "new_tokens")):
        if total[phase] > 0 and total[tokens] > 0:
            out[f"{phase}_tokens_per_second"] = total[tokens] / total[phase]
    for name in STORED:
        found = [one.cost[name] for one in scored if name in one.cost]
        if found:
            out[name] = float(np.mean(found))
    return out


def pair_items(samples: Sequence[Sample], baseline: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pairs of items of a run and of its baseline, without skipped ones."""
    theirs = {sample["item"]: sample for sample in baseline if "skipped" not in sample}
    ours = {sample["item"]: sample for sample in samples if "skipped" not in sample}
    if odd := sorted(theirs.keys() ^ ours.keys()):
        raise DataError(f"the full-precision run scored other items ({odd[0]}): repeat it with method=fp16 force=true")
    return [(sample, theirs[item]) for item, sample in ours.items()]


def changed_share(samples: Sequence[Sample], other: Sequence[Sample]) -> float:
    """Fraction of items whose score differs."""
    pairs = pair_items(samples, other)
    return sum(one["score"] != two["score"] for one, two in pairs) / len(pairs)


def compare(samples: Sequence[Sample], baseline: Baseline, task: ItemsConfig, name: str) -> dict[str, float]:
    """The paired difference from full precision, its bootstrap error, and its tests (`compare_items`)."""
    pairs = pair_items(samples, baseline.samples)
    ours, theirs = (np.array([pair[side]["score"] for pair in pairs], dtype=np.float64) for side in (0, 1))
    found = paired_mean(ours, theirs, resamples=task.resamples)
    floor = baseline.metrics.get("noise_flips", 0.0)
    return found.metrics(f"delta_{name}") | compare_items(ours, theirs, margin=task.margin, noise_flips=floor)


def print_items(items: Mapping[str, str], what: str) -> None:
    """Print to stderr how many `what` items there are, and some with their reasons."""
    shown = "; ".join(f"{item}: {why}" for item, why in sorted(items.items())[:_SHOWN])
    more = f"; and {len(items) - _SHOWN} more, all in the samples" if len(items) > _SHOWN else ""
    if items:
        tqdm.write(f"{len(items)} {what} items: {shown}{more}", file=sys.stderr)
