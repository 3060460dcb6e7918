"""What a command with several runs prints: its plan, its progress bar and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from rich.console import Console
from tqdm import tqdm

from kvq.config import Config, full_precision
from kvq.config.identity import by_names
from kvq.errors import DataError, Unsupported, printable
from kvq.report.tables.terminal import print_tables
from kvq.report.wandb import track
from kvq.results import Record, Store
from kvq.results.provenance import cpu_name
from kvq.runs import Prepared


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
