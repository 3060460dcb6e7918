"""`task=generate`: continuations of a prompt in full precision and under a method, with their bytes and repetition."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq.config.tasks import GenerateConfig
from kvq.data.rows import read_text
from kvq.data.text import encode, render_chat, set_bos
from kvq.errors import DataError, reason_of
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks.measurement import Baseline, Measurement, Task, storage_metrics
from kvq.tasks.reader import Reader, answer_text, check_prefill, shared

PROMPT = Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")
"""Where the settings name no prompt: what the embedded models were trained to go on with, longer than any residual."""


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
