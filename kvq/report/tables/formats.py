"""Tables as Markdown, CSV and LaTeX, and their files: replaced whole, the same bytes for the same records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from kvq.errors import RecordError
from kvq.report.command import no_records, write_files
from kvq.report.escapes import csv_of, escape_markdown, markdown_table, one_line
from kvq.report.tables.build import build_tables
from kvq.report.tables.cells import Cell, columns_of, is_of_diagnostics, is_of_items, is_of_texts
from kvq.report.tables.latex import PREAMBLE, Sheet, floats
from kvq.report.tables.layout import Table, Tables
from kvq.results import Record, Store
from kvq.results.store import cause

CSV_METRICS = (
    "bits_per_element",
    "key_bits",
    "value_bits",
    "effective_bits",
    "perplexity",
    "nll",
    "delta_perplexity",
    "delta_nll",
    "delta_nll_se",
    "kl_mean",
    "kl_median",
    "kl_p99",
    "kl_p999",
    "kl_max",
    "top1_agreement",
    "scored_tokens",
    "windows",
)


def markdown(table: Table) -> str:
    """The table as GitHub Markdown, its protocol above and its notes below."""

    def shown(cell: Cell) -> str:
        text = escape_markdown(cell.text)
        return f"**{text}**" if cell.bold else text

    columns = columns_of(table)
    lines = [f"# {escape_markdown(table.title)}", ""]
    lines += [f"- {escape_markdown(line)}" for line in table.protocol]
    rows = [[shown(column.cell(row)) for column in columns] for row in table.lines]
    numbers = {place for place, column in enumerate(columns) if column.numeric}
    lines += ["", *markdown_table([escape_markdown(column.title) for column in columns], rows, numbers)]
    lines += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"


def csv(table: Table) -> str:
    """One line per run: names, status, marks and every number in full; no metric, no text in its place."""
    named = {name for row in table.rows for name in row.record.metrics}
    metrics = (*CSV_METRICS, *sorted(name for name in named if name.startswith(("preset_", "agreement_"))))
    if is_of_items(table) or is_of_diagnostics(table) or is_of_texts(table):
        metrics = tuple(sorted({name for row in table.rows for name in row.record.metrics}))
    rows = [
        {
            "method": row.name,
            "bits": row.record.bits,
            "status": row.record.status,
            "reason": one_line(row.record.reason or ""),
            "baseline": row.baseline,
            "within_noise": row.within_noise,
            "best": row.best,
            "stale": row.stale,
            **({"p_holm": row.p_value} if is_of_items(table) else {}),
            **{name: row.record.metrics.get(name) for name in metrics if name != "within_noise"},
            "dtype": row.record.provenance.dtype,
            "key": row.record.key,
        }
        for row in table.rows
    ]
    return csv_of(rows)


def latex(table: Table) -> str:
    """The table for a paper, with booktabs: its caption names the protocol's runs, its notes stand below."""
    columns = columns_of(table)
    cells = [[column.cell(row) for column in columns] for row in table.lines]
    sheet = Sheet(
        caption=table.title,
        label=f"tab:{table.slug}",
        header=[column.title for column in columns],
        rows=[[cell.text for cell in row] for row in cells],
        labels=2,
        left=frozenset(index for index, column in enumerate(columns) if not column.numeric),
        bold=frozenset((r, c) for r, row in enumerate(cells) for c, cell in enumerate(row) if cell.bold),
        notes=table.notes,
    )
    return f"{PREAMBLE}\n{floats(sheet)}"


def index(tables: Tables) -> str:
    """A page that links every table, by task, and names every file that is not a record."""
    lines = [
        "# Tables",
        "",
        "Made from the records by `make tables`; changes here are overwritten. The papers' tables,",
    ]
    lines += ["measured beside published, are in [experiments](experiments/index.md); figures in"]
    lines += ["[figures](../figures/index.md)."]
    for task, found in groupby(tables.tables, key=lambda table: table.title.partition(":")[0]):
        rows = []
        for table in found:
            name = escape_markdown(table.title.partition(": ")[2] or table.title)
            others = f"[CSV]({table.slug}.csv), [LaTeX]({table.slug}.tex)"
            rows.append([f"[{name}]({table.slug}.md)", _counts(table), others])
        lines += ["", f"## {escape_markdown(task)}", "", *markdown_table(["table", "runs", "files"], rows)]
    if tables.broken:
        lines += ["", "## Skipped, because they are not records", ""]
        lines += [f"- {escape_markdown(f'{broken.path.name}: {broken.reason}')}" for broken in tables.broken]
    return "\n".join(lines) + "\n"


def _counts(table: Table) -> str:
    states = [row.record.status for row in table.rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))) or "no runs"
    stale = sum(row.stale for row in table.rows)
    return f"{counts}, {stale} stale" if stale else counts


INDEX = "index.md"
_FORMATS = {"md": markdown, "csv": csv, "tex": latex}
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
    files = {INDEX: index(tables)}
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
