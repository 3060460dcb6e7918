"""`python -m kvq.report.wandb`: send finished records to Weights & Biases; what is there already is not sent again."""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.wandb.__main__")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from kvq.config.run import WandbLogger, WandbMode
from kvq.errors import KvqError, printable
from kvq.report.command import no_records, say_skipped
from kvq.report.labels import labelled
from kvq.report.wandb.run import Tracker
from kvq.report.wandb.workspace import save_workspace
from kvq.results import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = _parser().parse_args(arguments)
    try:
        settings = WandbLogger(
            project=given.project,
            entity=given.entity,
            group=given.group,
            mode=WandbMode.offline if given.offline else None,
        )
        store = Store(given.results)
        records, broken = labelled(store)
        if not records:
            raise no_records(store)
        say_skipped(broken)
        tracker = Tracker(settings, store)
        finished = [record for record in records if record.status != "failed"]
        bar = tqdm(finished, desc="wandb", unit="run", disable=None, leave=False)
        sent = sum(tracker.push(record, again=given.again) for record in bar)
        print(f"{sent} sent, {len(finished) - sent} there already, {len(records) - len(finished)} failed and left out")
        if given.workspace:
            print(save_workspace(settings, finished))
    except KvqError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvq.report.wandb", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder that holds runs/ (default: results)"
    )
    parser.add_argument("--project", default="kvq", help="project (default: kvq)")
    parser.add_argument("--entity", help="account or team (default: the account's own)")
    parser.add_argument("--group", help="group of all runs (default: one for each sweep's command)")
    parser.add_argument("--offline", action="store_true", help="write files for `wandb sync` instead")
    parser.add_argument("--again", action="store_true", help="send also what is there already")
    parser.add_argument("--workspace", action="store_true", help="save the view 'kvq' in the project too")
    return parser
