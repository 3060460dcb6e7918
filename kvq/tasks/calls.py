"""Whether an answer is a call, a call that a function takes, and the one that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from kvq.data.calls import Request, Schema

CHECKS = ("valid_json", "schema_valid", "right_function", "right_arguments")
"""What is said of each answer, true or false."""


def first_object(text: str) -> dict[str, Any] | None:
    """The JSON object that begins at the first brace of a text; None: there is none, or it is not whole."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        found = json.JSONDecoder(parse_constant=_refused).raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def judge(text: str, request: Request) -> dict[str, bool]:
    """`CHECKS` of an answer.

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
        "right_arguments": isinstance(arguments, dict) and _fits(arguments, request.allowed, request.loose),
    }


def satisfies(value: Any, schema: Schema) -> bool:
    """Whether a value satisfies a JSON schema, with no field of an object that its schema does not list."""
    return bool(jsonschema.Draft202012Validator(_closed(schema)).is_valid(value))


def _closed(schema: Schema) -> Schema:
    out = dict(schema)
    if "properties" in schema:
        inner = {name: _closed(one) for name, one in schema["properties"].items()}
        out |= {"properties": inner, "additionalProperties": False}
    if "items" in schema:
        out["items"] = _closed(schema["items"])
    return out


def _fits(given: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]], loose: bool) -> bool:
    """Whether each argument has one of its allowed values; one with "" among them may be left out."""
    if not given.keys() <= allowed.keys():
        return False
    return all(
        any(same(given[name], value, loose) for value in values) if name in given else "" in values
        for name, values in allowed.items()
    )


def same(given: Any, value: Any, loose: bool) -> bool:
    """Whether a value of an answer is an allowed one: numbers by value, lists in order, objects field by field.

    Args:
        loose: strings without case, spaces and the signs , . / - _ * ^, and with one kind of quote (BFCL's comparison).
    """
    if isinstance(value, Mapping):
        return isinstance(given, Mapping) and _fits(given, {n: _listed(v) for n, v in value.items()}, loose)
    if isinstance(value, list):
        return (
            isinstance(given, list)
            and len(given) == len(value)
            and all(same(one, other, loose) for one, other in zip(given, value, strict=True))
        )
    if isinstance(value, str):
        return isinstance(given, str) and (_plain(given) == _plain(value) if loose else given == value)
    if isinstance(value, bool) or isinstance(given, bool) or value is None:
        return given is value
    return isinstance(given, int | float) and given == value


def _listed(values: Any) -> Sequence[Any]:
    """Allowed values of a field of an object, where a file gives one alone."""
    return values if isinstance(values, list) else [values]


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
