"""The curves of `task=limit`, which tables of runs under the same conditions are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvq.errors import RecordError
from kvq.report.comparisons import Conditions, Limit, conditions_of
from kvq.results import Record

NOTE = (
    "Bits above the limit: measured bits minus those at which per-token Gaussian coding of all heads together would "
    "lose as much (`task=limit`, spectra of this text itself). Second order, so least sure where the loss is large."
)


def limits_of(records: Sequence[Record], samples: Callable[[Record], list[dict[str, Any]]]) -> dict[Conditions, Limit]:
    """The limit under each `Conditions`, from records of `task=limit`; of several, that of most windows.

    A record whose samples cannot be read gives none.
    """
    limits: dict[Conditions, Limit] = {}
    for record in sorted(records, key=lambda one: (one.metrics.get("windows", 0.0), one.key)):
        task = record.config.get("task") or {}
        if record.task != "limit" or record.status != "done" or task.get("heads") != "joint":
            continue
        try:
            rows = [row for row in samples(record) if row.get("kind") == "curve"]
            curve = tuple(sorted((float(row["bits"]), float(row["loss"])) for row in rows))
            limits[conditions_of(record)] = Limit(curve, NOTE)
        except (RecordError, KeyError, TypeError, ValueError):
            continue
    return limits
