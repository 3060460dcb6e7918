"""`python -m kvq.report`: write every table of a results folder, and print them when asked."""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.__main__")

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvq.report import command
from kvq.report.comparisons import read_records
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import print_table, write_tables
from kvq.results import Broken, Record, Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command.parser_of("kvq.report", __doc__, "folder for the tables (default: tables/ in the results folder)")
    parser.add_argument("--print", action="store_true", dest="show", help="print the tables too")
    return command.run(parser.parse_args(arguments), _write)


def _write(given: argparse.Namespace) -> int:
    """Write the tables of the results folder that the command's options name; return the exit status."""
    store = Store(given.results)
    return write(store, read_records(store), given.out or given.results / "tables", given.show)


def write(store: Store, scanned: tuple[list[Record], list[Broken]], out: Path, show: bool) -> int:
    """Write every table of a store into a folder, print them if they are to be shown; `scanned`: as `read_records`."""
    tables, console = build_tables(store, scanned=scanned), Console()
    command.say_skipped(tables.broken)
    paths = write_tables(store, out, tables=tables)
    if show:
        for table in tables.tables:
            print_table(table, console)
            console.print()
    for path in paths:
        print(path)
    return 0
