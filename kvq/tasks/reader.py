"""Reading prompts and generating answers through the quantized cache; common prefixes of prompts are read once.

A prompt's last token always reads the stored cache, so that the first token of an answer, often the whole answer,
depends on the method. `Prefill` sets how the tokens before it are read. `task=generate`: continuations of a prompt in
full precision and under a method, with their bytes and repetition.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache import KVCache
from kvq.config.method import Policy
from kvq.config.tasks import GenerateConfig, Prefill
from kvq.data.rows import read_text
from kvq.data.text import encode, render_chat, set_bos
from kvq.errors import DataError, reason_of
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.load import LoadedModel
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks.measurement import Baseline, Measurement, Task, storage_metrics
from kvq.tasks.scoring import CHUNK, LOGIT_CHUNK, log_probabilities, sliding_chunk, steps

Logits = Float[Tensor, "batch vocab"]
Pick = Callable[[Logits], Int[Tensor, " batch"]]
Ends = Callable[[Sequence[int]], bool]

PADDING = 0.25
"""Largest part of a batch that may be padding; prompts that differ more are read one by one, in less time."""
PROMPT = Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")
"""Where the settings name no prompt: what the embedded models were trained to go on with, longer than any residual."""


def check_prefill(method: Method, prefill: Prefill) -> None:
    """Raise `Unsupported` for a method that cannot read a prompt in chunks, if `prefill` asks for them."""
    if prefill is Prefill.chunked:
        method.check_needs("task.prefill=chunked", "chunked_prompt")


class Reader:
    """A model that reads and answers prompts by caches of a method; `tokens_read` went through the model."""

    def __init__(self, loaded: LoadedModel, method: Method, prefill: Prefill, keep_decoded: bool = False) -> None:
        self.loaded, self.method, self.prefill, self.keep_decoded = loaded, method, prefill, keep_decoded
        self.tokens_read = 0

    @classmethod
    def of(cls, inputs: Inputs, method: Method) -> Reader:
        """The reader of a run, with its task's `prefill` and its cache's `keep_decoded`."""
        return cls(inputs.model, method, inputs.config.task.prefill, inputs.config.cache.keep_decoded)

    def ends(self, tokenizer: Any, until: Sequence[str] = ()) -> Ends:
        """Whether an answer is over: at the model's end tokens, or at one of the texts `until`."""
        return stop_at(tokenizer, end_tokens(self.loaded, tokenizer), until)

    def new_cache(self) -> KVCache:
        """An empty cache with `token_by_token` set."""
        cache = KVCache(self.loaded, self.method, self.keep_decoded)
        cache.token_by_token = True
        return cache

    @functools.cached_property
    def can_pad(self) -> bool:
        """Whether prompts of unequal length (2 tokens or more) can be read in one padded forward."""
        return self.prefill is Prefill.whole and self.new_cache().no_padding_reason is None

    @functools.cached_property
    def can_join(self) -> bool:
        """Whether prompts that were read one by one can be joined to one batch."""
        return self.new_cache().no_split_reason is None

    @property
    def can_mix_lengths(self) -> bool:
        """Whether prompts of unequal length can be answered in one batch."""
        return self.can_pad or self.can_join

    def begin_together(self, prompts: Sequence[Sequence[int]]) -> tuple[KVCache, Logits]:
        """A cache with prompts and the logits after each: padded, or one by one where that cannot be or is in vain."""
        most = max(map(len, prompts))
        padding = [most - len(prompt) for prompt in prompts]
        one_forward = self.can_pad and min(map(len, prompts)) > 1 and sum(padding) <= PADDING * most * len(prompts)
        if any(padding) and not one_forward:
            _, caches, logits = zip(*sorted(self.each(prompts), key=lambda one: one[0]), strict=True)
            return self.join(caches, logits)
        rows = [[*[0] * ahead, *prompt] for ahead, prompt in zip(padding, prompts, strict=True)]
        return self.begin(self.tensor(rows), padding if any(padding) else None)

    @staticmethod
    def join(caches: Sequence[KVCache], logits: Sequence[Float[Tensor, "1 vocab"]]) -> tuple[KVCache, Logits]:
        """Caches of one prompt each as one batch, and the logits after each."""
        return caches[0] if len(caches) == 1 else KVCache.together(caches), torch.cat(list(logits))

    @torch.no_grad()
    def begin(
        self, tokens: Int[Tensor, "batch tokens"], padding: Sequence[int] | None = None
    ) -> tuple[KVCache, Logits]:
        """A cache that holds prompts, and the logits after each; `padding`: columns before the first token of each."""
        cache = self.new_cache()
        if padding is not None:
            cache.pad(padding)
        return cache, self.prompt(cache, tokens)

    @torch.no_grad()
    def prompt(self, cache: KVCache, tokens: Int[Tensor, "batch tokens"]) -> Logits:
        """Add prompts to a cache, after what it holds, read as `prefill` says; returns the logits after each."""
        if self.prefill is Prefill.whole and tokens.shape[1] > 1:
            cache.token_by_token = False
            self._run_model(cache, tokens[:, :-1])
            cache.token_by_token, tokens = True, tokens[:, -1:]
        return self._add(cache, tokens)

    def _hidden_states(self, cache: KVCache, tokens: Int[Tensor, "batch tokens"]) -> Iterator[Tensor]:
        """Add tokens as if they came one by one; yield the hidden states of each forward."""
        start = 0
        while start < tokens.shape[1]:
            end = start + forward_tokens(cache, tokens.shape[1] - start)
            yield self._run_model(cache, tokens[:, start:end])
            start = end

    def _run_model(self, cache: KVCache, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens hidden"]:
        """Run one forward and count its tokens."""
        columns = cache.get_seq_length()
        padding = sum(min(max(one - columns, 0), tokens.shape[1]) for one in cache.padding or ())
        self.tokens_read += tokens.numel() - padding
        return self.loaded.hidden_states(tokens, cache)

    def _add(self, cache: KVCache, tokens: Int[Tensor, "batch tokens"]) -> Logits:
        """Add tokens as if they came one by one and return the logits after the last."""
        *_, hidden = self._hidden_states(cache, tokens)
        return self.loaded.logits(hidden[:, -1])

    @torch.no_grad()
    def read(self, cache: KVCache, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
        """Add tokens as if they came one by one and return the logits after each."""
        return torch.cat([self.loaded.logits(hidden) for hidden in self._hidden_states(cache, tokens)], 1)

    def tensor(self, rows: Sequence[Sequence[int]]) -> Int[Tensor, "batch tokens"]:
        """Rows of equal length on the model's device."""
        return torch.tensor([list(row) for row in rows], device=self.loaded.device)

    @torch.no_grad()
    def each(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, KVCache, Logits]]:
        """Read prompts, each as a batch of one; yields index, the cache that holds the prompt, and the logits after it.

        The order is lexicographic in tokens. Under `chunked` every common prefix is read once and forked, with the
        numbers of reading each prompt by itself. Under `whole` only equal prompts share. The caller may change caches.
        """
        order = sorted(range(len(prompts)), key=lambda index: list(prompts[index]))
        if self.prefill is Prefill.whole:
            for _, same in itertools.groupby(order, key=lambda index: list(prompts[index])):
                first, *others = same
                cache, logits = self.begin(self.tensor([prompts[first]]))
                for index in others:
                    yield index, cache.fork(), logits
                yield first, cache, logits
            return
        common = [shared(prompts[one], prompts[other]) for one, other in itertools.pairwise(order)] + [0]
        prefixes: list[tuple[int, KVCache, Logits | None]] = []
        for place, index in enumerate(order):
            prompt = prompts[index]
            start, cache, after = prefixes[-1] if prefixes else (0, self.new_cache(), None)
            cache = cache.fork() if prefixes else cache
            # Lengths of the prefixes that later prompts share with this one, shortest first.
            for length in sorted(set(itertools.takewhile(start.__lt__, itertools.accumulate(common[place:], min)))):
                after = self._add(cache, self.tensor([prompt[start:length]]))
                prefixes.append((length, cache.fork(), after))
                start = length
            if start < len(prompt):
                after = self._add(cache, self.tensor([prompt[start:]]))
            assert after is not None
            yield index, cache, after
            while prefixes and prefixes[-1][0] > common[place]:
                prefixes.pop()

    @torch.no_grad()
    def log_probs(
        self, cache: KVCache, logits: Logits, continuation: Int[Tensor, "batch tokens"]
    ) -> tuple[Float[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
        """Log-probabilities (nats) of a continuation of what `cache` holds and `logits` follow; likeliest tokens."""
        hidden = self._hidden_states(cache, continuation[:, :-1])
        more = (self.loaded.logits(piece) for states in hidden for piece in states.split(LOGIT_CHUNK, 1))
        found, likeliest, done = [], [], 0
        for here in itertools.chain([logits[:, None]], more):
            targets = continuation[:, done : done + here.shape[1], None]
            found.append(log_probabilities(here).gather(-1, targets)[..., 0])
            likeliest.append(here.argmax(-1))
            done += here.shape[1]
        return torch.cat(found, 1), torch.cat(likeliest, 1)

    @torch.no_grad()
    def write(
        self,
        cache: KVCache,
        logits: Logits,
        most: int,
        ends: Ends,
        pick: Pick | Sequence[Pick] | None = None,
        leave: Callable[[int, KVCache], None] | None = None,
    ) -> list[list[int]]:
        """Decode at most `most` tokens, until `ends(row)`; greedy unless `pick` (of all rows, or each) chooses.

        `leave` receives each row as its answer ends, with its own cache, and the others go on without it; None: all
        stay until the last has ended. Returns the new tokens of each row, up to and with the one that ended it.
        """
        rows: list[list[int]] = [[] for _ in range(logits.shape[0])]
        here, going = list(range(len(rows))), set(range(len(rows)))
        for step in range(most):
            if pick is None or callable(pick):
                tokens = (pick or greedy)(logits)
            else:
                tokens = torch.cat([pick[row](logits[place : place + 1]) for place, row in enumerate(here)])
            for place, index in enumerate(here):
                if index in going:
                    rows[index].append(int(tokens[place]))
                    if ends(rows[index]):
                        going.discard(index)
            done = not going or step == most - 1
            if leave is not None:
                kept = [place for place, index in enumerate(here) if index in going and not done]
                for place in sorted(set(range(len(here))) - set(kept)):
                    leave(here[place], cache.sequence(place) if len(here) > 1 or cache.is_parted else cache)
                if kept and len(kept) < len(here):
                    cache.batch_select_indices(torch.tensor(kept))
                    tokens, here = tokens[kept], [here[place] for place in kept]
            if done:
                break
            logits = self.read(cache, tokens[:, None])[:, -1]
        return rows


def forward_tokens(cache: KVCache, most: int) -> int:
    """How many tokens, at most `most`, the next forward may take with the results of one token per forward."""
    layers: Any = cache.kv_layers
    quantized = [side for layer in layers for side in (layer.key, layer.value) if side.codec is not None]
    if steps(cache.method) or cache.is_parted:
        return 1
    if not quantized:
        return min(most, CHUNK - cache.get_seq_length() % CHUNK)
    residuals = [side.residual for side in quantized]
    if any(one.policy is Policy.none or (one.size == 0 and not one.keeps_nothing) for one in residuals):
        return 1
    if any(one.policy is Policy.sliding for one in residuals):
        return min(most, *(sliding_chunk(cache.method, one) for one in residuals))
    # Up to where a block is flushed: within a forward, its tokens would be stored twice.
    return 1 + bisect.bisect(range(2, most + 1), 0, key=lambda count: any(s.moves(count).queries for s in quantized))


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def greedy(logits: Logits) -> Int[Tensor, " batch"]:
    """The most likely token of each row."""
    return logits.argmax(-1)


def stop_at(tokenizer: Any, end_tokens: Sequence[int], until: Sequence[str]) -> Ends:
    """Whether an answer is over: its last token is one of `end_tokens`, or its text contains one of `until`."""
    stops = [text for text in until if text]
    tail = max(map(len, stops), default=0) + 8  # a token may be one character, and a few make a character

    def ends(tokens: Sequence[int]) -> bool:
        text = tokenizer.decode(tokens[-tail:]) if stops else ""
        return tokens[-1] in end_tokens or any(stop in text for stop in stops)

    return ends


def end_tokens(loaded: LoadedModel, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    given = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    both = [tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])]
    return sorted({token for token in both if token is not None})


def answer_text(tokenizer: Any, tokens: Sequence[int], until: Sequence[str]) -> str:
    """The text of an answer, without special tokens and without its stop text and what follows it."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return functools.reduce(lambda kept, stop: kept.split(stop)[0], filter(None, until), text)


def text_of(task: GenerateConfig) -> str:
    """The text of the prompt."""
    if task.prompt_file is None:
        return PROMPT if task.prompt is None else task.prompt
    try:
        text = read_text(Path(task.prompt_file))
    except (OSError, ValueError) as error:
        raise DataError(f"task.prompt_file={task.prompt_file}: cannot be read ({reason_of(error)})") from error
    if not text.strip():
        raise DataError(f"task.prompt_file={task.prompt_file}: holds no text")
    return text


def prompt_of(inputs: Inputs) -> list[int]:
    """The tokens of the prompt."""
    task, tokenizer = inputs.config.task, inputs.tokenizer
    text = render_chat(tokenizer, text_of(task)) if task.chat_template else text_of(task)
    return set_bos(tokenizer, encode(tokenizer, text, special=not task.chat_template), inputs.bos)


def repetition(tokens: Sequence[int], length: int) -> float:
    """Share of n-grams that were there before (`seq-rep-n`, Welleck et al. 2020, arXiv 1908.04319, section 6)."""
    grams = [tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for a prompt longer than the model takes, `Unsupported` for `task.prefill`."""
    task: GenerateConfig = inputs.config.task
    check_prefill(method, task.prefill)
    prompt = len(prompt_of(inputs))
    said = f"task.max_new_tokens={task.max_new_tokens}: after a prompt of {prompt} tokens;"
    inputs.check_tokens(prompt + task.max_new_tokens, said, " together")


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """The continuation as a sample, and its cache's size; with a baseline, the tokens that both have in common."""
    task, tokenizer = inputs.config.task, inputs.tokenizer
    prompt = prompt_of(inputs)
    reader = Reader.of(inputs, method)
    cache, logits = reader.begin(reader.tensor([prompt]))
    (tokens,) = reader.write(cache, logits, task.max_new_tokens, reader.ends(tokenizer))
    cache.check_finite()
    text = answer_text(tokenizer, tokens, ())
    sample: dict[str, Any] = {"item": "prompt", "prompt": text_of(task), "tokens": tokens, "text": text}
    metrics = storage_metrics(cache, 1) | {"repetition": repetition(tokens, task.ngram)}
    metrics |= {"prompt_tokens": float(len(prompt)), "new_tokens": float(len(tokens))}
    if baseline is not None:
        (full,) = baseline.samples
        metrics["same_tokens"] = float(shared(tokens, full["tokens"]))
    return Measurement(metrics, units_of(metrics), [sample])


def fingerprint(inputs: Inputs) -> str:
    """The sha256 (hex) of the prompt's text."""
    return hashlib.sha256(text_of(inputs.config.task).encode()).hexdigest()


TASK = Task(check, measure, fingerprint, texts=lambda inputs: [text_of(inputs.config.task)])
