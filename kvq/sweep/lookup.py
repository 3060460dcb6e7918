"""Lookup of finished runs without importing torch, so that repeating a sweep is fast.

Only runs whose key follows from local files are looked up here: perplexity of an embedded or local model on one stream
of text, with a method that is not calibrated. `kvq.runner` handles all others, and those with anything left to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvq.config import Config, Loader, PplConfig, full_precision
from kvq.config.identity import canonical
from kvq.config.run import trained_with_bos
from kvq.data.rows import joined_text, text_fingerprint
from kvq.errors import KvqError
from kvq.models.folder import folder_fingerprint, folder_writes_bos
from kvq.results import Record, Store, is_stale, run_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvq.config import DatasetConfig


def run(config: Config, words: Callable[[], Sequence[str] | None] = lambda: None) -> Record:
    """As `kvq.runner.run`, which is imported only where `known` finds no record."""
    found = known(config)
    if found is not None:
        return found
    from kvq import runner

    return runner.run(config, words)


def on_disk(config: Config) -> tuple[str, str, Record | None]:
    """As `kvq.runner.Prepared.state`, which is imported only where `known` finds no record."""
    found = known(config)
    if found is not None:
        return "done", "", found
    from kvq import runner

    return runner.Prepared(config).state


def known(config: Config) -> Record | None:
    """The record of a run, if it and its full-precision run are done and not stale; None: ask `kvq.runner`."""
    if config.force or not isinstance(config.task, PplConfig) or config.method.calibration.dataset is not None:
        return None
    if config.task.save_logits is not None or config.dataset.loader not in (Loader.embedded, Loader.text):
        return None
    try:
        weights = folder_fingerprint(config.model)
        if weights is None:
            return None
        trained_with = trained_with_bos(config.model, chat=False)
        if trained_with is None and (trained_with := folder_writes_bos(config.model)) is None:
            return None
        text = _fingerprint_of(config.dataset)
        store = Store(config.results_dir)
        record = _standing(store, run_key(canonical(config, weights, text, trained_with=trained_with)))
        if record is None or config.method.is_full_precision:
            return record
        baseline = _standing(
            store, run_key(canonical(full_precision(config), weights, text, trained_with=trained_with))
        )
        if baseline is None or record.baseline_key != baseline.key:
            return None
        store.samples(baseline.key)
    except (KvqError, OSError):  # the runner raises it
        return None
    return record


def _standing(store: Store, key: str) -> Record | None:
    """A record with nothing left to do: done, not stale, and without the journal of a repeat."""
    record = store.get(key)
    if record is None or record.status != "done" or is_stale(record):
        return None
    return None if store.journal_path(key).exists() else record


_last_text: tuple[str, str] = ("", "")


def _fingerprint_of(dataset: DatasetConfig) -> str:
    """SHA-256 (hex) of the text; cached for the last data set, which the runs of a sweep share."""
    global _last_text
    name = repr(dataset)
    if _last_text[0] != name:
        _last_text = (name, text_fingerprint([joined_text(dataset)]))
    return _last_text[1]
