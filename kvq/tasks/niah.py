"""`task=niah`: needles in a haystack, found through the quantized cache.

`single`: one needle at each depth of prompts of each length, exact match. `distractors` (nsn): further needles of the
same form, of which one is asked for; an answer is a hit, a wrong needle, a mixture of several, or something else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.config.tasks import NiahConfig, NiahMode
from kvq.data.text import Needle, TokenData, build_needle_prompt, draw_needles, draw_piece, encode, set_bos, split_chat
from kvq.errors import DataError
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.statistics import flips, mcnemar
from kvq.tasks.items import Items, Sample, Scored, batches_of, by_part, measure_items, pair_items, write_answers
from kvq.tasks.measurement import Baseline, Measurement, Task, decoded
from kvq.tasks.reader import Reader, answer_text, check_prefill

# Added to the seed of the items' generator, so that no other use of the same seed draws the same numbers.
SHORTEST_PIECE = 2
"""With pieces of one character, 87% of random digit strings would count as mixtures."""


@dataclass(frozen=True)
class NiahItem:
    """One prompt. `needles[0]` is asked for; `depths[i]` is the depth of `needles[i]`."""

    name: str
    length: int
    depth: float
    needles: tuple[Needle, ...]
    prompt: tuple[int, ...]


def haystack(inputs: Inputs) -> TokenData:
    """The dataset as token streams; of documents, each as long as the longest prompt."""
    return inputs.long_streams(max(inputs.config.task.lengths))


def make_items(inputs: Inputs) -> list[NiahItem]:
    """All items, with equal lengths together; each depends only on its length, depth, repeat and the seed."""
    task: NiahConfig = inputs.config.task
    tokenizer, longest = inputs.tokenizer, max(task.lengths)
    whole = [set_bos(tokenizer, stream.tolist(), None) for stream in haystack(inputs).streams]

    def plain(text: str) -> list[int]:
        return encode(tokenizer, text, special=False)

    before, after = split_chat(tokenizer) if task.chat_template else ("", "")
    start = set_bos(tokenizer, plain(before), inputs.bos)
    streams = [stream for stream in whole if len(stream) >= longest - len(start)]
    if not streams:
        found = max((len(stream) for stream in haystack(inputs).streams), default=0)
        raise DataError(f"task.lengths={task.lengths}: the longest haystack in the dataset has {found} tokens")
    items = []
    for length, (place, depth) in itertools.product(task.lengths, enumerate(task.depths)):
        for repeat in range(task.repeats):
            rng = np.random.default_rng([0x6E696168, task.seed, length, place, repeat])  # apart from other draws
            room = length - len(start)
            text = draw_piece(streams, room, rng)
            needles = draw_needles(rng, task.planted, task.digits)
            if task.needle is not None and task.question is not None:
                values = [needle.value if task.answer is None else task.answer for needle in needles]
                pairs = zip(needles, values, strict=True)
                needles = [Needle(needle.key, value, task.needle, task.question) for needle, value in pairs]
            depths = [depth, *rng.uniform(size=len(needles) - 1).tolist()]
            prompt = build_needle_prompt(text, needles, depths, room, plain, after)
            name = f"length={length} depth={depth:g} repeat={repeat}"
            items.append(NiahItem(name, length, depth, tuple(needles), (*start, *prompt)))
    return items


def extract(text: str, value: str) -> str:
    """The value in an answer: its first number for numeric values; else the value if the text has it, or the text."""
    if value.isdecimal():
        found = re.search(r"\d+", text)
        return found[0] if found else text.strip()
    return value if value.casefold() in text.casefold() else text.strip()


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for prompts longer than the model takes, `Unsupported` for `task.prefill`."""
    task: NiahConfig = inputs.config.task
    check_prefill(method, task.prefill)
    inputs.check_tokens(max(task.lengths) + 1, f"task.lengths={task.lengths}:", " tokens, answer included")


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Ask for every needle under `method`; a baseline is compared with item by item."""
    config = inputs.config
    task: NiahConfig = config.task
    reader = Reader.of(inputs, method)
    longest, skipped, batches, every = inputs.longest_context, {}, list[list[NiahItem]](), make_items(inputs)
    for length in task.lengths:
        fit = []
        for item in (item for item in every if item.length == length):
            needed = len(item.prompt) + answer_tokens(item, task, inputs)
            if longest is not None and needed > longest:
                skipped[item.name] = f"prompt and answer take {needed} tokens, the model takes {longest}"
            else:
                fit.append(item)
        lengths = [len(item.prompt) for item in fit]
        batches += [[fit[index] for index in batch] for batch in batches_of(lengths, task.batch_size, unequal=False)]
    items = Items(batches, lambda item: item.name, skipped)
    found = measure_items(items, lambda batch: ask(reader, inputs, batch), task, journal, baseline, method.label)
    scored = [sample for sample in found.samples if "skipped" not in sample]
    more: dict[str, float] = {}
    for part in ("length", "depth"):
        more |= by_part(scored, part, "accuracy")
    if task.mode is NiahMode.distractors:
        more |= _outcomes(scored, baseline)
        flat = [item for batch in items.batches for item in batch]
        rng = np.random.default_rng([0x72616E64, task.seed])  # apart from the items' draws
        rates = [random_rate([needle.value for needle in item.needles], rng, 50) for item in flat]  # strings
        more["bit_mixing_random"] = float(np.mean(rates))
    metrics = found.metrics | more
    return Measurement(metrics, units_of(metrics), found.samples)


def answer_tokens(item: NiahItem, task: NiahConfig, inputs: Inputs) -> int:
    """New tokens for an answer: those of the value, and two more to see that the answer ends."""
    if task.max_new_tokens is not None:
        return task.max_new_tokens
    return len(inputs.tokenizer.encode(item.needles[0].answer, add_special_tokens=False)) + 2


def ask(reader: Reader, inputs: Inputs, batch: Sequence[NiahItem]) -> list[Scored]:
    """Answers to prompts of equal length, as one batch."""
    task: NiahConfig = inputs.config.task
    tokenizer, most = inputs.tokenizer, max(answer_tokens(item, task, inputs) for item in batch)
    ends = reader.ends(tokenizer, ["\n"])

    def sample(place: int, tokens: list[int]) -> Sample:
        item, text = batch[place], answer_text(tokenizer, tokens, ["\n"])
        planted = [needle.value for needle in item.needles]
        answer = extract(text, planted[0])
        outcome = classify(answer, planted[0], planted)
        asked = {"item": item.name, "length": item.length, "depth": item.depth, "key": item.needles[0].key}
        asked |= {"value": planted[0], "others": planted[1:]}
        return asked | {"answer": answer, "text": text, "outcome": outcome, "score": float(outcome == "hit")}

    return write_answers(reader, [item.prompt for item in batch], most, ends, sample, stay=True)


def _outcomes(samples: Sequence[Sample], baseline: Baseline | None) -> dict[str, float]:
    """Shares of the outcomes, overall, by length and by depth, and whether mixtures became more or fewer."""
    out: dict[str, float] = {}
    for outcome in ("hit", "wrong_needle", "bit_mixing", "other"):
        marked: list[dict[str, Any]] = [sample | {"is": sample["outcome"] == outcome} for sample in samples]
        out[outcome] = float(np.mean([sample["is"] for sample in marked]))
        for part in ("length", "depth"):
            out |= by_part(marked, part, outcome, "is")
    if baseline is not None:
        pairs = [[one["outcome"] == "bit_mixing" for one in pair] for pair in pair_items(samples, baseline.samples)]
        out["bit_mixing_p"] = mcnemar(*flips(*np.array(pairs).T))
    return out


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the haystack, and the model's context where it may cut answers; needles follow from settings."""
    task: NiahConfig = inputs.config.task
    text, longest = haystack(inputs).fingerprint, inputs.longest_context
    tight = longest is not None and longest - max(task.lengths) < (task.max_new_tokens or 4 * task.digits + 8)
    return f"{text} in {longest} tokens" if tight else text


