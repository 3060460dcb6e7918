"""`python -m kvq.papers`: every experiment's table, measured beside published, as Markdown, CSV and LaTeX."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvq.config import outside
from kvq.errors import KvqError
from kvq.papers.expected import Present, experiment_of, names
from kvq.report.collecting import collect_seldom
from kvq.report.judged import read_records
from kvq.report.tables.experiment_files import write_experiments
from kvq.report.tables.experiments import Experiment, by_signature
from kvq.report.tables.reference import read_reference
from kvq.results import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvq.papers", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder that holds runs/ (default: results)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the tables (default: tables/experiments in the results folder)"
    )
    outside.add_option(parser)
    given = parser.parse_args(arguments)
    with outside.using(given.config_dir):
        return _write(given.results, given.out or given.results / "tables" / "experiments")


def _write(results: Path, out: Path) -> int:
    try:
        records = read_records(Store(results))[0]
        present = frozenset((record.model, record.method) for record in records)
        found = _experiments(present)
        paths = write_experiments(found, by_signature(records), read_reference(), out)
    except KvqError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(found)} experiments: {paths[-1]}")
    return 0


def _experiments(present: Present) -> list[Experiment]:
    """Every experiment with a table; composing them takes most of the time."""
    return [experiment for name in names() if (experiment := experiment_of(name, present)) is not None]


if __name__ == "__main__":
    collect_seldom()
    sys.exit(main())
