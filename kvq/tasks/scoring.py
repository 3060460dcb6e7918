"""Exact scoring through the cache: windows of known text, their log-probabilities, and what was measured of them.

A method with more than codecs and a residual is scored token by token (eviction), only after a prompt, up to each flush
(transformers' caches), or not at all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache import KVCache
from kvq.cache.hooks import masks_each_query
from kvq.config.method import Policy, PrefillBlock, Residual, ResidualSide
from kvq.errors import ConfigError, DataError
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.results.statistics import divergence_metrics

Tokens = Int[Tensor, "batch context"]
Targets = Int[Tensor, "batch targets"]
LogProbs = Float[Tensor, "batch targets vocab"]
Bounds = list[tuple[int, int]]
"""First token of each chunk, and the one behind its last."""
CHUNK = 128
"""Queries per forward of a full-precision run, which has no residual; equal to the methods' usual residual size."""
FORWARD = 256
"""Tokens per forward of `task=ppl` where a forward may hold several flushes (`forward_bounds`)."""
LOGIT_CHUNK = 128
"""Positions whose logits are in memory at once under `parallel`."""
_NEVER = 2**30  # tokens of a residual that never fills


@dataclass(frozen=True)
class ScoredChunk:
    """Logits for consecutive targets of a batch of windows: `logits[:, i]` predicts `targets[:, i]`."""

    logits: LogProbs
    targets: Targets


def log_probabilities(logits: Float[Tensor, "*lead vocab"]) -> Float[Tensor, "*lead vocab"]:
    """Logarithms of the probabilities that logits stand for, in fp32; in fp64 for fp64 logits."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


def sliding_chunk(method: Method, residual: ResidualSide) -> int:
    """Most tokens per forward under `sliding`: at most the residual's size, unless a token is `decoded_at_once`."""
    whole = method.has("decoded_at_once")
    return CHUNK if whole else min(CHUNK, residual.size)


def scoring_bounds(method: Method, length: int, chunk: int | None = None) -> Bounds:
    """Chunks of `length` tokens that end where a block residual is flushed, so that none is flushed within a chunk.

    Results do not depend on the cuts, which avoid second copies of tokens. Where a method needs it (`steps`), each
    token is a chunk. `chunk`: most tokens per forward (default: whole blocks; `CHUNK` where none cuts).
    """
    method.check_needs("task.scoring=generation", "no_prompt")
    cuts = {0, length}
    if steps(method):
        cuts |= set(range(length))
    elif method.replaces_layers:  # transformers' caches flush after the first token, then after every `size`
        cuts |= set(range(1, length, max(method.residual.key.size, 1)))
    else:
        sides = zip((method.key, method.value), _sides(method.residual), strict=True)
        quantized = [side for codec, side in sides if codec is not None]
        first = 0 if method.has("decoded_at_once") else method.sink_tokens
        for side in quantized:
            size = sliding_chunk(method, side) if side.policy is Policy.sliding else max(side.size, 1)
            cuts |= set(range(first, length, size))
        if not quantized:
            cuts |= set(range(first, length, CHUNK))
    if chunk is not None:
        starts = sorted(cuts)
        cuts |= {cut for start, end in itertools.pairwise(starts) for cut in range(start, end, chunk)}
    return list(itertools.pairwise(sorted(cuts)))


def forward_bounds(loaded: LoadedModel, method: Method, length: int) -> Bounds:
    """`scoring_bounds`, where adjacent chunks become forwards of up to `FORWARD` tokens if a forward may hold flushes.

    It may where a method has codecs and a residual alone and the model's attention takes a mask for each query: the
    larger products cost less than the second copies of tokens that are flushed within a forward.
    """
    bounds = scoring_bounds(method, length)
    if method.policies or method.replaces_layers or steps(method) or not masks_each_query(loaded.model):
        return bounds
    joined = bounds[:1]
    for start, end in bounds[1:]:
        first = joined[-1][0]
        joined[-1:] = [(first, end)] if end - first <= FORWARD else [joined[-1], (start, end)]
    return joined


