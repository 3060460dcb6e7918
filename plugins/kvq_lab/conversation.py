"""`task=conversation`: a conversation of several turns on one cache.

A passage of the text is cut into turns. What the user says is read as a prompt on top of the turns
before, which the residual policy has quantized as far as it does; the answer is scored token by token (teacher
forcing), so that each token of it reads what a written one would. Losses, distances to full precision and bytes are
given for each turn. Other passages continue the first turn: from forks of one cache, and each from a cache of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache import KVCache
from kvq.cache.contents import bytes_together
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.statistics import delta_nll_of_samples
from kvq.tasks.measurement import Baseline, Measurement, Task, storage_metrics
from kvq.tasks.reader import Reader, check_prefill
from kvq.tasks.scoring import cut_windows, divergence, evenly, log_probabilities, without_codecs
from kvq_lab.settings import ConversationConfig
from kvq_lab.trajectory import Row, scored_rows

Tokens = Int[Tensor, "1 tokens"]


_OF_BRANCHES = ("fork_difference", "shared_bytes", "once_bytes", "separate_bytes")


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` where a method cannot read a prompt in chunks as asked, `ConfigError` for too many tokens."""
    task: ConversationConfig = inputs.config.task
    check_prefill(method, task.prefill)
    turns = max(task.turns, 2 if task.branches else 1)
    error = f"task.turns={task.turns}: {turns} turns of task.user={task.user} and task.answer={task.answer} tokens;"
    inputs.check_tokens(turns * task.turn, error, " together")


class Speaker:
    """A model that reads the turns of a conversation with caches of one method."""

    def __init__(self, inputs: Inputs, method: Method) -> None:
        task: ConversationConfig = inputs.config.task
        self.user = task.user
        self.reader = Reader.of(inputs, method)

    @torch.no_grad()
    def read_turn(self, cache: KVCache, tokens: Tokens) -> Float[Tensor, "answer vocab"]:
        """Add a turn to a cache; returns the log-probabilities at each token of its answer, in nats."""
        first = self.reader.prompt(cache, tokens[:, : self.user])
        later = self.reader.read(cache, tokens[:, self.user :])
        return log_probabilities(torch.cat([first[:, None], later[:, :-1]], 1))[0]


def storage_by_tokens(cache: KVCache) -> dict[str, float]:
    """Effective bits and bytes of a cache of one sequence, and its token counts, means over layers, keys and values.

    The tokens are those of the packed prefix and those in full precision; evicted ones are in neither.
    """
    sides = [side for layer in cache.kv_layers for side in (layer.key, layer.value)]
    tokens = {f"{kind}_tokens": [getattr(side, f"{kind}_tokens") for side in sides] for kind in ("packed", "residual")}
    storage = storage_metrics(cache, 1)
    bits = {name: storage[name] for name in ("effective_bits", "total_bytes")}
    return bits | {name: statistics.fmean(counts) for name, counts in tokens.items()}


def read_turns(speaker: Speaker, full: Speaker | None, tokens: Tokens, length: int) -> tuple[list[Row], KVCache]:
    """Read turns of `length` tokens; returns a row per turn and the last cache; `full`: full precision, for KL."""
    cache, other = speaker.reader.new_cache(), None if full is None else full.reader.new_cache()
    rows: list[Row] = []
    for turn in tokens.split(length, 1):
        logits = speaker.read_turn(cache, turn)
        answer = turn[0, speaker.user :]
        row: Row = {"nll": -float(logits.gather(-1, answer[:, None]).double().sum())}
        if full is not None and other is not None:
            row["kl"] = float(divergence(full.read_turn(other, turn), logits).double().sum())
        rows.append(row | storage_by_tokens(cache))
    cache.check_finite()
    return rows, cache


def compare_branches(speaker: Speaker, first: Tokens, others: Sequence[Tokens]) -> dict[str, float]:
    """Continuations of a first turn from forks of its cache, and each from a cache of its own.

    `fork_difference`: the largest difference between their log-probabilities of the answers' tokens. Bytes are totals
    of all continuations at their ends: `separate_bytes` of the caches that share nothing, `shared_bytes` of the forks,
    with rows that they share in memory counted once, and `once_bytes`, the separate ones less repeated copies of those
    bytes of the first turn that no later token changes.
    """
    prefix = speaker.reader.new_cache()
    speaker.read_turn(prefix, first)
    once = _unchanged_bytes(prefix, speaker.reader.method)
    forks, own_caches, difference = [], [], 0.0
    for turn in others:
        alone = speaker.reader.new_cache()
        speaker.read_turn(alone, first)
        forks.append(prefix.fork())
        own_caches.append(alone)
        answer = turn[0, speaker.user :, None]
        there, here = (speaker.read_turn(cache, turn).gather(-1, answer) for cache in (forks[-1], alone))
        difference = max(difference, float((there - here).abs().max()))
    separate = sum(cache.nbytes for cache in own_caches)
    sizes = (bytes_together(forks), separate - (len(others) - 1) * once, separate)
    return dict(zip(_OF_BRANCHES, (difference, *map(float, sizes)), strict=True))


