"""How an answer's next token is chosen: generation settings of transformers, each either followed or refused.

`SCORES` and `SAMPLING` are the settings that are followed, by transformers' own processors of logits, in its order.
Nothing else is: neither a model's `generation_config.json` nor transformers' default `top_k` of 50.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from kvq.errors import ConfigError, did_you_mean, one_line

Make = Callable[[Any, int, list[int]], LogitsProcessor]


def _number(value: Any) -> float:
    """A finite number; raises `ValueError` for anything else."""
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError("a finite number")
    return float(value)


# Processor of each setting, from its value, the number of tokens of the prompt and the tokens that end an answer.
SCORES: dict[str, Make] = {
    "sequence_bias": lambda value, _, __: transformers.SequenceBiasLogitsProcessor(value),
    "repetition_penalty": lambda value, _, __: transformers.RepetitionPenaltyLogitsProcessor(_number(value)),
    "no_repeat_ngram_size": lambda value, _, __: transformers.NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, _, ends: transformers.NoBadWordsLogitsProcessor(value, ends),
    "min_length": lambda value, _, ends: transformers.MinLengthLogitsProcessor(value, ends),
    "min_new_tokens": lambda value, start, ends: transformers.MinNewTokensLengthLogitsProcessor(start, value, ends),
    "exponential_decay_length_penalty": lambda value, start, ends: transformers.ExponentialDecayLengthPenalty(
        value, ends, start
    ),
    "suppress_tokens": lambda value, _, __: transformers.SuppressTokensLogitsProcessor(value),
    "begin_suppress_tokens": lambda value, start, _: transformers.SuppressTokensAtBeginLogitsProcessor(value, start),
}
SAMPLING: dict[str, Make] = {
    "temperature": lambda value, _, __: transformers.TemperatureLogitsWarper(_number(value)),
    "top_h": lambda value, _, __: transformers.TopHLogitsWarper(_number(value)),
    "top_k": lambda value, _, __: transformers.TopKLogitsWarper(value),
    "top_p": lambda value, _, __: transformers.TopPLogitsWarper(_number(value)),
    "min_p": lambda value, _, __: transformers.MinPLogitsWarper(_number(value)),
    "typical_p": lambda value, _, __: transformers.TypicalLogitsWarper(_number(value)),
    "epsilon_cutoff": lambda value, _, __: transformers.EpsilonLogitsWarper(_number(value)),
    "eta_cutoff": lambda value, _, __: transformers.EtaLogitsWarper(_number(value)),
}
# Values that change nothing, as in transformers; of settings that are refused otherwise, those that ask for what is
# done here anyway.
_NEUTRAL = {
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("repetition_penalty", "temperature", "top_p", "typical_p"), 1),
}
_DONE_ANYWAY = {"use_cache": True, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1}
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
FOLLOWED = ("do_sample", "until", *_LENGTHS[:2], *SAMPLING, *SCORES)


def check_settings(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The generation settings that are followed; null is the default."""
    known = {key for key in vars(GenerationConfig()) if not key.startswith("_")} | {*FOLLOWED, *_LENGTHS}
    kept = {key: value for key, value in given.items() if value is not None}
    for key, value in kept.items():
        if key not in known:
            raise ConfigError(f"{where}.{key}={value}: unknown setting.{did_you_mean(str(key), known)}")
        anyway = value == _DONE_ANYWAY[key] if key in _DONE_ANYWAY else value is False
        if key not in (*FOLLOWED, *_LENGTHS) and not anyway:
            raise ConfigError(f"{where}.{key}={value}: cannot be followed; what can is {', '.join(FOLLOWED)}")
    lengths = [f"{key}={kept[key]}" for key in _LENGTHS if key in kept]
    if len(lengths) > 1:
        raise ConfigError(f"{where}: {' and '.join(lengths)}: give one of them")
    if not isinstance(kept.get("do_sample", False), bool):
        raise ConfigError(f"{where}.do_sample={kept['do_sample']}: true or false")
    return {key: value for key, value in kept.items() if key in (*FOLLOWED, *_LENGTHS)}


def without_effect(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an answer's settings that would act under sampling and do not, since the answer is greedy."""
    if settings.get("do_sample", float(settings.get("temperature", 0)) > 0):
        return {}
    neutral = {**_NEUTRAL, "temperature": 0}
    return {key: value for key, value in settings.items() if key in SAMPLING and value != neutral.get(key)}


class Decoder:
    """Chooses the tokens of one answer, from scores that transformers' processors change.

    Args:
        settings: generation settings that `check_settings` has passed; greedy unless `do_sample`.
        context: the prompt's tokens, which repetition counts too.
        ends: tokens that end an answer.
        seed: of the random generator, which belongs to this answer.
    """

    def __init__(self, settings: Mapping[str, Any], context: Sequence[int], ends: Sequence[int], seed: int = 0) -> None:
        self._tokens = list(context)
        self._generator = torch.Generator().manual_seed(seed) if settings.get("do_sample") else None
        self._processors = LogitsProcessorList()
        for key, make in {**SCORES, **(SAMPLING if settings.get("do_sample") else {})}.items():
            value = settings.get(key)
            if value is None or value == _NEUTRAL.get(key):
                continue
            try:
                self._processors.append(make(value, len(context), list(ends)))
            except (TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"generation_kwargs.{key}={value}: {one_line(error, 200)}") from error

    def scores(self, logits: Float[Tensor, "1 vocab"]) -> Float[Tensor, "1 vocab"]:
        """What the next token is chosen by, in double precision on the CPU: all devices use the same random numbers."""
        return self._processors(torch.LongTensor([self._tokens]), logits.double().cpu())

    def __call__(self, logits: Float[Tensor, "1 vocab"]) -> Int[Tensor, " 1"]:
        """The next token."""
        if self._generator is None:
            token = (self.scores(logits) if self._processors else logits).argmax(-1)
        else:
            probabilities = torch.softmax(self.scores(logits), -1)
            ordered, tokens = torch.sort(probabilities, dim=-1, descending=True, stable=True)
            token = tokens.gather(-1, torch.multinomial(ordered, 1, generator=self._generator))[:, 0]
        self._tokens.append(int(token))
        return token.to(logits.device)