def is_mixture(answer: str, planted: Sequence[str]) -> bool:
    """Whether `answer` is none of `planted` but splits into pieces (2 characters or more) of two or more of them."""
    if answer in planted:
        return False
    # After each position: the one value that all pieces so far can come from, or None where two or more are needed.
    sources_at: list[set[int | None]] = [set() for _ in range(len(answer) + 1)]
    for end in range(SHORTEST_PIECE, len(answer) + 1):
        for start in range(end - SHORTEST_PIECE + 1):
            sources = {index for index, value in enumerate(planted) if answer[start:end] in value}
            if not sources:
                continue
            if start == 0:
                sources_at[end] |= sources
            for source in sources_at[start]:
                sources_at[end] |= {source if source == index else None for index in sources}
    return None in sources_at[len(answer)]


def classify(answer: str, wanted: str, planted: Sequence[str]) -> str:
    """The class of `answer` where `wanted` was asked for and the prompt contained the values `planted`."""
    if answer == wanted:
        return "hit"
    if answer in planted:
        return "wrong_needle"
    return "bit_mixing" if is_mixture(answer, planted) else "other"


def random_rate(planted: Sequence[str], rng: np.random.Generator, draws: int) -> float:
    """Fraction of random numbers, with as many digits as the first of `planted`, that count as mixtures of them."""
    digits = len(planted[0])
    drawn = rng.integers(10 ** (digits - 1), 10**digits, size=draws)
    return sum(is_mixture(str(number), planted) for number in drawn.tolist()) / draws


TASK = Task(check, measure, fingerprint, texts=lambda inputs: decoded(inputs, haystack(inputs).streams))
