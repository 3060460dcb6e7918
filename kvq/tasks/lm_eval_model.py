"""A model of lm-eval that answers every request through the quantized cache.

Tokenization, truncation and stop texts are those of lm-eval's `HFLM`. A context of several requests is read once, under
`prefill=chunked` also a common prefix. Answers are written in batches; continuations are scored context by context.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from jaxtyping import Int
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.config.tasks import Prefill
from kvq.data.text import check_token_ids, set_bos
from kvq.errors import ConfigError, DataError, did_you_mean, one_line
from kvq.results.files import Journal
from kvq.results.provenance import timed
from kvq.tasks.items import read_in_batches
from kvq.tasks.measurement import storage_metrics
from kvq.tasks.reader import Logits, Pick, Reader, end_tokens, greedy, stop_at

Tokens = tuple[int, ...]
PROCESSORS: dict[str, Callable[[Any], transformers.LogitsProcessor]] = {
    "temperature": lambda value: transformers.TemperatureLogitsWarper(float(value)),
    "top_k": transformers.TopKLogitsWarper,
    "top_p": lambda value: transformers.TopPLogitsWarper(float(value)),
    "min_p": lambda value: transformers.MinPLogitsWarper(float(value)),
}
"""transformers' processors of logits by the generation setting that is their value, in its order.

No other setting is followed, neither those of a model's `generation_config.json` nor transformers' `top_k` of 50.
"""
_NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
_DONE_ANYWAY = {"use_cache": True, "num_beams": 1, "num_return_sequences": 1}
FOLLOWED = ("do_sample", "until", "max_gen_toks", "max_new_tokens", *PROCESSORS)


def check_settings(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The generation settings that are followed; null is the default; `ConfigError` for others that ask for more."""
    kept = {key: value for key, value in given.items() if value is not None}
    for key, value in kept.items():
        if key not in FOLLOWED and value != _DONE_ANYWAY.get(key, False):
            hint = did_you_mean(str(key), FOLLOWED)
            raise ConfigError(f"{where}.{key}={value}: cannot be followed; what can is {', '.join(FOLLOWED)}.{hint}")
    return {key: value for key, value in kept.items() if key in FOLLOWED}


def processors_of(settings: Mapping[str, Any]) -> transformers.LogitsProcessorList:
    """What changes the scores that the next token is drawn by, as generation settings ask."""
    asked = {key: settings[key] for key in PROCESSORS if settings.get(key) not in (None, _NEUTRAL[key])}
    return transformers.LogitsProcessorList(PROCESSORS[key](value) for key, value in asked.items())


def decoder(settings: Mapping[str, Any], seed: int = 0) -> Pick:
    """Greedy decoding, or draws in double precision on the CPU, whose random numbers belong to this answer."""
    if not settings.get("do_sample"):
        return greedy
    generator, processors = torch.Generator().manual_seed(seed), processors_of(settings)

    def draw(logits: Logits) -> Int[Tensor, " 1"]:
        probabilities = torch.softmax(processors(torch.LongTensor([[]]), logits.double().cpu()), -1)
        ordered, tokens = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        return tokens.gather(-1, torch.multinomial(ordered, 1, generator=generator))[:, 0].to(logits.device)

    return draw