def parallel_method(method: Method) -> Method:
    """The method with residual `none`, in the same blocks; `ConfigError` where these cut groups of tokens."""
    for codec, side in zip((method.key, method.value), _sides(method.residual), strict=True):
        group = 1 if codec is None else codec.token_group or 1
        if side.policy is Policy.sliding and side.size % group:
            does = f"blocks of {side.size} tokens, of which {method.name} quantizes {group} together"
            raise ConfigError(f"residual.size={side.size}: scoring=parallel has {does}; give a multiple")
    return dataclasses.replace(method, residual=method.residual.for_parallel_scoring())


def without_codecs(method: Method) -> Method:
    """Full precision under the residual of a method, so that both cut a text alike."""
    return Method(name="fp16", key=None, value=None, residual=method.residual, bits=None)


@torch.no_grad()
def score(
    loaded: LoadedModel, cache: KVCache, tokens: Tokens, scored_from: int, bounds: Bounds
) -> Iterator[ScoredChunk]:
    """Feed `tokens[:, start:end]` for each of `bounds` and yield the logits of the targets from `scored_from` on.

    Each query reads what it would if the tokens came one by one, wherever `bounds` cut. The last position has no
    target; feeding it matters only to statistics that span the window (`parallel`).
    """
    cache.token_by_token = True
    for start, end in bounds:
        hidden = loaded.hidden_states(tokens[:, start:end], cache)
        first, last = max(start, scored_from - 1), min(end, tokens.shape[1] - 1)
        for low in range(first, last, LOGIT_CHUNK):
            high = min(low + LOGIT_CHUNK, last)
            logits = loaded.logits(hidden[:, low - start : high - start])
            yield ScoredChunk(logits, tokens[:, low + 1 : high + 1])


def holding_method(method: Method) -> Method:
    """The method with a residual that never fills: the cache keeps full precision until it is encoded at once."""
    sides = [dataclasses.replace(side, policy=Policy.block, size=_NEVER) for side in _sides(method.residual)]
    return dataclasses.replace(method, residual=Residual(*sides))


@torch.no_grad()
def score_continuation(
    loaded: LoadedModel, cache: KVCache, blocks: Residual, tokens: Tokens, prompt: int
) -> Iterator[ScoredChunk]:
    """Logits of all targets behind a prompt, encoded in the block size of `blocks`, in an empty `holding` cache."""
    loaded.hidden_states(tokens[:, : prompt - 1], cache)
    for layer in cache.kv_layers:
        for side, residual in zip((layer.key, layer.value), _sides(blocks), strict=True):
            if side.codec is not None and side._full is not None:
                whole = residual.prefill_block is PrefillBlock.whole or residual.size == 0
                states, side._full = side._full.view, None
                side._encode(states, None if whole else residual.size)
    hidden = loaded.hidden_states(tokens[:, prompt - 1 : -1], cache)
    for chunk, targets in zip(hidden.split(LOGIT_CHUNK, 1), tokens[:, prompt:].split(LOGIT_CHUNK, 1), strict=True):
        yield ScoredChunk(loaded.logits(chunk), targets)


def _sides(residual: Residual) -> tuple[ResidualSide, ResidualSide]:
    return residual.key, residual.value


def steps(method: Method) -> bool:
    """Whether what a token reads depends on the forwards before it, so that each token needs its own forward."""
    return not method.has("several_tokens")


@dataclass(frozen=True)
class Window:
    """`context` consecutive tokens; the targets at positions `scored_from` (1 or more) to the end count."""

    tokens: Int[Tensor, " context"]
    scored_from: int

    @property
    def targets(self) -> int:
        """Number of scored tokens."""
        return int(self.tokens.numel()) - self.scored_from


