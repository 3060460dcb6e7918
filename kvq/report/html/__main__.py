"""`python -m kvq.report.html`: write the page of a results folder, with the figures drawn before; needs no model."""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.html.__main__")

import argparse
import sys
from collections.abc import Sequence

from kvq.errors import printable
from kvq.report import command
from kvq.report.html.page import write_report
from kvq.results import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command.parser_of("kvq.report.html", __doc__, "the page (default: report.html in the results folder)")
    return command.run(parser.parse_args(arguments), _write)


def _write(given: argparse.Namespace) -> int:
    written = write_report(Store(given.results), given.out or given.results / "report.html")
    for line in written.warnings:
        print(printable(line), file=sys.stderr)
    print(f"{written.path} ({written.runs} runs, {written.bytes / 2**20:.1f} MiB)")
    return 0
