"""A run: its name, its record, else method, measurement and record; what a command with several prints."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from kvq.calibration import files, text
from kvq.calibration.fit import load_or_fit
from kvq.config import Config, full_precision
from kvq.config.identity import by_names, canonical, names
from kvq.config.run import CpuLinear
from kvq.config.tasks import is_timed
from kvq.data.rows import describe_source
from kvq.errors import DataError, KvqError, RecordError, Unsupported, printable
from kvq.methods.build import method_of
from kvq.methods.method import Method, bind_kept_keys
from kvq.models.inputs import Inputs, cache_shape
from kvq.models.layers import latent_numbers
from kvq.models.load import full_fp32_products, onednn_linear, text_config_of
from kvq.models.weights import rounded_weights
from kvq.report.tables.formats import print_tables
from kvq.report.wandb import track
from kvq.results import Provenance, Record, Store, run_key
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.presets import with_departures
from kvq.results.provenance import PeakMemory, collect, full_precision_words, single_command, timed, utc_now
from kvq.results.record import Status, Versions, versions_of
from kvq.results.store import State
from kvq.tasks.measurement import Baseline, Measurement, task_of

_THREADS = torch.get_num_threads()  # torch's choice, for runs behind one with threads=

Words = Callable[[], Sequence[str] | None]
"""Asks for the overrides from which a run was composed; None: no command line composes it."""
Baselines = dict[str, Baseline]
"""Full-precision runs of a command by their settings, so that each is named and looked up once."""


class Prepared:
    """A run before it is measured. Nothing here reads weights; each part is computed when it is first needed."""

    def __init__(self, config: Config) -> None:
        self.config, self.inputs = config, Inputs(config)
        self.task, self.store = task_of(config.task), Store(config.results_dir)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Its canonical settings, which the record keeps."""
        inputs, weights = self.inputs, self.inputs.model_fingerprint  # first: without it nothing else has to be read
        texts = self.task.fingerprint(inputs), text.fingerprint_of(inputs)
        return canonical(self.config, weights, *texts, inputs.trained_with_bos)

    @functools.cached_property
    def key(self) -> str:
        """The SHA-256 (hex) of its settings, which names its record."""
        return run_key(self.settings)

    @functools.cached_property
    def method(self) -> Method:
        """Its method, checked against model and task; `ConfigError` or `Unsupported` where it does not fit."""
        method = method_of(self.config, *self.inputs.head_dims)
        if method.depends_on_model and self.inputs.reads_weights:
            method = method.for_model(text_config_of(self.config.model))
        if method.by_layer:
            method.check_layers(cache_shape(replace(self.config.model, context=None)).count)
        latent = self.config.method.latent_only and self.inputs.reads_weights
        if latent and latent_numbers(text_config_of(self.config.model)) is None:
            what = "a format of the latent that multi-head latent attention caches"
            held = f"model={self.config.model.name} caches keys and values"
            raise Unsupported(f"method={self.config.method.name}: {what}; {held}")
        _ = self.inputs.bos  # refuses a tokenizer without such a token
        self.task.check(self.inputs, method)
        if method.policy("kept_keys") is not None:
            method = bind_kept_keys(method, self.inputs.tokenizer)
        text.check(self.inputs, method)
        if self.config.model.round_weights is not None and (method.needs_calibration or is_timed(self.config.task)):
            what = "a method fitted to the weights as they are" if method.needs_calibration else "a measurement of time"
            raise Unsupported(f"model.round_weights={self.config.model.round_weights}: not with {what}; use null")
        if method.needs_calibration and not self.config.task.calibrates_itself:
            _ = self.shared_text
        return method

    @functools.cached_property
    def shared_text(self) -> float:
        """Share of n-grams that its calibration has in common with what it scores. Raises: as `text.shared_text`."""
        inputs, calibration = self.inputs, self.config.method.calibration
        name = repr((text.fingerprint_of(inputs), self.task.fingerprint(inputs), self.config.task, calibration))
        return inputs.shared("shared text", name, lambda: text.shared_text(inputs, self.task.texts(inputs)))

    @property
    def state(self) -> State:
        """The state of its record on disk."""
        return self.store.state(self.key)

    @functools.cached_property
    def versions(self) -> Versions:
        """Versions of the parts that make its numbers."""
        return versions_of(self.settings, type(self.config.task))

    def journal(self, device: str) -> Journal:
        """What an earlier process that was killed has scored under the same versions, on this kind of device."""
        return Journal(self.store.journal_path(self.key), f"{json.dumps(self.versions)} {device}")

    @property
    def scored(self) -> int:
        """Windows or items that a killed process has scored, and that need not be scored again on the same device."""
        return max(len(self.journal(device).rows) for device in ("cpu", "cuda"))

    @property
    def needs_calibration(self) -> bool:
        """Whether the method has tables to fit and no file holds them yet."""
        return self.calibrates and not files.file_of(self.inputs).is_file()

    @property
    def calibrates(self) -> bool:
        """Whether the method has tables that are fitted to a text."""
        return self.method.needs_calibration and not self.config.task.calibrates_itself


