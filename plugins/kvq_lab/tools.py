"""`task=tools`: calls of functions, written as JSON through the quantized cache.

A prompt has answered requests, functions with the JSON schemas of their parameters, text of the data set and a request;
the answer is `{"name": ..., "arguments": {...}}`. An item is right where function and arguments are those asked for.
Parts of that are scored too, because an answer can break in several ways (`CHECKS`).

Requests come from files of the Berkeley Function Calling Leaderboard (`kvq_lab.calls`); prompts are ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jsonschema
import numpy as np

from kvq.data.text import draw_piece, encode, set_bos, split_chat
from kvq.errors import ConfigError, DataError
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks.items import (
    Items,
    Sample,
    Scored,
    batches_of,
    compare,
    mean_score,
    measure_items,
    pair_items,
    write_answers,
)
from kvq.tasks.measurement import Baseline, Measurement, Task, items_fingerprint
from kvq.tasks.reader import Ends, Reader, answer_text, check_prefill
from kvq_lab.calls import Request, Schema, read_bfcl
from kvq_lab.settings import ToolsConfig

CHECKS = ("valid_json", "schema_valid", "right_function", "right_arguments")
"""What is said of each answer, true or false."""


def first_object(text: str) -> dict[str, Any] | None:
    """The JSON object that begins at the first brace of a text; None: there is none, or it is not whole."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        parsed = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _refuse_constant(name: str) -> None:
    """Raise `ValueError` for NaN and infinities, which Python reads though they are no JSON."""
    raise ValueError(f"{name} is no JSON")


def check_answer(text: str, request: Request) -> dict[str, bool]:
    """Check an answer in each of `CHECKS`.

    - `valid_json`: its first object parses; text before and after it is no fault.
    - `schema_valid`: it names an offered function, whose schema its arguments satisfy; none that the schema lacks.
    - `right_function`: it names the function that was asked for.
    - `right_arguments`: its arguments are those that were asked for, each with an allowed value, whatever the function.
    """
    call = first_object(text)
    name, arguments = (None, None) if call is None else (call.get("name"), call.get("arguments"))
    schemas = [one.parameters for one in request.functions if one.name == name]
    return {
        "valid_json": call is not None,
        "schema_valid": bool(schemas) and satisfies(arguments, schemas[0]),
        "right_function": name == request.function,
        "right_arguments": isinstance(arguments, dict) and _arguments_fit(arguments, request.allowed, request.loose),
    }


def satisfies(value: Any, schema: Schema) -> bool:
    """Whether a value satisfies a JSON schema, with no field of an object that its schema does not list."""
    return bool(jsonschema.Draft202012Validator(_forbid_other_fields(schema)).is_valid(value))


def _forbid_other_fields(schema: Schema) -> Schema:
    """The schema with no fields of objects but those that it lists."""
    out = dict(schema)
    if "properties" in schema:
        inner = {name: _forbid_other_fields(one) for name, one in schema["properties"].items()}
        out |= {"properties": inner, "additionalProperties": False}
    if "items" in schema:
        out["items"] = _forbid_other_fields(schema["items"])
    return out


def _arguments_fit(arguments: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]], loose: bool) -> bool:
    """Whether each argument is a known one with an allowed value; those with "" allowed may be left out."""
    if not arguments.keys() <= allowed.keys():
        return False
    return all(
        any(is_allowed(arguments[name], value, loose) for value in values) if name in arguments else "" in values
        for name, values in allowed.items()
    )


def is_allowed(answer: Any, value: Any, loose: bool) -> bool:
    """Whether a value of an answer is an allowed one: numbers by value, lists in order, objects field by field.

    `loose`: strings are compared after `_normalize`.
    """
    if isinstance(value, Mapping):
        allowed = {name: one if isinstance(one, list) else [one] for name, one in value.items()}
        return isinstance(answer, Mapping) and _arguments_fit(answer, allowed, loose)
    if isinstance(value, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(value)
            and all(is_allowed(one, other, loose) for one, other in zip(answer, value, strict=True))
        )
    if isinstance(value, str):
        return isinstance(answer, str) and (_normalize(answer) == _normalize(value) if loose else answer == value)
    if isinstance(value, bool) or isinstance(answer, bool) or value is None:
        return answer is value
    return isinstance(answer, int | float) and answer == value


def _normalize(text: str) -> str:
    """Lower-case text without spaces and the signs , . / - _ * ^, with " for ' (BFCL's comparison)."""
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


