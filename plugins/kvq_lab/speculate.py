"""`task=speculate`: greedy speculative decoding by one model whose draft, or whose target, reads a quantized cache.

Setting: QuantSpec (2502.10424): the same weights, the draft's cache quantized and the target's in full precision;
`task.drafts=full` is the other way round. A round drafts up to `task.length` tokens, the target reads them at once and
keeps those that it would have written, and one of its own. The text is the target's greedy text, which is checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvq.cache import KVCache
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks.measurement import Baseline, Measurement, Task, storage_metrics
from kvq.tasks.reader import Ends, Reader, shared
from kvq.tasks.scoring import without_codecs
from kvq_lab.settings import Drafts, SpeculateConfig
from kvq_lab.trajectory import Row, check, cut_passages, scored_rows, standard_error


@dataclass
class Rounds:
    """A text written in rounds.

    Attributes:
        tokens: the text.
        drafted: number of tokens drafted in each round.
        accepted: number of those that the target would have written, in each round.
    """

    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def per_forward(self) -> float:
        """Mean accepted length: accepted drafts and the target's token of a round; an end may cut off the last ones."""
        return 1 + sum(self.accepted) / max(len(self.accepted), 1)


class Decoder:
    """Draft or target: a cache that holds all of a text but its last token."""

    def __init__(self, reader: Reader, prompt: Sequence[int]) -> None:
        self.reader = reader
        self.cache, self.logits = reader.begin(reader.tensor([prompt]))

    def try_tokens(self, tokens: Sequence[int]) -> tuple[KVCache, list[int]]:
        """Read `tokens` with a copy of the cache: the copy, and the token that would be written after each of them."""
        cache = self.cache.fork()
        return cache, self.reader.read(cache, self.reader.tensor([tokens]))[0].argmax(-1).tolist()

    def draft(self, last: int, count: int) -> list[int]:
        """Read the last token into the cache and return the `count` greedy tokens that a fork of it writes next."""
        self.logits = self.reader.read(self.cache, self.reader.tensor([[last]]))[:, -1]
        (tokens,) = self.reader.write(self.cache.fork(), self.logits, count, lambda tokens: False)
        return tokens

    def add(self, tokens: Sequence[int]) -> None:
        """Read tokens into the cache; their logits are dropped."""
        if tokens:
            self.reader.read(self.cache, self.reader.tensor([tokens]))


@torch.no_grad()
def speculate(target: Decoder, draft: Decoder, most: int, length: int, ends: Ends) -> Rounds:
    """Write a text of at most `most` tokens in rounds of up to `length` drafted tokens."""
    text = [int(target.logits[0].argmax())]
    rounds = Rounds(text)
    while len(text) < most and not ends(text):
        last = text[-1]
        guessed = draft.draft(last, min(length, most - len(text)))
        ahead, sure = target.try_tokens([last, *guessed])
        kept = shared(guessed, sure)
        rounds.drafted.append(len(guessed))
        rounds.accepted.append(kept)
        if kept == len(guessed):
            target.cache = ahead
        else:
            target.add([last, *guessed[:kept]])
        draft.add(guessed[:kept])
        for token in (*guessed[:kept], sure[kept]):
            if len(text) < most and not ends(text):
                text.append(token)
    return rounds


def measure_speculate(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """A sample for each passage: its text, drafted and accepted tokens by round, whether it is the target's own."""
    task: SpeculateConfig = inputs.config.task
    readers = [Reader.of(inputs, one) for one in (method, without_codecs(method))]
    draft, target = readers if task.drafts is Drafts.method else readers[::-1]
    ends = target.ends(inputs.tokenizer)
    prompts = cut_passages(inputs)

    def score(index: int) -> Row:
        cache, logits = target.begin(target.tensor([prompts[index]]))
        (plain,) = target.write(cache, logits, task.new_tokens, ends)
        sides = Decoder(target, prompts[index]), Decoder(draft, prompts[index])
        rounds = speculate(*sides, task.new_tokens, task.length, ends)
        quantized = sides[1 if task.drafts is Drafts.method else 0].cache
        quantized.check_finite()
        made: Row = {"tokens": rounds.tokens, "equal": rounds.tokens == plain}
        made |= {"drafted": rounds.drafted, "accepted": rounds.accepted, "per_forward": rounds.per_forward}
        return made | {"storage": storage_metrics(quantized, 1)}

    rows, samples = scored_rows(journal, "passage", len(prompts), score)
    metrics = dict(rows[-1]["storage"]) | acceptance_metrics(rows)
    return Measurement(metrics, units_of(metrics), samples)


def acceptance_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Accepted share of drafted tokens, tokens per forward, with standard errors; share of texts equal to greedy."""
    drafted, accepted = ([sum(row[name]) for row in rows] for name in ("drafted", "accepted"))
    shares = [kept / count for kept, count in zip(accepted, drafted, strict=True) if count]
    speeds = [row["per_forward"] for row in rows if row["drafted"]]
    metrics = {"passages": float(len(rows)), "equal_texts": statistics.fmean(row["equal"] for row in rows)}
    for name, whole, parts in (
        ("acceptance", sum(accepted) / max(sum(drafted), 1), shares),
        ("tokens_per_forward", 1 + sum(accepted) / max(sum(len(row["drafted"]) for row in rows), 1), speeds),
    ):
        metrics[name] = whole
        if len(parts) > 1:
            metrics[f"{name}_se"] = standard_error(parts)
    return metrics


TASK = Task(check, measure_speculate, settings=SpeculateConfig)
