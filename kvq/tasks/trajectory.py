"""`task=trajectory`: greedy continuations against full precision's, written freely and one step at a time.

Freely, a method's text leaves that of full precision at some token, and what follows cannot be compared. One step at a
time (teacher forcing) the method reads full precision's text and says at each step which token it would write and how
far its distribution is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.config.tasks import TrajectoryConfig
from kvq.errors import ConfigError, DataError
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.results.metrics import units_of
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.ppl import without_codecs
from kvq.tasks.reader import Ends, Reader, check_prefill, end_tokens, shared, stop_at
from kvq.tasks.result import divergence
from kvq.tasks.scoring import log_probabilities
from kvq.tasks.storage import storage_metrics
from kvq.tasks.windows import cut_windows

_TOGETHER = 8  # passages that full precision continues in one batch, to see what another order of sums changes
_STEPS = 32  # whose logits are held at once
Row = dict[str, Any]


def passages(inputs: Inputs) -> list[list[int]]:
    """The tokens of the passages, spread evenly over the windows of the text.

    Raises:
        DataError: a text with fewer windows.
    """
    task: TrajectoryConfig = inputs.config.task
    windows = cut_windows(inputs.tokens.streams, task.context, bos=inputs.bos)
    if len(windows) < task.prompts:
        raise DataError(f"task.prompts={task.prompts}: the text has {len(windows)} passages of {task.context} tokens")
    places = np.linspace(0, len(windows) - 1, task.prompts).round().astype(int)
    return [windows[place].tokens.tolist() for place in places]


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a residual without order, `ConfigError` for passages longer than the model takes."""
    task: TrajectoryConfig = inputs.config.task
    check_prefill(method, task.prefill)
    longest = inputs.longest_context
    if longest is not None and task.context + task.new_tokens > longest:
        raise ConfigError(
            f"task.new_tokens={task.new_tokens}: after {task.context} tokens; model={inputs.config.model.name} takes "
            f"at most {longest} together"
        )


class Writer:
    """Continues passages with caches of one method, and judges its steps on full precision's text."""

    def __init__(self, inputs: Inputs, method: Method) -> None:
        self.inputs, self.task = inputs, inputs.config.task
        self.ends: Ends = stop_at(inputs.tokenizer, end_tokens(inputs.model, inputs.tokenizer), ())
        self.reader = self._reader(inputs.model, method)
        self.full = self._reader(inputs.model, without_codecs(method))

    def _reader(self, loaded: LoadedModel, method: Method) -> Reader:
        return Reader(loaded, method, self.task.prefill, self.inputs.config.cache.keep_decoded)

    def free(self, prompts: Sequence[Sequence[int]], reader: Reader | None = None) -> tuple[list[list[int]], KVCache]:
        """The continuation of each passage of a batch, and the cache that holds them."""
        reader = reader or self.reader
        cache, logits = reader.begin_together(prompts)
        return reader.write(cache, logits, self.task.new_tokens, self.ends), cache

    def otherwise(self, prompts: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
        """Full precision's continuations in batches, and with the cache in another dtype: what rounding changes."""
        batches = [prompts[start : start + _TOGETHER] for start in range(0, len(prompts), _TOGETHER)]
        loaded = self.inputs.model
        wide = (loaded.cache_dtype or loaded.model.dtype) in (torch.float32, torch.float64)
        other = replace(loaded, cache_dtype=torch.float16 if wide else torch.float32)
        reader = self._reader(other, self.full.method)
        return {
            "batch": [row for batch in batches for row in self.free(batch)[0]],
            "dtype": [self.free([prompt], reader)[0][0] for prompt in prompts],
        }

    @torch.no_grad()
    def forced(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[list[bool], list[float]]:
        """For each step of a text: whether the method would write its token, and KL(full precision || method), nats."""
        given, tokens = self.full.tensor([prompt]), self.full.tensor([text])
        (cache, logits), (plain, expected) = self.reader.begin(given), self.full.begin(given)
        same, distances = [], []
        for start in range(0, len(text), _STEPS):
            piece = tokens[:, start : start + _STEPS]
            found, right = (
                torch.cat([first[:, None], reader.read(held, piece)], 1)
                for reader, held, first in ((self.reader, cache, logits), (self.full, plain, expected))
            )
            logits, expected = found[:, -1], right[:, -1]
            same += (found[0, :-1].argmax(-1) == piece[0]).tolist()
            distances += divergence(log_probabilities(right[0, :-1]), log_probabilities(found[0, :-1])).tolist()
        cache.check_finite()
        return same, distances


def first_difference(tokens: Sequence[int], full: Sequence[int]) -> int | None:
    """Tokens before two texts differ; None: they are the same."""
    return None if list(tokens) == list(full) else shared(tokens, full)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample for each passage; `first`: tokens before the text leaves full precision's, null where it never does."""
    prompts, writer = passages(inputs), Writer(inputs, method)
    known = {} if baseline is None else {row["item"]: row["tokens"] for row in baseline.samples}
    for index, prompt in enumerate(tqdm(prompts, desc="trajectories", unit="passage", leave=False, disable=None)):
        item = f"passage {index}"
        if item in journal.rows:
            continue
        (tokens,), cache = writer.free([prompt])
        row: Row = {"item": item, "tokens": tokens, "ended": writer.ends(tokens), "storage": storage_metrics(cache, 1)}
        if baseline is not None:
            same, distances = writer.forced(prompt, known[item])
            row |= {"first": first_difference(tokens, known[item]), "same": same, "kl": distances}
        journal.add([row])
    rows = [journal.rows[f"passage {index}"] for index in range(len(prompts))]
    metrics = dict(rows[-1]["storage"])
    metrics |= {"passages": float(len(rows)), "ended": statistics.fmean(row["ended"] for row in rows)}
    if baseline is not None:
        metrics |= _compared(rows)
    elif method.is_full_precision:
        for name, texts in writer.otherwise(prompts).items():
            found = [first_difference(text, row["tokens"]) for text, row in zip(texts, rows, strict=True)]
            metrics |= _left(found, rows, f"noise_{name}_")
    samples = [{name: value for name, value in row.items() if name != "storage"} for row in rows]
    return Measurement(metrics, units_of(metrics), samples)


def _left(found: Sequence[int | None], rows: Sequence[Row], prefix: str = "") -> dict[str, float]:
    """Share of texts that leave full precision's, and mean tokens before they do (all of one that never does)."""
    share = statistics.fmean(first is not None for first in found)
    return {f"{prefix}left": share, f"{prefix}kept_tokens": statistics.fmean(_kept(found, rows))}


def _kept(found: Sequence[int | None], rows: Sequence[Row]) -> list[int]:
    return [len(row["tokens"]) if first is None else first for first, row in zip(found, rows, strict=True)]


def _compared(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of a method and full precision, with standard errors over passages."""
    found = [row["first"] for row in rows]
    shares = [statistics.fmean(row["same"]) for row in rows]
    distances = np.concatenate([row["kl"] for row in rows])
    return {
        **_left(found, rows),
        "kept_tokens_se": statistics.stdev(_kept(found, rows)) / len(rows) ** 0.5,
        "same_share": statistics.fmean(shares),
        "same_share_se": statistics.stdev(shares) / len(rows) ** 0.5,
        "kl_mean": float(distances.mean()),
        "kl_p99": float(np.quantile(distances, 0.99)),
        "kl_max": float(distances.max()),
    }


TASK = Task(check, measure, lambda inputs: inputs.tokens.fingerprint)
