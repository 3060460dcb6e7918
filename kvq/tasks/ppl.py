"""`task=ppl`: perplexity through the quantized cache, with KL and agreement against full precision from the same pass.

Protocols (windows, scoring) are those of the papers: nsn's sliding windows, NSNQuant's and KVQuant's disjoint ones.
docs/pitfalls.md says what each scoring can show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.config import PplConfig, Scoring
from kvq.errors import DataError
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.results.metrics import units_of
from kvq.results.statistics import delta_nll_of_samples
from kvq.tasks.continuation import holding_method, score_continuation
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.reference import ReferenceLogProbs
from kvq.tasks.scoring import ScoredChunk, log_probabilities, parallel_method, score
from kvq.tasks.stepwise import check_at_once, scoring_bounds
from kvq.tasks.storage import storage_metrics
from kvq.tasks.windows import Window, batches, cut_windows, stack


@dataclass
class WindowScore:
    """Sums over the scored tokens of one window; `kl` and `top1` need a reference."""

    window: int
    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    top1: int = 0


@dataclass
class PplResult:
    """What one pass over the windows measured."""

    scores: list[WindowScore]
    storage: dict[str, float]
    kl_per_token: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood in nats per scored token."""
        return sum(s.nll for s in self.scores) / sum(s.tokens for s in self.scores)

    def metrics(self) -> dict[str, float]:
        """The record's metrics, without those that compare with the baseline record."""
        tokens = sum(s.tokens for s in self.scores)
        out = {"nll": self.nll, "perplexity": math.exp(min(self.nll, 700.0)), **self.storage}
        if self.kl_per_token:
            kl = torch.cat(
                [part for window in sorted(self.kl_per_token) for part in self.kl_per_token[window]]
            ).double()
            out["kl_mean"], out["kl_p99"] = float(kl.mean()), float(torch.quantile(kl, 0.99)) if tokens else 0.0
            out["top1_agreement"] = sum(s.top1 for s in self.scores) / tokens
        return out | {"scored_tokens": float(tokens), "windows": float(len(self.scores))}

    def samples(self) -> list[dict[str, Any]]:
        """One row per window, for paired statistics."""
        compared = bool(self.kl_per_token)
        names = ("window", "tokens", "nll", "kl", "top1") if compared else ("window", "tokens", "nll")
        return [{name: getattr(score, name) for name in names} for score in self.scores]


def ppl_windows(streams: Sequence[Tensor], task: PplConfig, bos: int | None = None) -> list[Window]:
    """The windows that `task` asks for, each behind `bos`. Raises: DataError: a text shorter than one window."""
    stride = task.stride if task.windows.name == "sliding" else None
    windows = cut_windows(streams, task.context, stride, task.max_windows, bos)
    if task.scoring is not Scoring.continuation:
        return windows
    assert task.prompt is not None
    return [Window(window.tokens, task.prompt) for window in windows]


def run_ppl(
    loaded: LoadedModel,
    method: Method,
    windows: Sequence[Window],
    task: PplConfig,
    reference: ReferenceLogProbs | None = None,
    fill: bool = False,
    keep_decoded: bool = True,
    chunk: int | None = None,
    journal: Journal | None = None,
) -> PplResult:
    """Score every window under `method`.

    Args:
        journal: stores each window as it is scored; windows in it are not scored again (unless `fill`).
        reference: full-precision log-probabilities to compare with; where they were not kept, they are computed again
            window by window. With `fill`, this run is the full-precision one and writes them.
        chunk: at most this many tokens per forward in `generation` scoring (tests; results do not depend on it).

    Raises:
        Unsupported: residual=none under `generation`.
        DataError: states that are not finite.
    """
    at_once, continuation = task.scoring is not Scoring.generation, task.scoring is Scoring.continuation
    method = parallel_method(method) if at_once else method
    # No scored target reads the state of the last token; only a window quantized at once includes it in statistics.
    bounds = [(0, task.context)] if at_once else scoring_bounds(method, task.context - 1, chunk)
    result = PplResult([WindowScore(i) for i in range(len(windows))], {})
    journal = Journal() if journal is None or fill else journal
    with tqdm(total=len(windows), desc=method.label, unit="window", leave=False, disable=None) as bar:
        for indices in batches(windows, task.batch_size):
            bar.update(len(indices))
            if all(f"window {index}" in journal.rows for index in indices):
                _restore(result, indices, journal)
                continue
            tokens, scored_from = stack(windows, indices, loaded.device), windows[indices[0]].scored_from
            held = holding_method(method) if continuation else method
            cache = KVCache(loaded.model, held, keep_decoded, dtype=loaded.cache_dtype)
            # A generator: it computes only what is read.
            full = _full_precision(loaded, method, tokens, scored_from, bounds, continuation)
            offset = 0
            for scored in _scored(loaded, cache, method, tokens, scored_from, bounds, continuation):
                log_probs = log_probabilities(scored.logits)
                count, expected = log_probs.shape[1], None
                if reference is not None and fill:
                    reference.write(indices, offset, log_probs)
                elif reference is not None and reference.kept:
                    expected = reference.read(indices, offset, count).to(log_probs.device)
                elif reference is not None:
                    expected = log_probabilities(next(full).logits)
                _add(result, indices, scored, log_probs, expected)
                offset += count
            _check(result, indices, cache)
            result.storage = result.storage or storage_metrics(cache, len(indices))
            _keep(result, indices, journal)
    return result