def _unchanged_bytes(prefix: KVCache, method: Method) -> int:
    """Bytes of a cache that later tokens never change: all in full precision, else the packed prefix if it is final."""
    if method.is_full_precision:
        return prefix.nbytes
    return 0 if method.replaces_layers or prefix.recompression is not None else prefix.packed_bytes


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample per conversation: tokens, total loss, a row per turn, metrics of storage, and those of its branches."""
    task: ConversationConfig = inputs.config.task
    windows = cut_windows(inputs.tokens.streams, task.context, bos=inputs.bos)
    chosen = evenly(windows, task.conversations, "task.conversations")
    speaker = Speaker(inputs, method)
    full = None if baseline is None else Speaker(inputs, without_codecs(method))
    tokens = [speaker.reader.tensor([window.tokens.tolist()]) for window in chosen]

    def score(index: int) -> Row:
        rows, cache = read_turns(speaker, full, tokens[index], task.turn)
        others = [tokens[(index + place + 1) % len(tokens)][:, -task.turn :] for place in range(task.branches)]
        branches = compare_branches(speaker, tokens[index][:, : task.turn], others) if others else {}
        scored = {"window": index, "tokens": task.turns * task.answer, "nll": sum(row["nll"] for row in rows)}
        return {**scored, "turns": rows, **branches, "storage": storage_metrics(cache, 1)}

    conversations, samples = scored_rows(journal, "conversation", len(tokens), score)
    metrics = dict(conversations[-1]["storage"]) | turn_metrics(conversations, task.answer)
    if baseline is not None:
        metrics |= _losses_over_baseline(samples, baseline.samples, task.answer)
    return Measurement(metrics, units_of(metrics), samples)


def turn_metrics(rows: Sequence[Row], answer: int) -> dict[str, float]:
    """Losses and distances per token of the answers, in all and by turn (1, 2, …), and means over conversations."""
    metrics = {"conversations": float(len(rows)), "scored_tokens": float(sum(row["tokens"] for row in rows))}
    turns = list(zip(*(row["turns"] for row in rows), strict=True))
    sums = {"nll": "nll"} | ({"kl": "kl_mean"} if "kl" in turns[0][0] else {})
    for name, metric in sums.items():
        means = [statistics.fmean(row[name] for row in turn) / answer for turn in turns]
        metrics |= {metric: statistics.fmean(means)} | _by_turn(metric, means)
    for name in ("effective_bits", "total_bytes", "packed_tokens", "residual_tokens"):
        metrics |= _by_turn(name, [statistics.fmean(row[name] for row in turn) for turn in turns])
    if "fork_difference" in rows[0]:
        metrics |= {name: statistics.fmean(row[name] for row in rows) for name in _OF_BRANCHES}
        metrics["fork_difference"] = max(row["fork_difference"] for row in rows)
    return metrics


def _by_turn(name: str, values: Iterable[float]) -> dict[str, float]:
    return {f"{name}[turn={turn}]": value for turn, value in enumerate(values, 1)}


def _losses_over_baseline(rows: Sequence[Row], baseline: Sequence[Row], answer: int) -> dict[str, float]:
    """In all and by turn, with paired standard errors over conversations; `answer`: tokens scored in each turn."""
    pairs: dict[str, tuple[Sequence[Row], Sequence[Row]]] = {"": (rows, baseline)}
    for turn in range(len(rows[0]["turns"])):
        mine, full = (
            [{"window": row["window"], "tokens": answer, "nll": row["turns"][turn]["nll"]} for row in run]
            for run in (rows, baseline)
        )
        pairs[f"[turn={turn + 1}]"] = mine, full
    parts = (delta_nll_of_samples(*pair, block=1).metrics("delta_nll", part) for part, pair in pairs.items())
    return {name: value for metrics in parts for name, value in metrics.items()}


TASK = Task(check, measure, settings=ConversationConfig)
