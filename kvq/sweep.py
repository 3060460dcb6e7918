"""What a command with several runs prints: its plan, its progress bar and its table."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from tqdm import tqdm

from kvq.config import Config, full_precision
from kvq.config.identity import by_names
from kvq.errors import DataError, Unsupported, printable
from kvq.report.tables.formats import print_tables
from kvq.report.wandb import track
from kvq.results import Record, Store
from kvq.runs import Prepared


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
            self._say(full_precision(config))
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
