"""One run: load, build, measure, record. Read it from top to bottom; everything it needs is named here."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvq.calibration import run as calibrated_run
from kvq.calibration.bind import Calibration
from kvq.config import Config, full_precision
from kvq.config.identity import canonical
from kvq.data.rows import source_of
from kvq.errors import KvqError, RecordError, Unsupported
from kvq.methods.build import Method, method_of
from kvq.methods.kept import bind_kept_keys
from kvq.models.inputs import Inputs
from kvq.results import Record, Store, is_stale, run_key
from kvq.results.journal import Journal
from kvq.results.provenance import PeakMemory, collect, utc_now
from kvq.results.record import Status
from kvq.results.versions import versions_of
from kvq.tasks.measurement import Baseline, Measurement
from kvq.tasks.registry import task_of
from kvq.tasks.stepwise import check_decode_mode


def run(config: Config) -> Record:
    """The record of this run, measured unless a usable one is there. Its full-precision baseline is run first.

    The record's status is `done`, or `unsupported` where the method cannot do what is asked.

    Raises:
        KvqError: bad input; where the run had begun, a record with status `failed` says so.
    """
    store = Store(config.results_dir)
    inputs = Inputs(config)
    key = key_of(config, inputs)
    try:
        store.check_writable()
    except RecordError:
        if (done := _usable(store, key, config)) is None:
            raise
        return done  # nothing is to be written
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        method: Method | Unsupported = method_for(config, inputs)
        baseline = None if config.method.is_full_precision else _baseline(config, store)
    except Unsupported as error:
        method, baseline = error, None
    with store.lock(key):
        found = _usable(store, key, config)
        if found is not None:
            _journal_path(store, key).unlink(missing_ok=True)  # of a repeat by force that was killed
            return found
        return _measure(config, inputs, key, store, method, baseline)


def method_for(config: Config, inputs: Inputs) -> Method:
    """The run's method, checked against model and task without reading weights.

    Raises:
        ConfigError: settings that fit no method, model or task.
        Unsupported: bits, a head dim or a protocol that the method cannot do.
    """
    for head_dim in inputs.head_dims:  # a layer may have one of its own
        method = method_of(config, head_dim)
    check_decode_mode(config.task, method)
    task_of(config.task).check(inputs, method)
    calibrated_run.check(inputs, method)
    return method


def key_of(config: Config, inputs: Inputs) -> str:
    """Name of the run: a hash of what it measures."""
    return run_key(_canonical(config, inputs))


def _canonical(config: Config, inputs: Inputs) -> dict[str, Any]:
    weights = inputs.model_fingerprint  # asked for first: without it nothing else has to be read
    text = task_of(config.task).fingerprint(inputs)
    return canonical(config, weights, text, calibrated_run.fingerprint_of(inputs))


def state_of(config: Config, key: str, store: Store) -> tuple[str, str]:
    """What is on disk for a run: `done`, `stale`, `failed`, `unsupported` or `pending`, and why."""
    try:
        record = store.get(key)
    except RecordError as error:
        return "pending", str(error)
    if record is None:
        return "pending", ""
    if record.status == "done" and is_stale(record):
        return "stale", "the version of a part has been raised since"
    return record.status, record.reason or ""


def on_disk(config: Config) -> tuple[str, str, Record | None]:
    """State of a run that another process measured, why, and its record where one can be read."""
    store, key = Store(config.results_dir), key_of(config, Inputs(config))
    state, why = state_of(config, key, store)
    return state, why, None if state == "pending" else store.get(key)


def to_be_calibrated(config: Config, inputs: Inputs) -> bool:
    """Whether a run would first fit its method's tables; reads no weights."""
    method = method_for(config, inputs)
    return method.is_calibrated and not calibrated_run.file_of(inputs).is_file()


def _usable(store: Store, key: str, config: Config) -> Record | None:
    """The record on disk if it still stands; failed, stale and unreadable ones are measured again."""
    status, why = state_of(config, key, store)
    if status == "pending" and why:
        print(f"{why}; measuring again", file=sys.stderr)
    if status != "done" or config.force:
        return None
    return store.get(key)


