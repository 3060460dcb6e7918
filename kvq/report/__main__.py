"""`python -m kvq.report`: write every table of a results folder, and print them when asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvq.config import outside
from kvq.errors import KvqError
from kvq.report.collecting import collect_seldom
from kvq.report.tables.build import build_tables
from kvq.report.tables.terminal import print_table
from kvq.report.tables.write import write
from kvq.results import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvq.report", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder that holds runs/ (default: results)"
    )
    parser.add_argument("--out", type=Path, help="folder for the tables (default: tables/ in the results folder)")
    parser.add_argument("--print", action="store_true", dest="show", help="print the tables too")
    outside.add_option(parser)
    given = parser.parse_args(arguments)
    with outside.using(given.config_dir):
        return _write(given)


def _write(given: argparse.Namespace) -> int:
    store, console = Store(given.results), Console()
    try:
        tables = build_tables(store)
        for broken in tables.broken:
            print(f"skipped {broken.path}: {broken.reason}", file=sys.stderr)
        out = given.out or given.results / "tables"
        paths = write(tables, out, source=store.runs)
    except KvqError as error:
        print(error, file=sys.stderr)
        return 1
    if given.show:
        for table in tables.tables:
            print_table(table, console)
            console.print()
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    collect_seldom()
    sys.exit(main())
