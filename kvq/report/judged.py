"""The records of a store, with the tests of their items and windows computed again from the stored samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import RecordError
from kvq.report.comparisons import Comparisons
from kvq.report.labels import labelled
from kvq.results import Broken, Record, Store
from kvq.results.item_tests import judge_items
from kvq.results.metrics import is_lower_better
from kvq.results.statistics import ALPHA

_TESTS = ("p_value", "not_worse_p", "within_noise", "not_worse")


def read_records(store: Store, keys: Collection[str] | None = None) -> tuple[list[Record], list[Broken]]:
    """`labelled(store)`, with p-values and verdicts computed anew, so that one test judges all records.

    Verdicts on items follow from the samples of a run and of its full precision, and from the margin in its settings.
    Losses of windows are within noise of full precision or not as `kvq.results.noise` judges all runs of a protocol at
    once, whichever of them a table shows. Where samples cannot be paired there is no verdict. With `keys`, the verdicts
    of other protocols' records stay as measured.

    Raises:
        RecordError: the folder cannot be listed.
    """
    records, broken = labelled(store)
    known = {record.key: record for record in records}
    odd: dict[Path, str] = {}
    out = [_judged(one, known, store, odd) if keys is None or one.key in keys else one for one in records]
    return judge_losses(out, store, keys), [*broken, *(Broken(path, reason) for path, reason in odd.items())]


def judge_losses(records: Sequence[Record], store: Store, keys: Collection[str] | None = None) -> list[Record]:
    """Records with the flag `within_noise` of their losses, where it can be told; arguments as in `read_records`."""
    known = {record.key: record for record in records}
    noisy: dict[str, bool | None] = {}
    for full, group in _by_baseline(records).items():
        if full in known and (keys is None or any(record.key in keys for record in group)):
            noisy |= _within_noise(group, known[full], store)
    return [_marked(record, noisy[record.key]) if record.key in noisy else record for record in records]


def _by_baseline(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Runs that measured a loss, by the full precision that they are paired with."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.baseline_key is not None and record.status == "done" and "delta_nll" in record.metrics:
            groups[record.baseline_key].append(record)
    return groups


def _within_noise(group: Sequence[Record], full: Record, store: Store) -> dict[str, bool | None]:
    """Whether runs of a protocol are within noise of full precision, by key; None: that cannot be told."""
    found = Comparisons(store.samples_of).family((record, full) for record in group)
    p_values = {record.key: found.p.get((record.key, full.key)) for record in group}
    return {key: None if p is None else p > ALPHA for key, p in p_values.items()}


def _marked(record: Record, noisy: bool | None) -> Record:
    metrics = {name: value for name, value in record.metrics.items() if name != "within_noise"}
    return record.model_copy(update={"metrics": metrics if noisy is None else metrics | {"within_noise": float(noisy)}})


def samples_of(record: Record, store: Store, odd: dict[Path, str]) -> list[dict[str, Any]]:
    """`Store.samples_of`; samples that cannot be used are put into `odd`, with the reason.

    Raises:
        RecordError: as `Store.samples_of`.
    """
    try:
        return store.samples_of(record)
    except RecordError as error:
        path = store.samples_path(record.key)
        if path.is_file():  # a record without its samples is a choice, such as of a small archive
            odd[path] = str(error).rpartition(f"{path}: ")[2]
        raise


def _judged(record: Record, known: Mapping[str, Record], store: Store, odd: dict[Path, str]) -> Record:
    task = record.config.get("task")
    margin = task.get("margin") if isinstance(task, Mapping) else None
    if "items" not in record.metrics or record.baseline_key is None or not isinstance(margin, int | float):
        return record
    metrics = {name: value for name, value in record.metrics.items() if name not in _TESTS}
    full = known.get(record.baseline_key)
    try:
        if full is None:
            raise RecordError("no record of full precision")
        ours, theirs = (_scores(samples_of(run, store, odd)) for run in (record, full))
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
    """Names of the metrics that a run's scores are, where its samples have them."""
    return {str(row["metric"]) for row in store.samples_of(record) if "metric" in row}


def _scores(samples: list[dict[str, Any]]) -> dict[Any, float]:
    return {row["item"]: float(row["score"]) for row in samples if "skipped" not in row}