def cut_windows(
    streams: Sequence[Tensor], context: int, stride: int | None = None, limit: int | None = None, bos: int | None = None
) -> list[Window]:
    """Windows over each stream, which they never cross; remainders dropped.

    `stride`: None = disjoint windows, each scoring all its tokens but the first. Else windows start every `stride`
    tokens; later ones score only their last `stride`. `bos`: the first token of every window, no target.
    """
    windows = []
    first = torch.tensor([] if bos is None else [bos], dtype=torch.long)
    room = context - first.numel()
    for stream in streams:
        for start in range(0, stream.numel() - room + 1, min(stride or room, room)):
            scored_from = 1 if stride is None or start == 0 else max(1, context - stride)
            tokens = stream[start : start + room]
            windows.append(Window(tokens if bos is None else torch.cat([first.to(tokens), tokens]), scored_from))
    if not windows:
        longest = max((int(stream.numel()) for stream in streams), default=0)
        raise DataError(f"dataset: longest text has {longest} tokens, fewer than one window: task.context={context}")
    return windows[:limit]


def evenly(windows: Sequence[Window], count: int, setting: str) -> list[Window]:
    """`count` of the windows, spread evenly over the text; `setting`: the one that gives the count."""
    if len(windows) < count:
        tokens = int(windows[0].tokens.numel()) if windows else 0
        raise DataError(f"{setting}={count}: the text has {len(windows)} passages of {tokens} tokens")
    return [windows[place] for place in np.linspace(0, len(windows) - 1, count).round().astype(int)]


def batches(windows: Sequence[Window], size: int) -> list[list[int]]:
    """Indices of windows grouped into batches of at most `size`, all with the same `scored_from`, in order."""
    groups = itertools.groupby(range(len(windows)), lambda index: windows[index].scored_from)
    runs = [list(same) for _, same in groups]
    return [run[start : start + size] for run in runs for start in range(0, len(run), size)]


class ReferenceLogProbs:
    """A memory map `[targets, vocab]` of a temporary file, written once; not `kept` beyond `budget` or the disk."""

    def __init__(self, windows: Sequence[Window], vocab: int, dtype: torch.dtype, budget: int = 2**34) -> None:
        self._starts = [0, *itertools.accumulate(window.targets for window in windows)]
        rows = self._starts[-1]
        size = rows * vocab * dtype.itemsize
        self.kept = size <= budget
        # The mapping stays valid after the file is unlinked, so a killed process leaves no file.
        with tempfile.TemporaryDirectory(prefix="kvq-reference-") as folder:
            file = Path(folder) / "logprobs"
            try:  # to have the room: writing to a sparse map on a full disk would kill the process
                with file.open("wb") as stream:
                    if self.kept and hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(stream.fileno(), 0, size)
            except OSError:
                self.kept = False
            if self.kept:
                self._rows = torch.from_file(str(file), shared=True, size=rows * vocab, dtype=dtype).view(rows, vocab)

    def _rows_of(self, window: int, offset: int, count: int) -> Tensor:
        """Rows `[count, vocab]` of a window's targets from `offset` on."""
        start = self._starts[window] + offset
        return self._rows[start : start + count]

    def write(self, indices: Sequence[int], offset: int, log_probs: LogProbs) -> None:
        """Keep the log-probabilities of the targets from `offset` on, for each window of a batch, if within budget."""
        for row, window in enumerate(indices) if self.kept else ():
            self._rows_of(window, offset, log_probs.shape[1]).copy_(log_probs[row])

    def read(self, indices: Sequence[int], offset: int, count: int) -> LogProbs:
        """The log-probabilities of `count` targets from `offset` on, for each window of a batch."""
        return torch.stack([self._rows_of(window, offset, count) for window in indices])


@dataclass
class WindowScore:
    """Sums over a window's targets, from position `first` on; `by_position`: tokens, nll, kl of each stretch."""

    window: int
    first: int = 1
    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    top1: int = 0
    by_position: dict[str, list[float]] = field(default_factory=dict)

    def add_positions(self, start: int, stretch: int, nll: Tensor, kl: Tensor) -> None:
        """Add the targets at positions from `start` on to stretches of `stretch` positions."""
        for first in range(start - start % stretch, start + len(nll), stretch):
            part = slice(max(first - start, 0), first + stretch - start)
            sums = len(nll[part]), float(nll[part].sum()), float(kl[part].sum())
            known = self.by_position.get(str(first), [0.0] * len(sums))
            self.by_position[str(first)] = [float(old + new) for old, new in zip(known, sums, strict=True)]