def run(config: Config, words: Words = lambda: None, baselines: Baselines | None = None) -> Record:
    """The record of this run, `done` or `unsupported`: the stored one if usable, else a new measurement.

    Args:
        words: its overrides, which a new record keeps as a command; not called for a run that is on record.
        baselines: those that the same command has looked up; a new one is added.

    Raises:
        KvqError: bad input; if measuring had begun, a record with status `failed` is stored first.
    """
    prepared = Prepared(config)
    torch.set_num_threads(config.threads or _THREADS)
    state, baseline, refused = prepared.state, None, None
    if state.name == "pending" and state.why:
        print(printable(f"{state.why}; measuring again"), file=sys.stderr)
    done = state.record if state.name == "done" and not _is_repeated(config) else None
    try:
        if done is None:
            prepared.store.check_writable()
            _ = prepared.method  # refused before full precision is measured
        if not config.method.is_full_precision:
            baseline = _run_baseline(prepared, words, {} if baselines is None else baselines)
    except Unsupported as error:
        refused = error
    if done is not None:
        prepared.store.journal_path(done.key).unlink(missing_ok=True)  # of a repeat by force that was killed
        return done
    with prepared.store.lock(prepared.key), full_fp32_products():
        if not _is_repeated(config) and (state := prepared.state).name == "done" and state.record is not None:
            return state.record  # another process has measured it meanwhile
        return _measure(prepared, baseline, refused, words)


@contextmanager
def _changed_weights(inputs: Inputs, method: Method) -> Iterator[None]:
    """Within the context, the model's weights are as the run asks: with a rotation merged, then rounded."""
    with ExitStack() as changed:
        if method.merged is not None and inputs.reads_weights:
            changed.enter_context(method.merged.in_weights(inputs.model.model))
        if (bits := inputs.config.model.round_weights) is not None and inputs.reads_weights:
            changed.enter_context(rounded_weights(inputs.model.model, bits))
        if inputs.config.cpu_linear is CpuLinear.onednn:
            changed.enter_context(onednn_linear())
        yield


def _is_repeated(config: Config) -> bool:
    """Whether a run is measured again that is done: by force, or for a file that only a measurement writes."""
    return config.force or any(getattr(config.task, name) is not None for name in config.task.outputs)


def _run_baseline(prepared: Prepared, words: Words, known: Baselines) -> Baseline:
    """The full-precision run; only `method=fp16 force=true` or unreadable samples repeat it."""
    config = replace(full_precision(prepared.config), force=False)
    if outputs := config.task.outputs:
        config = replace(config, task=replace(config.task, **dict.fromkeys(outputs)))
    name = repr(config)
    if name in known:
        return known[name]

    def its_own() -> Sequence[str] | None:
        return None if (given := words()) is None else full_precision_words(given)

    record = run(config, its_own)
    if record.status == "unsupported":
        raise Unsupported(f"full precision: {record.reason}")
    try:
        samples = prepared.store.samples_of(record)
    except RecordError as error:
        print(printable(f"{error}; measuring again"), file=sys.stderr)
        record = run(replace(config, force=True), its_own)
        samples = prepared.store.samples_of(record)
    known[name] = Baseline(record.key, record.metrics, samples)
    return known[name]


