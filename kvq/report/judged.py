"""The records of a store, with the tests of their items computed again from the stored samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from kvq.errors import RecordError
from kvq.report.labels import labelled
from kvq.results import Broken, Record, Store
from kvq.results.item_tests import judge_items
from kvq.results.metrics import is_lower_better

_TESTS = ("p_value", "not_worse_p", "within_noise", "not_worse")


def read_records(store: Store, keys: Collection[str] | None = None) -> tuple[list[Record], list[Broken]]:
    """`labelled(store)`, with p-values and verdicts of items computed anew, so that one test judges all records.

    Verdicts on items follow from the samples of a run and of its full precision, and from the margin in its settings;
    where samples cannot be paired there is no verdict. With `keys`, the verdicts of other records stay as measured.

    Raises:
        RecordError: the folder cannot be listed.
    """
    records, broken = labelled(store)
    known = {record.key: record for record in records}
    return [_judged(one, known, store) if keys is None or one.key in keys else one for one in records], broken


def _judged(record: Record, known: Mapping[str, Record], store: Store) -> Record:
    task = record.config.get("task")
    margin = task.get("margin") if isinstance(task, Mapping) else None
    if "items" not in record.metrics or record.baseline_key is None or not isinstance(margin, int | float):
        return record
    metrics = {name: value for name, value in record.metrics.items() if name not in _TESTS}
    full = known.get(record.baseline_key)
    try:
        if full is None:
            raise RecordError("no record of full precision")
        ours, theirs = (_scores(store.samples_of(run)) for run in (record, full))
        if ours.keys() != theirs.keys():
            raise RecordError("other items were scored")
        pairs = np.array([(ours[item], theirs[item]) for item in ours], dtype=np.float64).reshape(-1, 2)
        floor = full.metrics.get("noise_flips", 0.0)
        if any(map(is_lower_better, _counted(record, store))):
            pairs = -pairs
        metrics |= judge_items(pairs[:, 0], pairs[:, 1], margin=margin, noise_flips=floor)
    except (RecordError, KeyError, TypeError, ValueError):
        pass
    return record.model_copy(update={"metrics": metrics})


def _counted(record: Record, store: Store) -> set[str]:
    """Names of the metrics behind a run's scores, where its samples have them."""
    return {str(row["metric"]) for row in store.samples_of(record) if "metric" in row}


def _scores(samples: list[dict[str, Any]]) -> dict[Any, float]:
    return {row["item"]: float(row["score"]) for row in samples if "skipped" not in row}