@dataclass
class PplResult:
    """The scores of one pass over windows, its caches' `storage`, KL by window; `stretch`: of positions, or None."""

    scores: list[WindowScore]
    storage: dict[str, float]
    kl_per_token: dict[int, list[Tensor]] = field(default_factory=dict)
    stretch: int | None = None
    _unread: dict[int, list[tuple[Tensor, Tensor | None, Tensor]]] = field(default_factory=dict, repr=False)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood in nats per scored token."""
        return sum(s.nll for s in self.scores) / sum(s.tokens for s in self.scores)

    def metrics(self) -> dict[str, float]:
        """The record's metrics, without those that compare with the baseline record."""
        tokens, compared = sum(s.tokens for s in self.scores), bool(self.kl_per_token)
        out = {"nll": self.nll, "perplexity": math.exp(min(self.nll, 700.0)), **self.storage}
        if compared:
            kl = torch.cat([part for window in sorted(self.kl_per_token) for part in self.kl_per_token[window]])
            out |= divergence_metrics(kl.double().numpy())
            out["top1_agreement"] = sum(s.top1 for s in self.scores) / tokens
        out |= {"scored_tokens": float(tokens), "windows": float(len(self.scores))}
        places = summed_positions([score.by_position for score in self.scores])
        for first, (count, losses, divergences) in places.items():
            out[f"nll[position={first}]"] = losses / count
            if compared:
                out[f"kl_mean[position={first}]"] = divergences / count
        return out

    def samples(self) -> list[dict[str, Any]]:
        """One row per window, for paired statistics."""
        compared = bool(self.kl_per_token)
        names = ["window", "tokens", "nll", *(["kl", "top1"] if compared else [])]
        names += [] if self.stretch is None else ["by_position"]
        return [{name: getattr(score, name) for name in names} for score in self.scores]

    def add(self, indices: Sequence[int], targets: Targets, log_probs: LogProbs, expected: LogProbs | None) -> None:
        """Add targets of windows, not waiting for the device; `expected`: log-probabilities to compare with."""
        nll = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double()
        kl = same = None
        if expected is not None:
            kl, same = divergence(expected, log_probs), log_probs.argmax(-1) == expected.argmax(-1)
        for row, index in enumerate(indices):
            sums = [nll[row].sum()]
            if kl is not None and same is not None:
                sums += [kl[row].double().sum(), same[row].sum().double()]
            part = nll[row], None if kl is None else kl[row], torch.stack(sums)
            self._unread.setdefault(index, []).append(part)

    def settle(self, indices: Sequence[int]) -> None:
        """Add up what the targets of these windows lost, once all of them are added."""
        for index in indices:
            score, parts = self.scores[index], self._unread.pop(index, [])
            rows = torch.stack([sums for _, _, sums in parts]).cpu().tolist() if parts else []
            for (nll, kl, _), (loss, *compared) in zip(parts, rows, strict=True):
                if self.stretch is not None:
                    over = torch.zeros_like(nll) if kl is None else kl.double()
                    score.add_positions(score.first + score.tokens, self.stretch, nll.cpu(), over.cpu())
                score.tokens += len(nll)
                score.nll += loss
                if kl is not None:
                    self.kl_per_token.setdefault(index, []).append(kl.cpu())
                    score.kl += compared[0]
                    score.top1 += int(compared[1])


def summed_positions(windows: Sequence[Mapping[str, Sequence[float]]]) -> dict[int, tuple[float, ...]]:
    """Tokens and sums of each stretch of positions over windows, by first position, in order."""
    starts = sorted({int(first) for window in windows for first in window})
    return {
        start: tuple(map(sum, zip(*(window[str(start)] for window in windows if str(start) in window), strict=True)))
        for start in starts
    }


def divergence(
    expected: Float[Tensor, "*lead targets vocab"], found: Float[Tensor, "*lead targets vocab"]
) -> Float[Tensor, "*lead targets"]:
    """KL(expected || found) of each target in nats; rounding can make that of two equal distributions negative."""
    return (expected - found).mul_(expected.exp()).sum(-1).clamp_min(0)  # torch's kl_div takes five times as long
