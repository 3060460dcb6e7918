"""`python -m tests.golden [CASE ...]`: write goldens anew, all or those of some methods, tasks and models.

A golden whose numbers moved is written only where a version of what made it has been raised.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from tests.golden import methods, models, tasks
from tests.golden.held import FOLDER, Golden, complaint, file_of, moved, read, write


def main(names: list[str]) -> int:
    """Exit status: 1 where a golden moved and no version did."""
    cases = {"method": methods.METHODS, "task": tasks.CASES, "model": models.FAMILIES}
    known = [f"{kind} {case}" for kind, held in cases.items() for case in held]
    if unknown := [name for name in names if name not in known]:
        print(f"no case {', '.join(unknown)}; a case is such as 'method nsn' or 'task niah'", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    refused = []
    for name in tqdm(names or known, unit="golden", disable=None):
        golden = made(name)
        if golden is None:
            continue
        stored = read(file_of(name))
        before = stored.get(name)
        what = [] if before is None else moved(before, golden)
        if what and before is not None and before.versions == golden.versions:
            refused.append((name, golden, what))
        elif before is None or what or before.versions != golden.versions:
            write(file_of(name), stored | {name: golden})
    if refused:
        print(complaint({name: (golden, what) for name, golden, what in refused}), file=sys.stderr)
    return 1 if refused else 0


def made(name: str) -> Golden | None:
    """The golden of a case as this code makes it; None where a package that it needs is not installed."""
    kind, _, case = name.partition(" ")
    if kind == "method":
        return None if methods.missing(case) else methods.golden_of(case)
    if kind == "model":
        return models.golden_of(case)
    with tempfile.TemporaryDirectory() as folder:
        return tasks.golden_of(case, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