def _keep(result: PplResult, indices: Sequence[int], journal: Journal) -> None:
    """Add the scores of windows to the journal, with the KL divergence of each token, which quantiles need."""
    rows = []
    for index in indices:
        divergence = [value for part in result.kl_per_token.get(index, []) for value in part.tolist()]
        score = {"sample": vars(result.scores[index]), "kl": divergence, "storage": result.storage}
        rows.append({"item": f"window {index}"} | score)
    journal.add(rows)


def _restore(result: PplResult, indices: Sequence[int], journal: Journal) -> None:
    for index in indices:
        row = journal.rows[f"window {index}"]
        result.scores[index] = WindowScore(**row["sample"])
        result.storage = result.storage or row["storage"]
        if row["kl"]:
            result.kl_per_token[index] = [torch.tensor(row["kl"])]


def _check(result: PplResult, indices: Sequence[int], cache: KVCache) -> None:
    if not all(math.isfinite(result.scores[index].nll) for index in indices):
        cache.check_finite()
        raise DataError(f"window {indices[0]}: the log-probabilities are not finite, though keys and values are")


def _without_codecs(method: Method) -> Method:
    return Method(name="fp16", key=None, value=None, residual=method.residual, bits=None, latent=method.latent)


def _full_precision(
    loaded: LoadedModel,
    method: Method,
    tokens: Tensor,
    scored_from: int,
    bounds: list[tuple[int, int]],
    continuation: bool,
) -> Iterator[ScoredChunk]:
    full = _without_codecs(method)
    cache = KVCache(loaded.model, full, dtype=loaded.cache_dtype)
    return _scored(loaded, cache, full, tokens, scored_from, bounds, continuation)


def _scored(
    loaded: LoadedModel,
    cache: KVCache,
    method: Method,
    tokens: Tensor,
    scored_from: int,
    bounds: list[tuple[int, int]],
    continuation: bool,
) -> Iterator[ScoredChunk]:
    if continuation:
        return score_continuation(loaded, cache, method.residual, tokens, scored_from)
    return score(loaded, cache, tokens, scored_from, bounds)


def _add(
    result: PplResult,
    indices: Sequence[int],
    scored: ScoredChunk,
    log_probs: Float[Tensor, "batch targets vocab"],
    expected: Float[Tensor, "batch targets vocab"] | None,
) -> None:
    nll = -log_probs.gather(-1, scored.targets.unsqueeze(-1)).squeeze(-1).double().sum(-1)
    for row, index in enumerate(indices):
        result.scores[index].tokens += log_probs.shape[1]
        result.scores[index].nll += float(nll[row])
    if expected is None:
        return
    # Rounding can make the KL divergence of two equal distributions slightly negative.
    kl = torch.nn.functional.kl_div(log_probs, expected, reduction="none", log_target=True).sum(-1).clamp_min(0)
    same = (log_probs.argmax(-1) == expected.argmax(-1)).sum(-1)
    for row, index in enumerate(indices):
        result.kl_per_token.setdefault(index, []).append(kl[row].cpu())
        result.scores[index].kl += float(kl[row].double().sum())
        result.scores[index].top1 += int(same[row])


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` where scoring has no order to quantize in, `ConfigError` for too long a window."""
    task: PplConfig = inputs.config.task
    inputs.check_context(task.context)
    if task.scoring is not Scoring.generation:
        check_at_once(method, task.scoring)
        parallel_method(method)
    else:
        scoring_bounds(method, task.context - 1)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Perplexity of `inputs` under `method`; with a baseline also KL, agreement and the paired difference.

    The first run of a process that needs the full-precision log-probabilities computes them; later runs read them.
    """
    config = inputs.config
    task: PplConfig = config.task
    loaded = inputs.model
    windows = ppl_windows(inputs.tokens.streams, task, inputs.bos)

    def full_precision() -> tuple[ReferenceLogProbs, PplResult | None]:
        full = _without_codecs(method)
        dtype = torch.float64 if config.model.dtype.value == "float64" else torch.float32
        reference = ReferenceLogProbs(windows, loaded.text_config.vocab_size, dtype)
        if not reference.kept:  # full precision is computed again beside each method instead
            return reference, None
        return reference, run_ppl(loaded, full, windows, task, reference, fill=True)

    reference, full = inputs.shared("reference", (inputs.names, repr(task)), full_precision)
    if method.is_full_precision:
        result = full if full is not None else run_ppl(loaded, method, windows, task, journal=journal)
    else:
        keep_decoded = config.cache.keep_decoded
        result = run_ppl(loaded, method, windows, task, reference, keep_decoded=keep_decoded, journal=journal)
    metrics = result.metrics()
    if baseline is not None:
        metrics |= _differences(metrics, result.samples(), baseline, task)
    return Measurement(metrics, units_of(metrics), result.samples())


def _differences(
    metrics: dict[str, float], samples: list[dict[str, Any]], baseline: Baseline, task: PplConfig
) -> dict[str, float]:
    settings = task.bootstrap
    delta = delta_nll_of_samples(
        samples, baseline.samples, block=settings.block, resamples=settings.resamples, seed=settings.seed
    )
    out = {
        "delta_nll": delta.value,
        "delta_perplexity": metrics["perplexity"] - baseline.metrics["perplexity"],
    }
    return out if delta.standard_error is None else out | {"delta_nll_se": delta.standard_error}


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the text."""
    return inputs.tokens.fingerprint


TASK = Task(check, measure, fingerprint)
