"""A record in the terms of Weights & Biases: name, tags, configuration, summary."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvq.report.labels import label, model_name, protocol, protocol_departures
from kvq.results import Record
from kvq.results.record import dump_record

_LONGEST_GROUP = 100
_MULTIRUN = ("-m", "--multirun")


class Entry(NamedTuple):
    """A run as a tracker names it; `id` follows from the record's key, `digest` from all of the record."""

    id: str
    digest: str
    name: str
    group: str | None
    job_type: str
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    summary: Mapping[str, float]


def entry_of(record: Record, group: str | None = None) -> Entry:
    """Describe a run.

    Args:
        record: a finished run.
        group: what it belongs to; None = the sweep whose command made it, where it was one.
    """
    fixed = "" if record.baseline_key is None else "fixed rate"
    own = label(record)
    name = " ".join(word for word in (own, record.bits or fixed) if word)
    model, words = model_name(record.model), ", ".join(protocol_departures(record))
    task = f"{record.task} ({words})" if words else record.task
    return Entry(
        id=record.key[:32],
        digest=hashlib.sha256(dump_record(record)).hexdigest(),
        name=f"{name} · {model} · {record.dataset} · {task}"[:128],
        group=group if group is not None else sweep_of(record.provenance.command),
        job_type=record.task[:64],
        tags=tuple(
            dict.fromkeys(word[:64] for word in (own, record.method, model, record.dataset, record.status) if word)
        ),
        config={
            "key": record.key,
            "baseline_key": record.baseline_key,
            "task": record.task,
            "model": record.model,
            "dataset": record.dataset,
            "label": own,
            "protocol": protocol(record),
            "method": record.method,
            "bits": record.bits,
            "status": record.status,
            "reason": record.reason,
            "settings": record.config,
            "units": record.units,
            "versions": record.versions,
            "provenance": record.provenance.model_dump(mode="json"),
        },
        summary=dict(record.metrics),
    )


def sweep_of(command: str) -> str | None:
    """Name of the sweep that a command was, from the command alone; None for a single run."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:
        words = command.split()[1:]
    if not any(word in _MULTIRUN or word.startswith("+experiment=") for word in words):
        return None
    text = " ".join(word for word in words if word not in _MULTIRUN)
    plain = "".join("-" if character in "/\\#?%:" else character for character in text)
    if len(plain) > _LONGEST_GROUP:
        plain = f"{plain[:_LONGEST_GROUP]}… {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return plain or None


def sample_table(rows: Sequence[Mapping[str, Any]], most: int) -> tuple[list[str], list[list[Any]]]:
    """Columns and the first `most` rows of a run's samples; what is not a number or text is written as JSON."""
    kept = rows[:most]
    columns = list(dict.fromkeys(name for row in kept for name in row))
    return columns, [[_plain(row.get(name)) for name in columns] for row in kept]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)
