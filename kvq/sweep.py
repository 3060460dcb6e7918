"""A command with several runs: its plan, progress bar and table, and lookup of finished runs without importing torch.

Looking runs up makes repeating a sweep fast. Only runs whose key follows from local files are looked up here:
perplexity of an embedded or local model on one stream of text, with a method that is not calibrated. `kvq.runner`
handles all others, and those with anything left to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from tqdm import tqdm

from kvq.config import Config, Loader, PplConfig, full_precision
from kvq.config.identity import by_names, canonical
from kvq.config.run import trained_with_bos
from kvq.data.embedded import text_fingerprint
from kvq.data.rows import joined_text
from kvq.errors import DataError, KvqError, Unsupported, printable
from kvq.models.folder import folder_fingerprint, folder_writes_bos
from kvq.report.tables.terminal import print_tables
from kvq.report.wandb import track
from kvq.results import Record, Store, is_stale, run_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvq.config import DatasetConfig


class Sweep:
    """The runs of one command: `add` each, then `finish`."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(
            total=total, desc="sweep", unit="run", disable=None if total > 1 else True, position=1, leave=False
        )
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
        self._due: list[_Due] = []

    def add(self, config: Config) -> None:
        """Print the state of this run and of its full-precision run, such as done, partly done, stale or pending."""
        baseline = None if config.method.is_full_precision else self._say(full_precision(config), None)
        self._say(config, baseline)

    def _say(self, config: Config, baseline: str | None) -> str | None:
        """Print the state of a run and return its key; None: it is not known. `baseline`: of its full precision."""
        # torch and transformers take seconds to import, and a sweep that is done shows its table without them.
        from kvq.runner import Prepared

        prepared = Prepared(config)
        try:
            key = prepared.key
        except DataError as error:
            # The number of runs is also known for a model or data that are not available here.
            name = repr((config.model, config.dataset, by_names(config)))
            if name not in self._seen:
                self._seen.add(name)
                self._count(config, "unknown", str(error))
            return None
        if key in self._seen:
            return key
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
        if state not in ("done", "unsupported"):
            self._due.append(_Due(prepared.store, baseline or key, config.method.name))
        return key

    def _count(self, config: Config, state: str, why: str) -> None:
        self._counts[state] += 1
        bits = config.bits_label or "fixed"
        name = f"{config.method.name} bits={bits}  {config.model.name} {config.dataset.name} {config.task.name}"
        print(printable(f"{state:<13}{name}  {why}"))

    def finish(self) -> None:
        """Print the totals, and how long it will take where runs of the same protocol are on record."""
        print("plan: " + (", ".join(f"{count} {state}" for state, count in sorted(self._counts.items())) or "nothing"))
        if self._due:
            print(_estimate(self._due))


class _Due(NamedTuple):
    """A run to be measured: its store, the key of its full-precision run, and the name of its method."""

    store: Store
    protocol: str
    method: str


def _estimate(due: Sequence[_Due]) -> str:
    """How many minutes runs will take: as those of their methods, or the median of those of the same protocol."""
    from kvq.results.provenance import cpu_name  # imports torch, which the table of a finished sweep does without

    took: dict[str, dict[str, list[float]]] = {}
    for record in due[0].store.scan()[0]:
        if record.status == "done" and record.provenance.cpu == cpu_name():
            methods = took.setdefault(record.baseline_key or record.key, {})
            methods.setdefault(record.method, []).append(sum(record.provenance.wall_seconds.values()))
    known = [run for run in due if run.protocol in took]
    seconds = 0.0
    for run in known:
        methods = took[run.protocol]
        seconds += median(methods.get(run.method) or [one for times in methods.values() for one in times])
    if not known:
        return "time: unknown, no run of the same protocol is on record for this processor"
    rest = f"; {len(due) - len(known)} without a run of the same protocol not counted" if len(known) < len(due) else ""
    return f"time: about {seconds / 60:.0f} minutes for {len(known)} runs, by what runs of the same protocol took{rest}"


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
    """The record of a run that needs no work: done, not stale, and without the journal of a repeat."""
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