# Added to the seed of a generator, so that no other use of the same seed draws the same numbers.
_RULE = 'Each request is answered by a call of one of these functions, as JSON: {"name": ..., "arguments": {...}}\n\n'


@dataclass(frozen=True)
class ToolItem:
    """One prompt: its request, and the tokens of the whole prompt."""

    request: Request
    prompt: tuple[int, ...]


def requests(inputs: Inputs) -> list[Request]:
    """All requests of the files.

    Raises:
        ConfigError: no files are given, or more shots than other requests.
        DataError: as `kvq_lab.calls.read_bfcl`.
    """
    task: ToolsConfig = inputs.config.task
    path, answers = task.path, task.answers
    if path is None or answers is None:
        raise ConfigError(
            "task=tools: needs task.path and task.answers, files of the Berkeley Function Calling Leaderboard"
        )
    items = inputs.shared("bfcl", (path, answers), lambda: read_bfcl(path, answers))
    if task.shots >= len(items):
        raise ConfigError(f"task.shots={task.shots}: task.path has {len(items)} requests, the one asked among them")
    return items


def draw_padding(inputs: Inputs, count: int) -> list[list[int]]:
    """For each of `count` items `task.padding` tokens from a random place of the dataset.

    Raises:
        DataError: no stream of the dataset is as long.
    """
    task: ToolsConfig = inputs.config.task
    if not task.padding:
        return [[] for _ in range(count)]
    whole = [set_bos(inputs.tokenizer, stream.tolist(), None) for stream in inputs.long_streams(task.padding).streams]
    streams = [stream for stream in whole if len(stream) >= task.padding]
    if not streams:
        longest = max(map(len, whole), default=0)
        raise DataError(f"task.padding={task.padding}: the longest text in the dataset has {longest} tokens")
    generators = (np.random.default_rng([0x70616464, task.seed, place]) for place in range(count))
    return [draw_piece(streams, task.padding, rng) for rng in generators]


def add_shots(task: ToolsConfig, asked: Sequence[Request], place: int) -> tuple[Request, list[Request]]:
    """Request `place` with the functions of its shots among those offered, in a drawn order, and the shots."""
    request, rng = asked[place], np.random.default_rng([0x6F726465, task.seed, place])
    others = [other for other in range(len(asked)) if other != place]
    shots = [asked[others[index]] for index in rng.permutation(len(others))[: task.shots].tolist()]
    functions = {one.name: one for shot in [*shots, request] for one in shot.functions}
    names = sorted(functions)
    offered = tuple(functions[names[index]] for index in rng.permutation(len(names)).tolist())
    return replace(request, functions=offered), shots


def prompt_parts(task: ToolsConfig, asked: Sequence[Request], place: int) -> tuple[str, str]:
    """The text before and after the padding of the prompt of request `place`."""
    request, shots = add_shots(task, asked, place)
    functions = "\n".join(function.text for function in request.functions)
    answered = [f"Request: {shot.text}\nAnswer: {shot.answer}\n\n" for shot in shots]
    return f"{_RULE}{functions}\n\n", "".join(answered) + f"Request: {request.text}\nAnswer:"


def make_items(inputs: Inputs, unequal: bool = False) -> Items[ToolItem]:
    """Batches of prompts, of equal length unless `unequal`, and skipped items with the reason.

    Raises:
        ConfigError, DataError: as `requests`, `draw_padding` and `kvq.data.text.split_chat`.
    """
    task: ToolsConfig = inputs.config.task
    tokenizer, longest = inputs.tokenizer, inputs.longest_context
    front, end = split_chat(tokenizer) if task.chat_template else ("", "")
    asked = requests(inputs)
    items, skipped = [], {}
    for place, text in enumerate(draw_padding(inputs, min(task.items, len(asked)))):
        request, (before, after) = asked[place], prompt_parts(task, asked, place)
        prompt = set_bos(tokenizer, encode(tokenizer, front + before, special=not task.chat_template), inputs.bos)
        prompt += [*text, *encode(tokenizer, ("\n\n" if text else "") + after + end, special=False)]
        if longest is not None and len(prompt) + task.max_new_tokens > longest:
            needed = len(prompt) + task.max_new_tokens
            skipped[request.name] = f"prompt and answer take {needed} tokens, the model takes {longest}"
        else:
            items.append(ToolItem(add_shots(task, asked, place)[0], tuple(prompt)))
    batches = batches_of([len(item.prompt) for item in items], task.batch_size, unequal)
    return Items([[items[index] for index in batch] for batch in batches], lambda item: item.request.name, skipped)


