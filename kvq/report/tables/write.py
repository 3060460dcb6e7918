"""Tables on disk: every file replaced whole, the same bytes for the same records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from kvq.errors import RecordError
from kvq.report.tables import formats
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Planned, Tables
from kvq.results import Record, Store
from kvq.results.atomic import write_file
from kvq.results.store import cause

INDEX = "index.md"
# The names `write_tables` gives: nothing else in the folder is ever removed.
_OURS = re.compile(r"\]\(([A-Za-z0-9._-]+-[0-9a-f]{8})\.md\)")


def write_tables(
    store: Store,
    out_dir: str | os.PathLike[str],
    *,
    planned: Iterable[Planned] = (),
    stale: Callable[[Record], bool] | None = None,
) -> list[Path]:
    """Write every table of a store as Markdown, CSV and LaTeX, with an index.md, and return their paths.

    Tables that an earlier index.md lists and that no longer exist are removed.

    Raises:
        RecordError: the store has no records, or the folder cannot be written.
    """
    return write(build_tables(store, planned=planned, stale=stale), out_dir, source=store.runs)


def write(tables: Tables, out_dir: str | os.PathLike[str], source: Path) -> list[Path]:
    """Write tables that are built already; `source` is named when there are none.

    Raises:
        RecordError: as in `write_tables`.
    """
    if not tables.tables:
        raise RecordError(f"no records under '{source}': run a sweep first, such as python run.py -m method=nsn,kivi")
    folder = Path(out_dir)
    files: dict[str, str] = {}
    for table in tables.tables:
        files[f"{table.slug}.md"] = formats.markdown(table)
        files[f"{table.slug}.csv"] = formats.csv(table)
        files[f"{table.slug}.tex"] = formats.latex(table)
    try:
        former = _listed(folder / INDEX) - {table.slug for table in tables.tables}
        for name, text in {**files, INDEX: formats.index(tables)}.items():
            write_file(folder / name, text.encode("utf-8"), durable=False)
        for slug in former:
            for suffix in (".md", ".csv", ".tex"):
                (folder / f"{slug}{suffix}").unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"tables: cannot write under '{folder}': {cause(error)}") from error
    return [folder / name for name in [INDEX, *files]]


def _listed(index: Path) -> set[str]:
    try:
        return set(_OURS.findall(index.read_text(encoding="utf-8", errors="replace")))
    except FileNotFoundError:
        return set()
