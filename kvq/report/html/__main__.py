"""`python -m kvq.report.html`: write the page of a results folder, with the figures drawn before; needs no model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvq.config import outside
from kvq.errors import KvqError
from kvq.report.collecting import collect_seldom
from kvq.report.html.page import write_report
from kvq.results import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvq.report.html", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder that holds runs/ (default: results)"
    )
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the results folder)")
    outside.add_option(parser)
    given = parser.parse_args(arguments)
    with outside.using(given.config_dir):
        return _write(given)


def _write(given: argparse.Namespace) -> int:
    try:
        written = write_report(Store(given.results), given.out or given.results / "report.html")
    except KvqError as error:
        print(error, file=sys.stderr)
        return 1
    for line in written.warnings:
        print(line, file=sys.stderr)
    print(f"{written.path} ({written.runs} runs, {written.bytes / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    collect_seldom()
    sys.exit(main())
