"""`task=trajectory`, `task=drift`: texts that a method writes, against those of full precision.

Freely, a method's text leaves that of full precision at some token, and what follows cannot be compared. One step at a
time (teacher forcing) the method reads full precision's text and says at each step which token it would write and how
far its distribution is. Texts are greedy, or sampled (`task.temperature`) by the Gumbel-max trick from uniform numbers
that belong to passage, step and token, so that two distributions that are near choose the same token mostly.

`task=drift` writes long texts and says how far the method is in each part of them: whether errors add up.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache import KVCache
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks.measurement import Baseline, Measurement, Task, journaled, storage_metrics
from kvq.tasks.reader import Ends, Pick, Reader, check_prefill, shared
from kvq.tasks.scoring import cut_windows, divergence, evenly, log_probabilities, without_codecs
from kvq_lab.settings import DriftConfig, TrajectoryConfig

_TOGETHER = 8  # passages that full precision continues in one batch, to see what another order of sums changes

_STEPS = 32  # whose logits are in memory at once

Row = dict[str, Any]


def scored_rows(journal: Journal, kind: str, count: int, score: Callable[[int], Row]) -> tuple[list[Row], list[Row]]:
    """The journal's rows `<kind> <index>`, as `journaled`, and the same rows without `storage`, as samples."""
    indices = {f"{kind} {index}": index for index in range(count)}
    rows = journaled(journal, indices, lambda item: score(indices[item]), f"{kind}s", kind)
    return rows, [{name: value for name, value in row.items() if name != "storage"} for row in rows]


