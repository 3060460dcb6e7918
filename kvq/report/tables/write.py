"""Tables on disk: every file replaced whole, the same bytes for the same records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from kvq.errors import RecordError
from kvq.report.command import no_records, write_files
from kvq.report.tables import formats
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Tables
from kvq.results import Record, Store
from kvq.results.store import cause

INDEX = "index.md"
_FORMATS = {"md": formats.markdown, "csv": formats.csv, "tex": formats.latex}
# The names `write_tables` gives: nothing else in the folder is ever removed.
_OURS = re.compile(r"\]\(([A-Za-z0-9._-]+-[0-9a-f]{8})\.md\)")


def write_tables(
    store: Store,
    out_dir: str | os.PathLike[str],
    *,
    stale: Callable[[Record], bool] | None = None,
    tables: Tables | None = None,
) -> list[Path]:
    """Write every table of a store as Markdown, CSV and LaTeX, with an index.md, and return their paths.

    Tables that an earlier index.md lists and that no longer exist are removed.

    Args:
        store: where the records are.
        out_dir: the folder.
        stale: as in `build_tables`.
        tables: those of the store, where they are built already.

    Raises:
        RecordError: the store has no records, or the folder cannot be written.
    """
    tables = build_tables(store, stale=stale) if tables is None else tables
    if not tables.tables:
        raise no_records(store)
    folder = Path(out_dir)
    files = {INDEX: formats.index(tables)}
    for table in tables.tables:
        files |= {f"{table.slug}.{kind}": write(table) for kind, write in _FORMATS.items()}
    try:
        former = _listed(folder / INDEX) - {table.slug for table in tables.tables}
        paths = write_files("tables", folder, files)
        for slug in former:
            for kind in _FORMATS:
                (folder / f"{slug}.{kind}").unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"tables: cannot write under '{folder}': {cause(error)}") from error
    return paths


def _listed(index: Path) -> set[str]:
    try:
        return set(_OURS.findall(index.read_text(encoding="utf-8", errors="replace")))
    except FileNotFoundError:
        return set()