def _baseline(config: Config, store: Store) -> Baseline:
    """The full-precision run; `method=fp16 force=true` repeats it, and so do lost samples."""
    config = replace(full_precision(config), force=False)
    record = run(config)
    if record.status == "unsupported":
        raise Unsupported(f"full precision: {record.reason}")
    try:
        samples = store.samples(record.key)
    except RecordError as error:
        print(f"{error}; measuring again", file=sys.stderr)
        record = run(replace(config, force=True))
        samples = store.samples(record.key)
    return Baseline(record.key, record.metrics, samples)


def _measure(
    config: Config, inputs: Inputs, key: str, store: Store, method: Method | Unsupported, baseline: Baseline | None
) -> Record:
    task = task_of(config.task)
    data, journal = task.fingerprint(inputs), Journal()
    started, result, settings = utc_now(), Measurement(), _canonical(config, inputs)
    versions = versions_of(settings, type(config.task))
    clock: dict[str, float] = {}
    status: Status = "done"
    reason, memory = None, PeakMemory("cpu")
    failure: Exception | None = None
    try:
        if isinstance(method, Unsupported):
            raise method
        with _timed(clock, "load"):
            device = inputs.device
        method, calibration = _bound(inputs, method, clock)
        torch.manual_seed(config.seed)
        memory = PeakMemory(device)
        journal = _journal(config, store, key, f"{json.dumps(versions)} {device.type}")
        with _timed(clock, "measure"):
            result = calibrated_run.with_metrics(task.measure(inputs, method, baseline, journal), calibration)
    except Unsupported as error:
        status, reason = "unsupported", str(error)
    except Exception as error:
        status, reason, failure = "failed", _reason(error), error
    if failure is not None and state_of(config, key, store)[0] in ("done", "stale"):
        raise failure  # a repeat that fails takes nothing away
    record = Record(
        **_names(config),
        key=key,
        status=status,
        reason=reason,
        baseline_key=baseline.key if baseline else None,
        config=settings,
        metrics=result.metrics,
        units=result.units,
        versions=versions,
        provenance=collect(
            dtype=config.model.dtype.value,
            seed=config.seed,
            started=started,
            device=memory.device,
            dataset_fingerprint=data,
            dataset_source=source_of(config.dataset),
            model_fingerprint=inputs.model_fingerprint,
            wall_seconds=clock,
            peak_memory_bytes=memory.read(),
        ),
    )
    store.put(record, result.samples)
    if failure is not None:
        raise failure
    journal.discard()
    return record


def _names(config: Config) -> dict[str, Any]:
    # One full-precision run has many spellings, and one name.
    named = full_precision(config) if config.method.is_full_precision else config
    return {
        "task": config.task.name,
        "model": config.model.name,
        "dataset": config.dataset.name,
        "method": named.method.name,
        "bits": named.parsed_bits.label if named.parsed_bits else "",
    }


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, KvqError) else f"{type(error).__name__}: {error}".splitlines()[0]


def _journal(config: Config, store: Store, key: str, header: str) -> Journal:
    """What an earlier process scored of this run before it was killed; `force` starts anew."""
    if config.force:
        _journal_path(store, key).unlink(missing_ok=True)
    return Journal(_journal_path(store, key), header)


def _journal_path(store: Store, key: str) -> Path:
    return store.root / "partial" / f"{key}.jsonl"


def _bound(inputs: Inputs, method: Method, clock: dict[str, float]) -> tuple[Method, Calibration | None]:
    """The method with its tables and the ids of kept tokens, where it has any."""
    if method.kept_keys is not None:
        method = bind_kept_keys(method, inputs.tokenizer)
    if not method.is_calibrated:
        return method, None
    with _timed(clock, "calibrate"):
        return calibrated_run.bound(inputs, method)


@contextlib.contextmanager
def _timed(clock: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    clock[phase] = time.perf_counter() - start
