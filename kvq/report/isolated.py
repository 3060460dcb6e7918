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
            found = {place: why for place, why in alone if why is not None} or {0: error}
        for place, why in found.items():
            skip(left[place], f"{name(left[place])}: {what}: {_line(why)}")
        left = [part for place, part in enumerate(left) if place not in found]
    return None


def _why_not(make: Callable[[list[Part]], object], part: Part) -> Exception | None:
    try:
        make([part])
    except Exception as error:
        return error
    return None


def _line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, KvqError) else f"cannot be made of it, {type(error).__name__}: {said[:120]}"


def noted(skipped: list[str] | None) -> Callable[[object, str], None]:
    """A `skip` that adds reasons to a list, once each, or raises them as `RecordError` where there is none."""

    def skip(_: object, reason: str) -> None:
        if skipped is None:
            raise RecordError(reason)
        if reason not in skipped:
            skipped.append(reason)

    return skip
