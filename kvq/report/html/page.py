"""The HTML report: one file made of records and figures."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvq.errors import RecordError
from kvq.report.command import no_records
from kvq.report.html import provenance
from kvq.report.html.payload import payload
from kvq.report.html.safe import png_uri, script_json, shown, source_digest
from kvq.report.labels import main_model, model_name
from kvq.report.tables.build import build_tables
from kvq.report.tables.cells import columns_of
from kvq.report.tables.layout import Table, Tables
from kvq.results import Store
from kvq.results.atomic import write_file
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE
from kvq.results.store import cause

_SCRIPTS = ("core.js", "facets.js", "runs.js", "plot.js", "detail.js", "main.js")
FIGURE_BYTES = 6 * 2**20
"""Most bytes of all figures on the page, those of the main model first; further figures are only named."""
_MOST_TEXTS = 20
"""Tables whose texts the page shows."""
# Files of one git checkout have times that differ by less than this.
_AT_ONCE_SECONDS = 60.0


class Figure(NamedTuple):
    """A figure on the page: its PNG as a data address, or None where there was no room for it."""

    name: str
    title: str
    uri: str | None
    width: int
    height: int


class Written(NamedTuple):
    """The page that was written, the runs on it, its size, and what was skipped, one line each."""

    path: Path
    runs: int
    bytes: int
    warnings: tuple[str, ...]


def write_report(store: Store, out: Path, *, tables: Tables | None = None, figures: Path | None = None) -> Written:
    """Write the page of a store, with the figures that were drawn before.

    Args:
        store: where the records are.
        out: the page.
        tables: those of the store, where they are built already.
        figures: folder of the figures; None: `figures/` in the results folder.

    Raises:
        RecordError: no records, or a file that cannot be read or written.
    """
    tables = build_tables(store) if tables is None else tables
    if not tables.tables:
        raise no_records(store)
    warnings = [f"skipped {broken.path.name}: {broken.reason}" for broken in tables.broken]
    try:
        main = main_model(row.record for table in tables.tables for row in table.rows)
        drawn = sorted((store.root / "figures" if figures is None else figures).glob("*.png"))
        drawn.sort(key=lambda path: f"-{main}-" not in path.name)
        if drawn and _newest(store) > min(path.stat().st_mtime for path in drawn) + _AT_ONCE_SECONDS:
            warnings.append("figures: some are older than the newest record; draw them again")
        content = render(tables, embed(drawn), warnings).encode("utf-8")
        write_file(out, content, durable=False)
    except OSError as error:
        raise RecordError(f"report: cannot write '{out}': {cause(error)}") from error
    return Written(out, sum(len(table.rows) for table in tables.tables), len(content), tuple(warnings))


def _newest(store: Store) -> float:
    """When the last record was written."""
    return max(path.stat().st_mtime for path in store.runs.rglob("*.json"))


def embed(paths: Sequence[Path], room: int = FIGURE_BYTES) -> list[Figure]:
    """PNG files as figures of the page, until `room` bytes are used."""
    found = []
    for path in paths:
        content = path.read_bytes()
        uri = png_uri(content)
        if uri is None:
            continue
        width, height = struct.unpack(">II", content[16:24])
        room -= len(uri)
        title = re.sub(r"-[0-9a-f]{6,8}$", "", path.stem)
        found.append(Figure(path.stem, title.replace("-", " · "), uri if room >= 0 else None, width, height))
    return found


def render(tables: Tables, figures: Sequence[Figure] = (), warnings: Sequence[str] = ()) -> str:
    """The page as text, the same for the same records.

    Args:
        tables: every table of a store; those of the main model are shown first.
        figures: what `embed` made.
        warnings: lines about what was skipped.
    """
    records = [row.record for table in tables.tables for row in table.rows]
    main = main_model(records)
    tables = replace(tables, tables=tuple(sorted(tables.tables, key=lambda table: _model(table) != main)))
    stale = sum(row.stale for table in tables.tables for row in table.rows)
    style, script = _asset("page.css"), _script()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    return environment.from_string(_asset("page.html.j2")).render(
        policy=_policy(style, script),
        frontier_rule=FRONTIER_RULE,
        noise_rule=NOISE_RULE,
        style=Markup(style),
        script=Markup(script),
        data=script_json(payload(tables, main)),
        tables=[(table, columns_of(table)) for table in tables.tables],
        texts=[table for table in tables.tables if table.texts is not None][:_MOST_TEXTS],
        largest=max(tables.tables, key=lambda table: (_model(table) == main, len(table.rows))),
        summary=provenance.summary(records, stale, len(tables.broken)),
        dates=provenance.days(records),
        hours=provenance.hours(records),
        environments=provenance.environments(records),
        figures=figures,
        warnings=warnings,
    )


def _model(table: Table) -> str | None:
    return model_name(table.rows[0].record.model) if table.rows else None


def _policy(style: str, script: str) -> str:
    """The content security policy: the page fetches nothing and runs no other script or style."""
    return (
        f"default-src 'none'; style-src {source_digest(style)}; script-src {source_digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _script() -> str:
    # One function around all scripts, so that they define no global names.
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'\n(() => {{\n"use strict";\n{parts}\n}})();\n'


def _asset(name: str) -> str:
    return resources.files(__package__ or "kvq.report.html").joinpath(name).read_text(encoding="utf-8")
