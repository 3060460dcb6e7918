"""`python -m kvq.papers`: every experiment's table of measured and published numbers, as Markdown, CSV and LaTeX."""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.papers.__main__")

import argparse
from collections.abc import Sequence

from kvq.papers.expected import experiment_of, names
from kvq.report import command
from kvq.report.comparisons import read_records
from kvq.report.tables.experiment_files import write_experiments
from kvq.report.tables.experiments import by_signature
from kvq.report.tables.readings import read_reference
from kvq.results import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    out = "folder for the tables (default: tables/experiments in the results folder)"
    return command.run(command.parser_of("kvq.papers", __doc__, out).parse_args(arguments), _write)


def _write(given: argparse.Namespace) -> int:
    records = read_records(Store(given.results))[0]
    present = frozenset((record.model, record.method) for record in records)
    found = [experiment for name in names() if (experiment := experiment_of(name, present)) is not None]
    out = given.out or given.results / "tables" / "experiments"
    paths = write_experiments(found, by_signature(records), read_reference(), out)
    print(f"{len(found)} experiments: {paths[-1]}")
    return 0
