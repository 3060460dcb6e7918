"""`python -m kvq.papers`: every experiment's table of measured and published numbers, as Markdown, CSV and LaTeX."""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.papers.__main__")

import argparse
from collections.abc import Sequence

from kvq.papers.expected import experiments
from kvq.report import command
from kvq.report.__main__ import write
from kvq.report.comparisons import read_records
from kvq.report.tables.experiment_files import write_experiments
from kvq.report.tables.experiments import by_signature
from kvq.report.tables.readings import read_reference
from kvq.results import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every experiment's table of measured and published numbers; return the exit status."""
    out = "folder for the tables (default: tables/experiments in the results folder)"
    parser = command.parser_of("kvq.papers", __doc__, out)
    also = "first write and print the tables of all results, as `python -m kvq.report --print` does"
    parser.add_argument("--all", action="store_true", help=also)
    return command.run(parser.parse_args(arguments), _write)


def _write(options: argparse.Namespace) -> int:
    """Write the tables of the results folder that the command's options name; return the exit status."""
    store, tables = Store(options.results), options.results / "tables"
    scanned = read_records(store)
    if options.all:
        write(store, scanned, tables, show=True)
    records = scanned[0]
    present = frozenset((record.model, record.method) for record in records)
    built = experiments(present)
    paths = write_experiments(built, by_signature(records), read_reference(), options.out or tables / "experiments")
    print(f"{len(built)} experiments: {paths[-1]}")
    return 0
