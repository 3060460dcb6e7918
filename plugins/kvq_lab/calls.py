"""Requests that one call of a function answers: the functions offered, the right calls, and files of such requests.

Files are those of the Berkeley Function Calling Leaderboard (BFCL), categories in which one call answers one request.
Format: the repository ShishirPatil/gorilla, folder `bfcl_eval/data`, versions 3 and 4: a file of requests, and one of
the same name in `possible_answer`. Read are `simple` (of Python), `multiple` and their `live` forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from kvq.data.rows import read_text
from kvq.errors import DataError, reason_of

Schema = dict[str, Any]
"""A JSON schema."""


@dataclass(frozen=True)
class Function:
    """A function offered in a prompt; `parameters`: the JSON schema of the object of its arguments."""

    name: str
    description: str
    parameters: Schema

    @property
    def text(self) -> str:
        """Name, description and parameters as one line of JSON."""
        return json.dumps(vars(self), ensure_ascii=False)


@dataclass(frozen=True)
class Request:
    """A request, and the call that answers it.

    Attributes:
        name: name of the item in the file.
        text: the user's request.
        functions: the functions that the prompt offers.
        function: name of the function to call.
        allowed: the values that each argument may have, in the form of BFCL's answers: "" among them says that the
            argument may be left out, and the fields of an object have lists of allowed values too.
        loose: strings are compared without case, spaces and punctuation, as BFCL compares them.
    """

    name: str
    text: str
    functions: tuple[Function, ...]
    function: str
    allowed: Mapping[str, list[Any]]
    loose: bool = False

    @property
    def answer(self) -> str:
        """The JSON of a right call, with the first allowed values; arguments that may be left out are."""
        arguments = {name: _right_value(values[0]) for name, values in self.allowed.items() if "" not in values}
        return json.dumps({"name": self.function, "arguments": arguments}, ensure_ascii=False)


def _right_value(value: Any) -> Any:
    """An argument's value with the first allowed value for each field of an object, at any depth."""
    if isinstance(value, Mapping):
        return {name: _right_value(values[0] if isinstance(values, list) else values) for name, values in value.items()}
    return [_right_value(entry) for entry in value] if isinstance(value, list) else value


TYPES = {name: name for name in ("string", "integer", "number", "boolean", "array", "object", "null")}
TYPES |= {"dict": "object", "float": "number", "tuple": "array", "list": "array", "bool": "boolean"}
"""Their types as those of JSON schemas; `any` is no restriction. Those of Java and JavaScript are refused."""
# What is kept of a schema, as it is: nothing that refers to another document.
_KEPT = ("description", "enum", "default", "format", "required", "minimum", "maximum", "minItems", "maxItems")


class _BadRow(Exception):
    """A line of a file that is refused, with the reason."""


def read_bfcl(path: str, answers: str) -> list[Request]:
    """The requests of a file, in its order, and the calls that are right."""
    known: dict[str, Any] = {}
    for place, row in _read_objects("task.answers", answers):
        known[str(row.get("id"))] = place, row.get("ground_truth")
    out: list[Request] = []
    names: set[str] = set()
    for place, row in _read_objects("task.path", path):
        try:
            request = _parse_request(row, known)
            if request.name in names:
                raise _BadRow(f"{request.name} once more")
        except _BadRow as error:
            raise DataError(f"task.path={path}: line {place}: {error}") from error
        names.add(request.name)
        out.append(request)
    if not out:
        raise DataError(f"task.path={path}: holds no requests")
    return out


def _read_objects(setting: str, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a file, one to a line, each with the number of its line."""
    try:
        lines = read_text(Path(path).expanduser()).split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{setting}={path}: cannot be read ({reason_of(error)})") from error
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{setting}={path}: line {place}: no JSON ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            raise DataError(f"{setting}={path}: line {place}: an object with an id is expected")
        yield place, row


def _parse_request(row: dict[str, Any], known: dict[str, Any]) -> Request:
    name, text = row["id"], _question_text(row.get("question"))
    if not isinstance(offered := row.get("function"), list) or not offered:
        raise _BadRow("no list of functions; requests of several turns (multi_turn) are not supported")
    functions = tuple(_parse_function(one) for one in offered)
    if name not in known:
        raise _BadRow(f"task.answers has no answer to {name}")
    place, truth = known[name]
    where = f"its answer, line {place} of task.answers"
    if not isinstance(truth, list) or not all(isinstance(call, dict) and len(call) == 1 for call in truth):
        raise _BadRow(f"{where}: ground_truth is a list of {{function: arguments}}")
    if len(truth) != 1:
        raise _BadRow(f"{where}: {len(truth)} calls; requests of several calls (parallel) are not supported")
    [(function, allowed)] = truth[0].items()
    if function not in {one.name for one in functions}:
        raise _BadRow(f"{where}: calls {function}, which is not offered")
    if not isinstance(allowed, dict) or not all(isinstance(values, list) for values in allowed.values()):
        raise _BadRow(f"{where}: each argument has a list of allowed values")
    return Request(name, text, functions, function, allowed, loose=True)


def _question_text(question: Any) -> str:
    """The text of the messages of a request's only turn, in order, joined by newlines."""
    if not isinstance(question, list) or not all(isinstance(turn, list) for turn in question):
        raise _BadRow("question is a list of turns, each a list of messages")
    if len(question) != 1:
        raise _BadRow(f"{len(question)} turns; requests of several turns (multi_turn) are not supported")
    texts = [message["content"] for message in question[0] if isinstance(message, dict) and "content" in message]
    if not texts or len(texts) < len(question[0]) or not all(isinstance(words, str) for words in texts):
        raise _BadRow("a message is an object with a text as its content")
    return "\n".join(texts)


def _parse_function(content: Any) -> Function:
    if not isinstance(content, dict) or not isinstance(name := content.get("name"), str):
        raise _BadRow("a function has a name")
    if not isinstance(about := content.get("description", ""), str):
        raise _BadRow(f"the description of {name} is no text")
    parameters = convert_schema(content.get("parameters"), name)
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise _BadRow(f"the parameters of {name} are no JSON schema: {error.message}") from error
    return Function(name, about, parameters)


def convert_schema(content: Any, name: str) -> Schema:
    """The JSON schema of parameters in BFCL's form. Raises: _BadRow: a type that it lacks; `name` says where."""
    if not isinstance(content, dict):
        raise _BadRow(f"the parameters of {name}: a schema is an object")
    kind = content.get("type", "any")
    if kind != "any" and kind not in TYPES:
        raise _BadRow(f"the parameters of {name}: type {kind!r} is none of Python's; simple and multiple are supported")
    out: Schema = {} if kind == "any" else {"type": TYPES[kind]}
    if isinstance(inner := content.get("properties"), dict):
        out["properties"] = {field: convert_schema(one, name) for field, one in inner.items()}
    if "items" in content:
        out["items"] = convert_schema(content["items"], name)
    return out | {field: content[field] for field in _KEPT if field in content}
