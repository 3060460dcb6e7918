"""Requests that one call of a function answers: the functions that are offered, and the calls that are right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
"""A JSON schema."""


@dataclass(frozen=True)
class Function:
    """A function as it is offered; `parameters`: the JSON schema of the object of its arguments."""

    name: str
    description: str
    parameters: Schema

    @property
    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(
            {"name": self.name, "description": self.description, "parameters": self.parameters}, ensure_ascii=False
        )


@dataclass(frozen=True)
class Request:
    """A request, and the call that answers it.

    Attributes:
        name: of the item.
        text: what is asked.
        functions: those offered.
        function: the name of the one to call.
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


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as an answer writes it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def allowing(arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The form of `Request.allowed` for one value of each argument."""
    return {name: [_form(value)] for name, value in arguments.items()}


def _form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return allowing(value)
    return [_form(entry) for entry in value] if isinstance(value, list) else value
