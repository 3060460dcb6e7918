"""`task=ppl`: perplexity through the quantized cache, with KL and agreement against full precision from the same pass.

Protocols are the papers': nsn's sliding windows, NSNQuant's and KVQuant's disjoint ones (docs/pitfalls.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.config import PplConfig, Scoring
from kvq.errors import DataError
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.load import LoadedModel
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.statistics import delta_nll_of_samples
from kvq.tasks import scoring
from kvq.tasks.measurement import Baseline, Measurement, Task, decoded, storage_metrics

Writer = Callable[[int, int, Tensor], None]
"""Takes the index of a window, a target's position, and the log-probabilities from there on `[targets, vocab]`."""


def ppl_windows(streams: Sequence[Tensor], task: PplConfig, bos: int | None = None) -> list[scoring.Window]:
    """The windows that `task` asks for, each after `bos`."""
    stride = task.stride if task.windows.name == "sliding" else None
    windows = scoring.cut_windows(streams, task.context, stride, task.max_windows, bos)
    if task.scoring is not Scoring.continuation:
        return windows
    assert task.prompt is not None
    return [scoring.Window(window.tokens, task.prompt) for window in windows]


def empty_result(windows: Sequence[scoring.Window], task: PplConfig) -> scoring.PplResult:
    """A result with nothing scored yet."""
    scores = [scoring.WindowScore(index, window.scored_from) for index, window in enumerate(windows)]
    return scoring.PplResult(scores, {}, stretch=task.stretch)


def run_ppl(
    loaded: LoadedModel,
    method: Method,
    windows: Sequence[scoring.Window],
    task: PplConfig,
    reference: scoring.ReferenceLogProbs | None = None,
    fill: bool = False,
    keep_decoded: bool = True,
    journal: Journal | None = None,
    writer: Writer | None = None,
) -> scoring.PplResult:
    """Score every window under `method`.

    Windows in the `journal` are not scored again (unless `fill`: this is full precision and writes `reference`). Where
    that was not kept, full precision is computed again, window by window. `writer` stores log-probabilities.
    """
    at_once, continuation = task.scoring is not Scoring.generation, task.scoring is Scoring.continuation
    method = scoring.parallel_method(method) if at_once else method
    # No scored target reads the state of the last token; only a window quantized at once includes it in statistics.
    if at_once:
        bounds = None if continuation else [(0, task.context)]
    else:
        bounds = scoring.forward_bounds(loaded, method, task.context - 1)
    result = empty_result(windows, task)
    journal = Journal() if journal is None or fill else journal
    with tqdm(total=len(windows), desc=method.label, unit="window", leave=False, disable=None) as bar:
        for indices in scoring.batches(windows, task.batch_size):
            bar.update(len(indices))
            if all(f"window {index}" in journal.rows for index in indices):
                _restore(result, indices, journal)
                continue
            tokens = torch.stack([windows[index].tokens for index in indices]).to(loaded.device)
            scored_from = windows[indices[0]].scored_from
            cache = KVCache(loaded, scoring.holding_method(method) if continuation else method, keep_decoded)
            # A generator: it computes only what is read.
            full = _chunks(loaded, KVCache(loaded, scoring.without_codecs(method)), method, tokens, scored_from, bounds)
            offset = 0
            for scored in _chunks(loaded, cache, method, tokens, scored_from, bounds):
                log_probs = scoring.log_probabilities(scored.logits)
                count, expected = log_probs.shape[1], None
                if reference is not None and fill:
                    reference.write(indices, offset, log_probs)
                elif reference is not None and reference.kept:
                    expected = reference.read(indices, offset, count).to(log_probs.device)
                elif reference is not None:
                    expected = scoring.log_probabilities(next(full).logits)
                if writer is not None:
                    for row, index in enumerate(indices):
                        writer(index, scored_from + offset, log_probs[row])
                result.add(indices, scored.targets, log_probs, expected)
                offset += count
            result.settle(indices)
            cache.check_finite()
            if not all(math.isfinite(result.scores[index].nll) for index in indices):
                odd = f"window {indices[0]}: the log-probabilities are not finite, though keys and values are"
                raise DataError(odd)
            result.storage = result.storage or storage_metrics(cache, len(indices))
            journal.add([_journal_row(result, index) for index in indices])
    return result


def _journal_row(result: scoring.PplResult, index: int) -> dict[str, Any]:
    """The score of a window, with the KL divergence of each token, which quantiles need."""
    divergence = [value for part in result.kl_per_token.get(index, []) for value in part.tolist()]
    score = {"sample": vars(result.scores[index]), "kl": divergence, "storage": result.storage}
    return {"item": f"window {index}"} | score


