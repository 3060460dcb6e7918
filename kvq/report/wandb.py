"""`python -m kvq.report.wandb`: send finished records to Weights & Biases; what is there already is not sent again.

`track` sends one while a sweep measures, and its errors never stop it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.wandb")

import argparse
import sys
from collections.abc import Sequence

from tqdm import tqdm

from kvq.config.run import Logger, WandbLogger, WandbMode
from kvq.errors import KvqError, printable
from kvq.report import command
from kvq.report.labels import labelled
from kvq.results import Record, Store

_given_up: set[str] = set()
_sent: set[str] = set()
"""Keys of the records that this process has sent."""


def track(settings: Logger | None, store: Store, record: Record) -> None:
    """Show a run, and the full-precision run it is paired with, where `settings` say.

    It raises nothing and asks nothing. After the first error, one line is printed and this process sends nothing more.
    """
    if not isinstance(settings, WandbLogger) or settings.mode is WandbMode.disabled or _given_up:
        return
    from kvq.report.tracker import Tracker  # matplotlib and wandb take seconds to import

    try:
        tracker = Tracker(settings, store)
        baseline = None if record.baseline_key is None else store.get(record.baseline_key)
        for run in (baseline, record):
            if run is not None and run.key not in _sent:
                tracker.push(run)
                _sent.add(run.key)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        reason = str(error) if isinstance(error, KvqError) else said
        _given_up.add(reason)
        line = f"warning: logger=wandb: {reason}; runs go on, make wandb-sync sends their records later"
        tqdm.write(printable(line), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command.parser_of("kvq.report.wandb", __doc__)
    parser.add_argument("--project", default="kvq", help="project (default: kvq)")
    parser.add_argument("--entity", help="account or team (default: the account's own)")
    parser.add_argument("--group", help="group of all runs (default: one for each sweep's command)")
    parser.add_argument("--offline", action="store_true", help="write files for `wandb sync` instead")
    parser.add_argument("--workspace", action="store_true", help="save the view 'kvq' in the project too")
    return command.run(parser.parse_args(arguments), _send)


def _send(given: argparse.Namespace) -> int:
    from kvq.report.tracker import Tracker, save_workspace

    mode = WandbMode.offline if given.offline else None
    settings = WandbLogger(project=given.project, entity=given.entity, group=given.group, mode=mode)
    store = Store(given.results)
    records, broken = labelled(store)
    if not records:
        raise command.no_records(store)
    command.say_skipped(broken)
    tracker = Tracker(settings, store)
    finished = [record for record in records if record.status != "failed"]
    present = tracker.present()
    wanted = [record for record in finished if record.key[:32] not in present]
    for record in tqdm(wanted, desc="wandb", unit="run", disable=None, leave=False):
        tracker.push(record)
    there, failed = len(finished) - len(wanted), len(records) - len(finished)
    print(f"{len(wanted)} sent, {there} there already, {failed} failed and left out")
    if given.workspace:
        print(save_workspace(settings, finished))
    return 0
