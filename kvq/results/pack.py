"""`kvq pack`: move the samples of a results folder's records into one `samples.zip` per folder."""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.results.pack")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvq.errors import KvqError
from kvq.results.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvq pack", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder that holds runs/")
    try:
        print(f"{Store(parser.parse_args(arguments).results).pack()} files of samples packed")
    except KvqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
