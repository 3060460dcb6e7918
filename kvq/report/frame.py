"""All runs of a results folder as one tidy DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvq.errors import RecordError
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import LISTED, Row, Table
from kvq.results import Store

METRICS: list[str] = LISTED["frame"]
"""Metrics that have a column; the others are in `kvq.results.Record.metrics`."""
_SETTINGS = ("scoring", "windows", "context", "stride", "max_windows", "lengths")


def load_results(folder: str | Path = "results") -> pd.DataFrame:
    """One row for each run on record, by table, full precision first.

    Args:
        folder: a results folder, with `runs/` in it.

    Returns:
        At most 60 columns. `label`: the method with what departs from its preset; `method`, `bits`, `task`, `model`,
        `dataset`, `status`, `reason`: as records have them; `protocol`: what departs from the presets of task, model
        and text; `table`: runs with the same one may be compared; `baseline`, `within_noise`, `best`, `stale`,
        `p_holm`: the verdicts of the tables; `task.*`: settings of the protocol; a column for each of `METRICS`, in the
        units of the records; `seconds`, `peak_memory_bytes`, `device`, `cpu`, `started`, `key`, `baseline_key`.

    Raises:
        RecordError: a folder without records, or that cannot be listed.
    """
    store = Store(folder)
    lines = [_line(row, table) for table in build_tables(store).tables for row in table.rows]
    if not lines:
        raise RecordError(f"load_results: no records in {store.runs}")
    return pd.DataFrame(lines)


def _line(row: Row, table: Table) -> dict[str, Any]:
    record = row.record
    known, settings = record.provenance, record.config.get("task", {})
    return {
        "label": row.name,
        **{name: getattr(record, name) for name in ("method", "bits", "task", "model", "dataset", "status", "reason")},
        "protocol": table.words,
        "table": table.slug,
        **{name: getattr(row, name) for name in ("baseline", "within_noise", "best", "stale")},
        "p_holm": row.p_value,
        **{f"task.{name}": settings.get(name) for name in _SETTINGS},
        **{name: record.metrics.get(name) for name in METRICS},
        "seconds": sum(known.wall_seconds.values()),
        **{name: getattr(known, name) for name in ("peak_memory_bytes", "device", "cpu", "started")},
        "key": record.key,
        "baseline_key": record.baseline_key,
    }
