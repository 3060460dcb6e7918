"""Records as runs of Weights & Biases; `track` sends one while a sweep measures, and its errors never stop it."""

from __future__ import annotations

import sys

from tqdm import tqdm

from kvq.config.run import Logger, WandbLogger, WandbMode
from kvq.errors import KvqError, printable
from kvq.results import Record, Store

_given_up: set[str] = set()


def track(settings: Logger | None, store: Store, record: Record) -> None:
    """Show a run, and the full-precision run it is paired with, where `settings` say.

    It raises nothing and asks nothing. After the first error, one line is printed and this process sends nothing more.
    """
    if not isinstance(settings, WandbLogger) or settings.mode is WandbMode.disabled or _given_up:
        return
    from kvq.report.wandb.run import Tracker  # matplotlib and wandb take seconds to import

    try:
        tracker = Tracker(settings, store)
        baseline = None if record.baseline_key is None else store.get(record.baseline_key)
        for run in (baseline, record):
            if run is not None:
                tracker.push(run)
    except KvqError as error:
        _give_up(str(error))
    except Exception as error:
        _give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _give_up(reason: str) -> None:
    _given_up.add(reason)
    line = f"warning: logger=wandb: {reason}; runs go on, make wandb-sync sends their records later"
    tqdm.write(printable(line), file=sys.stderr)