def _restore(result: scoring.PplResult, indices: Sequence[int], journal: Journal) -> None:
    """Add the journal's scores of windows to the result."""
    for index in indices:
        row = journal.rows[f"window {index}"]
        result.scores[index] = scoring.WindowScore(**row["sample"])
        result.storage = result.storage or row["storage"]
        if row["kl"]:
            result.kl_per_token[index] = [torch.tensor(row["kl"])]


def _chunks(
    loaded: LoadedModel, cache: KVCache, method: Method, tokens: Tensor, first: int, bounds: scoring.Bounds | None
) -> Iterator[scoring.ScoredChunk]:
    if bounds is None:
        return scoring.score_continuation(loaded, cache, method.residual, tokens, first)
    return scoring.score(loaded, cache, tokens, first, bounds)


def check(inputs: Inputs, method: Method) -> None:
    """As `check_scoring`; raise `ConfigError` for windows longer than the model takes."""
    inputs.check_context()
    check_scoring(method, inputs.config.task)


def check_scoring(method: Method, task: PplConfig) -> None:
    """Raise `Unsupported` where the method cannot quantize tokens in the order that `task.scoring` needs."""
    if task.scoring is Scoring.generation:
        scoring.scoring_bounds(method, task.context - 1)
    else:
        at_once = task.scoring is Scoring.parallel
        method.check_needs(f"task.scoring={task.scoring}", "all_at_once" if at_once else "prompt_at_once")
        scoring.parallel_method(method)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Perplexity; with a baseline also KL, agreement and the paired difference from full precision."""
    return measurement(in_transformers(inputs, method, journal), inputs.config.task, baseline)


def measurement(
    result: scoring.PplResult,
    task: PplConfig,
    baseline: Baseline | None,
    more: Mapping[str, float] | None = None,
    engine: str | None = None,
) -> Measurement:
    """What a record holds of a result: its metrics and `more`, differences from the baseline, samples, the engine."""
    metrics = result.metrics() | dict(more or {})
    if baseline is not None:
        metrics |= _differences(metrics, result.samples(), baseline, task)
    return Measurement(metrics, units_of(metrics), result.samples(), engine)


def in_transformers(
    inputs: Inputs, method: Method, journal: Journal, writer: Writer | None = None
) -> scoring.PplResult:
    """Score every window of a run; with a `writer` all of them anew, since a stored score has no log-probabilities."""
    config, loaded = inputs.config, inputs.model
    task: PplConfig = config.task
    windows = ppl_windows(inputs.tokens.streams, task, inputs.bos)
    journal = journal if writer is None else Journal()
    reference, full = reference_of(inputs, method, windows, task)
    if not method.is_full_precision:
        keep = config.cache.keep_decoded
        return run_ppl(loaded, method, windows, task, reference, keep_decoded=keep, journal=journal, writer=writer)
    if full is not None and writer is None:
        return full
    return run_ppl(loaded, method, windows, task, journal=journal, writer=writer)


def reference_of(
    inputs: Inputs, method: Method, windows: Sequence[scoring.Window], task: PplConfig
) -> tuple[scoring.ReferenceLogProbs, scoring.PplResult | None]:
    """Full precision's log-probabilities and result (None: not kept, computed with each method), once a process."""

    def full_precision() -> tuple[scoring.ReferenceLogProbs, scoring.PplResult | None]:
        dtype = torch.float64 if inputs.config.model.dtype.value == "float64" else torch.float32
        reference = scoring.ReferenceLogProbs(windows, inputs.model.text_config.vocab_size, dtype)
        if not reference.kept:
            return reference, None
        return reference, run_ppl(inputs.model, scoring.without_codecs(method), windows, task, reference, fill=True)

    return inputs.shared("reference", (inputs.names, repr(task)), full_precision)


def _differences(
    metrics: dict[str, float], samples: list[dict[str, Any]], baseline: Baseline, task: PplConfig
) -> dict[str, float]:
    """Losses over the baseline's, in all and by stretch of positions, with their standard errors."""
    out = delta_nll_of_samples(samples, baseline.samples, **vars(task.bootstrap)).metrics("delta_nll")
    out["delta_perplexity"] = metrics["perplexity"] - baseline.metrics["perplexity"]
    rows = [[row.get("by_position", {}) for row in run] for run in (samples, baseline.samples)]
    for start in map(str, scoring.summed_positions(rows[0])):
        own, full = (
            [{"window": i, "tokens": row[start][0], "nll": row[start][1]} for i, row in enumerate(run) if start in row]
            for run in rows
        )
        delta = delta_nll_of_samples(own, full, **vars(task.bootstrap))
        out |= delta.metrics("delta_nll", f"[position={start}]")
    return out


def window_texts(inputs: Inputs, task: PplConfig) -> list[str]:
    """The text of each window of a protocol."""
    return decoded(inputs, (window.tokens for window in ppl_windows(inputs.tokens.streams, task, inputs.bos)))


TASK = Task(check, measure, texts=lambda inputs: window_texts(inputs, inputs.config.task))