class CacheLM(HFLM):
    """lm-eval's interface to a `Reader`.

    `batch_size`: contexts answered together (None: as `kvq.tasks.items` chooses); `max_length`: of a context (None: the
    model's); `journal` stores every answer at once; `seed`: of sampled answers; `copies`: rows that each context is
    read as, 2 being another batch order for a batch of one; `bos`: the token that each context begins with.
    """

    def __init__(
        self,
        reader: Reader,
        tokenizer: Any,
        batch_size: int | None = None,
        max_length: int | None = None,
        journal: Journal | None = None,
        seed: int = 0,
        copies: int = 1,
        bos: int | None = None,
    ) -> None:
        given = {"max_length": max_length, "device": str(reader.loaded.device), "add_bos_token": False}
        super().__init__(reader.loaded.model, tokenizer=tokenizer, **given)
        self.bos = bos
        self.reader, self.rows, self.copies = reader, batch_size, copies
        self.journal = Journal() if journal is None else journal
        self.seed, self.prefix = seed, ""
        self.odd: dict[str, str] = {}
        self._asked: dict[tuple[Any, ...], str] = {}
        self._checked: dict[str, dict[str, Any]] = {}
        self._until_end = end_tokens(reader.loaded, tokenizer)

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        """Tokens of a text without the begin-of-text token, which a tokenizer or chat template may have written."""
        ids = check_token_ids(self.tokenizer, super().tok_encode(string, *args, **kwargs))
        return set_bos(self.tokenizer, ids, None)

    def _context(self, item: str, tokens: Sequence[int], most: int, does: str, limit: str, further: int = 0) -> Tokens:
        """The last `most` tokens of a context after `bos`; `odd` gets what is unusual: it is empty, or cut."""
        if not tokens:
            self.odd[item] = f"empty context: {does} behind the model's first token"
            tokens = [self.prefix_token_id]
        whole = tuple(tokens) if self.bos is None else tuple(set_bos(self.tokenizer, tokens, self.bos))
        if len(whole) <= most:
            return whole
        self.odd[item] = f"{len(whole) + further} tokens, the model takes {limit}: cut on the left"
        first = whole[:1] if self.bos is not None else ()
        return (*first, *whole[len(whole) - most + len(first) :])

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding gives it."""
        for request in requests:
            self._asked[request.args] = _item_name(request)
            if request.args[0] == "":
                self.odd[_item_name(request)] = "empty context: scored behind the model's first token"
            if request.args[1] == "":
                self.odd[_item_name(request)] = "empty continuation: scored as impossible"
        sound = [request for request in requests if request.args[1] != ""]
        found = iter(super().loglikelihood(sound, disable_tqdm=disable_tqdm) if sound else [])
        return [(-1e9, False) if request.args[1] == "" else next(found) for request in requests]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        cut = [self._split(request) for request in requests]
        keys = [self._key("loglikelihood", context, continuation) for context, continuation in cut]
        options: dict[Tokens, dict[str, Tokens]] = {}
        for key, (context, continuation) in zip(keys, cut, strict=True):
            if key not in self.journal.rows:
                options.setdefault(context, {})[key] = continuation
        # Contexts that are scored one by one need not be joined.
        rows = self.rows if self.reader.prefill is Prefill.whole else 1
        with tqdm(total=len(options), desc="contexts", unit="context", leave=False, disable=None) as bar:
            contexts = list(options)
            for batch, cache, logits, cost in self._read(contexts, rows):
                for row, context in enumerate(contexts[index] for index in batch):
                    own = cache if logits.shape[0] == 1 else cache.sequence(row)
                    scored = self._score_all(context, own, logits[row : row + 1], options[context])
                    scored[0]["cost"] |= cost  # which the first option pays for
                    self.journal.add(scored)
                    bar.update()
        return [tuple(self.journal.rows[key]["sample"]["answer"]) for key in keys]

    def _split(self, request: Any) -> tuple[Tokens, Tokens]:
        """Context and continuation, the context's left end cut to what the model takes."""
        name, context, continuation = request
        if not continuation:
            text = "" if name is None else name[1]
            raise DataError(f"{self._label(name)}: its continuation {text!r:.40} merges into its context, as no token")
        count = len(continuation)
        if count > self.max_length:
            raise ConfigError(f"model.context={self.max_length}: an answer to score has {count} tokens")
        most, limit = self.max_length + 1 - count, str(self.max_length)
        return self._context(self._label(name), context, most, "scored", limit, count - 1), tuple(continuation)

    def _label(self, request: Any) -> str:
        """The item that a request's texts belong to, for messages."""
        return "a rolling window" if request is None else self._asked.get(tuple(request), "a request")

    def _score_all(
        self, context: Tokens, cache: KVCache, logits: Logits, options: Mapping[str, Tokens]
    ) -> list[dict[str, Any]]:
        """The journal's rows of all continuations of a context."""
        stored, rows = storage_metrics(cache, 1), []
        for key, continuation in options.items():
            spent = {"prompt_tokens": float(len(context))}
            with timed(spent, "score", device=self.reader.loaded.device):
                tokens, own = self.reader.tensor([continuation]), cache.fork() if len(continuation) > 1 else cache
                found, likeliest = self.reader.log_probs(own, logits, tokens)
                answer = [float(found.double().sum()), bool((likeliest == tokens).all())]
            rows.append({"item": key, "sample": {"answer": answer}, "cost": spent | stored})
            stored = {}
        return rows

    def _read(
        self, contexts: Sequence[Tokens], rows: int | None
    ) -> Iterator[tuple[list[int], KVCache, Logits, dict[str, float]]]:
        """Batches of contexts: indices, the cache, the logits after each context, and the cost of reading one."""
        reading = read_in_batches(self.reader, contexts, rows)
        if self.copies > 1:  # each context as a batch of copies, of which the first counts
            copied = ([context] * self.copies for context in contexts)
            reading = (([index], *self.reader.begin_together(batch)) for index, batch in enumerate(copied))
        while True:
            before, cost = self.reader.tokens_read, dict[str, float]()
            with timed(cost, "prefill", device=self.reader.loaded.device):
                found = next(reading, None)
            if found is None:
                return
            batch, cache, logits = found
            cost["read_tokens"] = float(self.reader.tokens_read - before)
            each = {name: value / logits.shape[0] for name, value in cost.items()}
            yield batch, cache, logits, each

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answer each request, greedily or by sampling; equal ones (`repeats`) are then draws of their own."""
        keys, drawn = [], Counter[str]()
        groups: dict[str, dict[str, tuple[Tokens, int]]] = {}
        for context, settings in map(self._prepare, requests):
            key = self._key("generate", context, settings)
            draw = drawn[key] if settings["do_sample"] else 0
            drawn[key] += 1
            keys.append(self._key("generate", context, settings, draw) if draw else key)
            if keys[-1] not in self.journal.rows:
                groups.setdefault(json.dumps(settings, sort_keys=True), {})[keys[-1]] = context, draw
        with tqdm(total=len(set(keys)), desc="answers", unit="answer", leave=False, disable=None) as bar:
            bar.update(len(set(keys) & self.journal.rows.keys()))
            for given, asked in groups.items():
                names = list(asked)
                for batch, cache, logits, cost in self._read([context for context, _ in asked.values()], self.rows):
                    own = {names[index]: asked[names[index]] for index in batch}
                    self.journal.add(self._answers(own, cache, logits, json.loads(given), cost))
                    bar.update(len(batch))
        return [self.journal.rows[key]["sample"]["answer"] for key in keys]

    def _prepare(self, request: Instance) -> tuple[Tokens, dict[str, Any]]:
        """A request's context in tokens, cut on the left to leave room for the answer, and the answer's settings."""
        text, given = request.args
        settings = self._settings(given)
        most = self.max_length - settings["max_gen_toks"]
        if most < 1:
            raise ConfigError(
                f"task.generation.max_gen_toks={settings['max_gen_toks']}: {request.task_name} leaves no room for a "
                f"prompt in the {self.max_length} tokens that the model takes"
            )
        limit = f"{most} and an answer"
        return self._context(_item_name(request), self.tok_encode(text), most, "answered", limit), settings

    def _settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check a request's generation settings and fill in lm-eval's defaults; equal ones are checked once."""
        kept = check_settings("generation_kwargs", given)
        name = repr(kept)
        if name in self._checked:
            return self._checked[name]
        try:
            settings: dict[str, Any] = dict(normalize_gen_kwargs(kept, self.max_gen_toks))
            end = self.eot_token_id
            eos = None if end is None else self.tok_decode(end, skip_special_tokens=False)
            settings["until"] = handle_stop_sequences(settings.get("until"), eos=eos)
            if settings["max_gen_toks"] < 1:
                raise ValueError(f"max_gen_toks={settings['max_gen_toks']}: at least 1")
            if settings["do_sample"] and not 0 < float(settings.get("temperature", 0.0)) < math.inf:
                raise ValueError("do_sample=true: needs a temperature above 0, such as temperature=1.0")
            json.dumps(settings)
            vocabulary = torch.zeros(1, self.model.config.get_text_config().vocab_size)
            decoder(settings)(vocabulary)
        except (IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"generation_kwargs: {one_line(error, 200)}") from error
        return self._checked.setdefault(name, settings)

    def _answers(
        self,
        batch: Mapping[str, tuple[Tokens, int]],
        cache: KVCache,
        logits: Logits,
        settings: dict[str, Any],
        cost: Mapping[str, float],
    ) -> list[dict[str, Any]]:
        """The journal's rows of a batch's answers: contexts with the number of their draw; `cost`: of reading one."""
        stored: dict[int, dict[str, float]] = {}
        ends, picks = stop_at(self.tokenizer, self._until_end, settings["until"]), []
        for context, draw in batch.values():
            named = repr((self.seed, context, draw) if draw else (self.seed, context)).encode()
            seed = int.from_bytes(hashlib.sha256(named).digest()[:7], "big")
            picks += [decoder(settings, seed) for _ in range(self.copies)]

        def leave(row: int, own: KVCache) -> None:
            stored[row] = storage_metrics(own, 1)

        seconds: dict[str, float] = {}
        with timed(seconds, "decode", device=self.reader.loaded.device):
            rows = self.reader.write(cache, logits, settings["max_gen_toks"], ends, picks, leave)
        out, each = [], seconds["decode"] / len(rows)
        for index, ((name, (context, _)), row) in enumerate(zip(batch.items(), rows[:: self.copies], strict=True)):
            text = self.tok_decode(row[:-1] if row[-1] in self._until_end else row)
            text = postprocess_generated_text(generation=text, stop=settings["until"], think_end_token=None)
            spent = {"prompt_tokens": float(len(context)), "new_tokens": float(len(row)), "decode": each}
            total = {**cost, **spent, **stored[index * self.copies]}
            out.append({"item": name, "sample": {"answer": text}, "cost": total})
        return out

    def _key(self, *request: Any) -> str:
        """Name of a request in the journal."""
        return self.prefix + hashlib.sha256(json.dumps([self.seed, *request], sort_keys=True).encode()).hexdigest()


def _item_name(request: Instance) -> str:
    """Task and document of a request, as `task/document`."""
    return f"{request.task_name}/{request.doc_id}"