def cut_passages(inputs: Inputs) -> list[list[int]]:
    """The tokens of the passages, spread evenly over the windows of the text.

    Raises:
        DataError: a text with fewer windows.
    """
    task: TrajectoryConfig = inputs.config.task
    windows = cut_windows(inputs.tokens.streams, task.context, bos=inputs.bos)
    return [window.tokens.tolist() for window in evenly(windows, task.prompts, "task.prompts")]


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` where a method cannot read a prompt in chunks as asked, `ConfigError` for long passages."""
    task: TrajectoryConfig = inputs.config.task
    check_prefill(method, task.prefill)
    error = f"task.new_tokens={task.new_tokens}: after {task.context} tokens;"
    inputs.check_tokens(task.context + task.new_tokens, error, " together")


class Draws:
    """Chooses tokens with Gumbel noise per passage and step, the same for every method; without noise if greedy.

    Args:
        task: has `temperature` (None: greedy) and the seed `draw`.
        passage: index of the passage.
    """

    def __init__(self, task: TrajectoryConfig, passage: int) -> None:
        self.temperature, self.seed = task.temperature, (task.draw, passage)

    def choose(self, logits: Float[Tensor, "steps vocab"], start: int) -> Int[Tensor, " steps"]:
        """Choose the token of each of the steps from `start` on, greedily or with the steps' noise."""
        if self.temperature is None:
            return logits.argmax(-1)
        generators = (np.random.default_rng((*self.seed, start + step)) for step in range(len(logits)))
        noise = torch.stack([torch.from_numpy(rng.gumbel(size=logits.shape[-1])) for rng in generators])
        return (logits.double().cpu() / self.temperature + noise).argmax(-1).to(logits.device)

    def pick(self) -> Pick:
        """A function from a step's logits to its token, to be called for each step of one text in order."""
        steps = itertools.count()
        return lambda logits: self.choose(logits, next(steps))


class Writer:
    """Continues passages with caches of one method, and compares its steps with full precision's text."""

    def __init__(self, inputs: Inputs, method: Method) -> None:
        self.inputs, self.task = inputs, inputs.config.task
        self.reader, self.full = Reader.of(inputs, method), Reader.of(inputs, without_codecs(method))
        self.ends: Ends = self.reader.ends(inputs.tokenizer)

    def write_freely(
        self, prompts: Sequence[Sequence[int]], first: int, reader: Reader | None = None
    ) -> tuple[list[list[int]], KVCache]:
        """Continue each passage of a batch; returns the texts and their cache. `first`: index of its first passage."""
        reader = reader or self.reader
        cache, logits = reader.begin_together(prompts)
        picks = [Draws(self.task, first + row).pick() for row in range(len(prompts))]
        return reader.write(cache, logits, self.task.new_tokens, self.ends, picks), cache

    def write_with_other_rounding(self, prompts: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
        """Texts of full precision with other rounding: by batches (`batch`), and by another cache dtype (`dtype`)."""
        batches = [(start, prompts[start : start + _TOGETHER]) for start in range(0, len(prompts), _TOGETHER)]
        loaded = self.inputs.model
        wide = (loaded.cache_dtype or loaded.model.dtype) in (torch.float32, torch.float64)
        other = replace(loaded, cache_dtype=torch.float16 if wide else torch.float32)
        reader = Reader(other, self.full.method, self.full.prefill, self.full.keep_decoded)
        return {
            "batch": [row for start, batch in batches for row in self.write_freely(batch, start)[0]],
            "dtype": [self.write_freely([prompt], place, reader)[0][0] for place, prompt in enumerate(prompts)],
        }

    @torch.no_grad()
    def read_forced(
        self, prompt: Sequence[int], text: Sequence[int], draws: Draws
    ) -> tuple[list[bool], list[float], KVCache]:
        """For each step of a text: whether the method would write its token, and KL(full precision || method), nats.

        At the end the method's cache, which holds the text.
        """
        start_tokens, tokens = self.full.tensor([prompt]), self.full.tensor([text])
        (cache, logits), (plain, expected) = self.reader.begin(start_tokens), self.full.begin(start_tokens)
        same, distances = [], []
        for start in range(0, len(text), _STEPS):
            piece = tokens[:, start : start + _STEPS]
            found, right = (
                torch.cat([first[:, None], reader.read(held, piece)], 1)
                for reader, held, first in ((self.reader, cache, logits), (self.full, plain, expected))
            )
            logits, expected = found[:, -1], right[:, -1]
            same += (draws.choose(found[0, :-1], start) == piece[0]).tolist()
            distances += divergence(log_probabilities(right[0, :-1]), log_probabilities(found[0, :-1])).tolist()
        cache.check_finite()
        return same, distances, cache


def first_difference(tokens: Sequence[int], full: Sequence[int]) -> int | None:
    """Number of equal tokens before two texts differ; None: they are the same."""
    return None if list(tokens) == list(full) else shared(tokens, full)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample for each passage; `first`: tokens before the text leaves full precision's, null where it never does."""
    task: TrajectoryConfig = inputs.config.task
    prompts, writer = cut_passages(inputs), Writer(inputs, method)
    known = {} if baseline is None else {row["item"]: row["tokens"] for row in baseline.samples}

    def score(index: int) -> Row:
        row: Row = {}
        if baseline is None or task.free:
            (tokens,), cache = writer.write_freely([prompts[index]], index)
            row = {"tokens": tokens, "ended": writer.ends(tokens), "storage": storage_metrics(cache, 1)}
        if baseline is not None:
            full = known[f"passage {index}"]
            same, distances, cache = writer.read_forced(prompts[index], full, Draws(task, index))
            if task.free:
                row["first"] = first_difference(tokens, full)
            else:
                row |= {"storage": storage_metrics(cache, 1), "first": None if all(same) else same.index(False)}
            row |= {"same": same, "kl": distances}
        return row

    rows, samples = scored_rows(journal, "passage", len(prompts), score)
    metrics = {**rows[-1]["storage"], "passages": float(len(rows))}
    if "ended" in rows[0]:
        metrics["ended"] = statistics.fmean(row["ended"] for row in rows)
    if baseline is not None:
        metrics |= _comparison_metrics(rows)
        if isinstance(task, DriftConfig):
            metrics |= drift(rows, task.parts)
    elif method.is_full_precision:
        for name, texts in writer.write_with_other_rounding(prompts).items():
            firsts = [first_difference(text, row["tokens"]) for text, row in zip(texts, rows, strict=True)]
            metrics |= _departures(firsts, rows, f"noise_{name}_")
    return Measurement(metrics, units_of(metrics), samples)


def _departures(firsts: Sequence[int | None], rows: Sequence[Row], prefix: str = "") -> dict[str, float]:
    """Share of texts that differ from full precision's, and mean tokens before they do (all of one that never does)."""
    share = statistics.fmean(first is not None for first in firsts)
    return {f"{prefix}left": share, f"{prefix}kept_tokens": statistics.fmean(_tokens_until_difference(firsts, rows))}


def _tokens_until_difference(firsts: Sequence[int | None], rows: Sequence[Row]) -> list[int]:
    """Tokens of each text before it leaves full precision's; all of one that never does (None in `firsts`)."""
    texts = [row["tokens"] if "tokens" in row else row["same"] for row in rows]
    return [len(text) if first is None else first for first, text in zip(firsts, texts, strict=True)]


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of two or more values."""
    return statistics.stdev(values) / len(values) ** 0.5


def _comparison_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of a method and full precision, with standard errors over passages."""
    firsts = [row["first"] for row in rows]
    shares = [statistics.fmean(row["same"]) for row in rows]
    distances = np.concatenate([row["kl"] for row in rows])
    return {
        **_departures(firsts, rows),
        "kept_tokens_se": standard_error(_tokens_until_difference(firsts, rows)),
        "same_share": statistics.fmean(shares),
        "same_share_se": standard_error(shares),
        "kl_mean": float(distances.mean()),
        "kl_p99": float(np.quantile(distances, 0.99)),
        "kl_max": float(distances.max()),
    }


def drift(rows: Sequence[Row], parts: int) -> dict[str, float]:
    """Mean distance in each part of the texts, and the slope of its logarithm over the logarithm of the tokens written.

    A slope of 0 says that errors do not add up. Its standard error is over texts. A part is of equal length for all
    texts; those that ended before it take no part in it.
    """
    longest = max(len(row["kl"]) for row in rows)
    cuts = np.unique(np.linspace(0, longest, parts + 1).round().astype(int))
    metrics, slopes = {}, []
    for start, end in itertools.pairwise(cuts):
        pieces = [row["kl"][start:end] for row in rows if len(row["kl"]) > start]
        metrics[f"kl_mean[part={end}]"] = float(np.concatenate(pieces).mean())
        if len(pieces) > 1:
            metrics[f"kl_mean_se[part={end}]"] = standard_error([float(np.mean(one)) for one in pieces])
    for row in rows:
        means = [np.mean(row["kl"][a:b]) for a, b in itertools.pairwise(cuts) if len(row["kl"]) >= b]
        known = [(np.log(b), np.log(m)) for b, m in zip(cuts[1:], means, strict=False) if m > 0]
        if len(known) > 1:
            written, distances = np.array(known).T
            slopes.append(float(np.polyfit(written, distances, 1)[0]))
    if slopes:
        metrics["drift"] = statistics.fmean(slopes)
    if len(slopes) > 1:
        metrics["drift_se"] = standard_error(slopes)
    return metrics


TASKS = {kind.name: Task(check, measure, settings=kind) for kind in (TrajectoryConfig, DriftConfig)}
