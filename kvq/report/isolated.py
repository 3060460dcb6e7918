"""Outputs without the records that they cannot be made of, so that one such record does not stop a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvq.errors import KvqError, RecordError

Part = TypeVar("Part")
Made = TypeVar("Made")


def made_of(
    parts: Sequence[Part],
    make: Callable[[list[Part]], Made],
    name: Callable[[Part], str],
    what: str,
    skip: Callable[[Part, str], None],
) -> Made | None:
    """`make` of those parts for which it raises nothing; None where there are none.

    A record that validates may still lack a setting, or its samples may be of another task or missing. After any
    exception, each part for which `make` raises alone goes to `skip` with the reason in one line (the first part where
    none does), and `make` is called with the rest.
    """
    left = list(parts)
    while left:
        try:
            return make(left)
        except Exception as error:
            alone = enumerate(_why_not(make, part) for part in left)
            found = {place: caught for place, caught in alone if caught is not None} or {0: error}
        for place, caught in found.items():
            skip(left[place], f"{name(left[place])}: {what}: {line(caught)}")
        left = [part for place, part in enumerate(left) if place not in found]
    return None


def _why_not(make: Callable[[list[Part]], object], part: Part) -> Exception | None:
    try:
        make([part])
    except Exception as error:
        return error
    return None


def line(error: Exception) -> str:
    """Why something cannot be made, in one line."""
    return " ".join(str(error).split()) if isinstance(error, KvqError) else f"cannot be made of it, {why(error)}"


def why(error: Exception) -> str:
    """The kind of an error and what it says, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def noted(skipped: list[str] | None) -> Callable[[object, str], None]:
    """A `skip` that adds reasons to a list, once each, or raises them as `RecordError` where there is none."""

    def skip(_: object, reason: str) -> None:
        if skipped is None:
            raise RecordError(reason)
        if reason not in skipped:
            skipped.append(reason)

    return skip