def _measure(prepared: Prepared, baseline: Baseline | None, refused: Unsupported | None, words: Words) -> Record:
    """Measure a run and store its record, also of a failure; `refused`: why the method cannot do it."""
    config, inputs = prepared.config, prepared.inputs
    started, journal, result = utc_now(), Journal(), Measurement()
    clock: dict[str, float] = {}
    status: Status = "done"
    reason, memory = None, PeakMemory("cpu")
    failure: Exception | None = None
    try:
        if refused is not None:
            raise refused
        with timed(clock, "load"):
            device = inputs.device
        method, calibration = prepared.method, None
        if prepared.calibrates:
            with timed(clock, "calibrate"):
                method, calibration = load_or_fit(inputs, method)
        torch.manual_seed(config.seed)
        memory = PeakMemory(device)
        journal = prepared.journal(device.type)
        if config.force:
            journal.discard()
        with timed(clock, "measure"), _changed_weights(inputs, method):
            result = prepared.task.measure(inputs, method, baseline, journal)
        if calibration is not None:
            cost = calibration.metrics(result.metrics, method) | {"calibration_shared": prepared.shared_text}
            result = replace(result, metrics=result.metrics | cost, units=result.units | units_of(cost))
    except Unsupported as error:
        status, reason = "unsupported", str(error)
    except Exception as error:
        said = str(error) if isinstance(error, KvqError) else f"{type(error).__name__}: {error}".splitlines()[0]
        status, reason, failure = "failed", said, error
    if failure is not None and prepared.state.name in ("done", "stale"):
        raise failure  # a failed repeat replaces no record
    record = with_departures(
        Record(
            **names(config),
            key=prepared.key,
            status=status,
            reason=reason,
            baseline_key=baseline.key if baseline else None,
            config=prepared.settings,
            metrics=result.metrics,
            units=result.units,
            versions=prepared.versions,
            provenance=_collect_provenance(prepared, started, memory, clock, result.engine),
            command=None if (given := words()) is None else single_command(given),
        )
    )
    stored = prepared.store.put(record, result.samples)
    if failure is not None:
        raise failure
    journal.discard()
    return stored


def _collect_provenance(
    prepared: Prepared, started: datetime, memory: PeakMemory, clock: dict[str, float], engine: str | None
) -> Provenance:
    """Provenance of the run from its settings, what it took, and what this process knows."""
    return collect(
        engine=engine,
        cpu_linear=prepared.config.cpu_linear.value,
        dtype=prepared.config.model.dtype.value,
        seed=prepared.config.seed,
        started=started,
        device=memory.device,
        dataset_fingerprint=prepared.task.fingerprint(prepared.inputs),
        dataset_source=describe_source(prepared.config.dataset),
        model_fingerprint=prepared.inputs.model_fingerprint,
        wall_seconds=clock,
        peak_memory_bytes=memory.read(),
    )


class Sweep:
    """The runs of one command: `add` each, then `finish`."""

    def __init__(self, total: int) -> None:
        shown = None if total > 1 else True
        self._bar = tqdm(total=total, desc="sweep", unit="run", disable=shown, position=1, leave=False)
        self._keys: dict[str, set[str]] = {}

    def add(self, config: Config, record: Record | None) -> None:
        """Count a run as finished and send its record to the `logger`; None: it left no record."""
        if record is not None:
            self._keys.setdefault(config.results_dir, set()).add(record.key)
            track(config.logger, Store(config.results_dir), record)
        self._bar.update()

    def finish(self) -> None:
        """Print the tables of the runs that were added, each with its full-precision run."""
        self._bar.close()
        for folder, keys in self._keys.items():
            print_tables(Store(folder), Console(), keys=keys)


class SweepPlan:
    """Prints the state of each run that a command would start; starts none."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._counts: Counter[str] = Counter()

    def add(self, config: Config) -> None:
        """Print the state of this run and of its full-precision run, such as done, partly done, stale or pending."""
        if not config.method.is_full_precision:
            self._say(replace(full_precision(config), force=False))
        self._say(config)

    def _say(self, config: Config) -> None:
        """Print the state of a run, once."""
        prepared = Prepared(config)
        try:
            key = prepared.key
        except DataError as error:
            # The number of runs is also known for a model or data that are not available here.
            name = repr((config.model, config.dataset, by_names(config)))
            if name not in self._seen:
                self._seen.add(name)
                self._count(config, "unknown", str(error))
            return
        if key in self._seen:
            return
        self._seen.add(key)
        state, why, _ = prepared.state
        try:
            calibrates = prepared.needs_calibration
        except Unsupported as error:
            state, why, calibrates = "unsupported", str(error), False
        if config.force and state == "done":
            state, why = "pending", "force=true"
        if state in ("pending", "stale", "failed") and not config.force and (scored := prepared.scored):
            state, why = "partly done", f"{scored} scored before it was interrupted"
        elif state in ("pending", "stale") and not why and calibrates:
            why = "to be calibrated"
        self._count(config, state, f"[{key[:12]}]{'  ' + why if why else ''}")

    def _count(self, config: Config, state: str, why: str) -> None:
        """Count a run under its state and print its line."""
        self._counts[state] += 1
        bits = config.bits_label or "fixed"
        name = f"{config.method.name} bits={bits}  {config.model.name} {config.dataset.name} {config.task.name}"
        print(printable(f"{state:<13}{name}  {why}"))

    def finish(self) -> None:
        """Print how many runs have each state."""
        print("plan: " + (", ".join(f"{count} {state}" for state, count in sorted(self._counts.items())) or "nothing"))