def stop_texts(task: ToolsConfig) -> Sequence[str]:
    """Texts at which an answer without a JSON object ends."""
    return () if task.chat_template else ("\nRequest:", "\n\n")  # end an answer without JSON


def end_test(reader: Reader, inputs: Inputs) -> Ends:
    """A function that tells whether the tokens of an answer are complete: a whole JSON object, or an end of text."""
    tokenizer = inputs.tokenizer
    over = reader.ends(tokenizer, stop_texts(inputs.config.task))

    def ends(tokens: Sequence[int]) -> bool:
        return over(tokens) or first_object(str(tokenizer.decode(list(tokens), skip_special_tokens=True))) is not None

    return ends


def answer_batch(reader: Reader, inputs: Inputs, batch: Sequence[ToolItem]) -> list[Scored]:
    """Write and check answers to prompts that are read together."""
    task: ToolsConfig = inputs.config.task

    def sample(place: int, tokens: list[int]) -> Sample:
        request, text = batch[place].request, answer_text(inputs.tokenizer, tokens, stop_texts(task))
        checks = check_answer(text, request)
        asked = {"item": request.name, "request": request.text, "function": request.function}
        right = float(checks["right_function"] and checks["right_arguments"])
        return {**asked, "allowed": dict(request.allowed), "text": text, **checks, "score": right}

    return write_answers(reader, [item.prompt for item in batch], task.max_new_tokens, end_test(reader, inputs), sample)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` where a method cannot read prompts as `task.prefill` asks; errors of `requests`."""
    check_prefill(method, inputs.config.task.prefill)
    requests(inputs)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Answer every request under `method`; a baseline is compared with item by item, also in each of `CHECKS`."""
    task: ToolsConfig = inputs.config.task
    reader = Reader.of(inputs, method)
    items = make_items(inputs, reader.can_mix_lengths)
    found = measure_items(items, lambda some: answer_batch(reader, inputs, some), task, journal, baseline, method.label)
    scored = [sample for sample in found.samples if "skipped" not in sample]
    metrics = dict(found.metrics)
    for name in CHECKS:
        metrics |= _check_share(scored, baseline, task, name)
    if baseline is not None:
        pairs = pair_items(scored, baseline.samples)
        metrics["same_answers"] = float(np.mean([mine["text"] == full["text"] for mine, full in pairs]))
    return Measurement(metrics, units_of(metrics), found.samples)


def _check_share(
    samples: Sequence[Sample], baseline: Baseline | None, task: ToolsConfig, name: str
) -> dict[str, float]:
    """The share of answers that pass one of `CHECKS`, and its difference from full precision's, tested in pairs."""
    mine = _score_by_check(samples, name)
    out = {name: mean_score(mine)}
    if baseline is not None:
        full = replace(baseline, samples=_score_by_check(baseline.samples, name), metrics={})
        tested = compare(mine, full, task, name)
        out |= {metric: tested[metric] for metric in (f"delta_{name}", f"delta_{name}_se") if metric in tested}
        out |= {f"{name}_{part}": tested[part] for part in ("lost", "gained")}
        if "p_value" in tested:
            out[f"{name}_p"] = tested["p_value"]
    return out


def _score_by_check(samples: Sequence[Sample], name: str) -> list[Sample]:
    """The answered items, each with one of `CHECKS` (1 or 0) as its score."""
    return [{"item": one["item"], "score": float(one[name])} for one in samples if "skipped" not in one]


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the prompts' texts, the padding's text and the model's context, which may skip some."""
    task: ToolsConfig = inputs.config.task
    text = inputs.long_streams(task.padding).fingerprint if task.padding else ""
    asked = requests(inputs)
    parts = ([prompt_parts(task, asked, place), asdict(one)] for place, one in enumerate(asked[: task.items]))
    return items_fingerprint(inputs, parts, text)


def texts(inputs: Inputs) -> list[str]:
    """The prompts."""
    task, tokenizer = inputs.config.task, inputs.tokenizer
    asked = requests(inputs)
    out = []
    for place, text in enumerate(draw_padding(inputs, min(task.items, len(asked)))):
        before, after = prompt_parts(task, asked, place)
        out.append(f"{before}{tokenizer.decode(text)}\n\n{after}")
    return out


TASK = Task(check, measure, fingerprint, ToolsConfig, texts)
