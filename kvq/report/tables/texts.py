"""The texts of `task=generate` beside each other, each with the place where it leaves full precision's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvq.errors import RecordError, printable
from kvq.report.tables.layout import Continuation, Row, Texts
from kvq.results import Record

TASK = "generate"
_LONGEST = 20_000
"""Characters of a text that are shown."""


def texts_of(rows: Sequence[Row], samples: Callable[[Record], list[dict[str, Any]]]) -> Texts | None:
    """The texts of the runs of a table; None where they wrote none, or their samples are gone.

    Args:
        samples: gives the stored samples of a run.
    """
    found = [(row, sample) for row in rows if (sample := _sample(row, samples)) is not None]
    full = next((sample["text"] for row, sample in found if row.baseline), None)
    if not found:
        return None
    return Texts(
        _clean(found[0][1]["prompt"]), tuple(_continuation(row, sample["text"], full) for row, sample in found)
    )


def _sample(row: Row, samples: Callable[[Record], list[dict[str, Any]]]) -> dict[str, Any] | None:
    if row.record.task != TASK or row.record.status != "done":
        return None
    try:
        found = samples(row.record)
    except RecordError:
        return None
    whole = bool(found) and all(isinstance(found[0].get(name), str) for name in ("prompt", "text"))
    return found[0] if whole else None


def _continuation(row: Row, text: str, full: str | None) -> Continuation:
    name, shown = f"{row.name}, {row.bits} bits" if row.record.bits else row.name, _clean(text)
    if row.baseline or full is None:
        return Continuation(name, "", shown, "", "")
    same = os.path.commonprefix([shown, _clean(full)])  # noqa: RUF071 - of characters, not of folders
    behind = shown[len(same) :]
    word = re.match(r"\s*\S*", behind)
    cut = word.end() if word else 0
    if shown == _clean(full):
        return Continuation(name, "the same text as full precision", shown, "", "")
    metrics = row.record.metrics
    said = f"{metrics.get('same_tokens', 0):.0f} of {metrics.get('new_tokens', 0):.0f} tokens as full precision"
    return Continuation(name, said, same, behind[:cut], behind[cut:])


def _clean(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
