"""`python -m kvq.report.html`: write the page of a results folder, with the figures drawn before; needs no model.

One file that needs no network: tables, a plot of bits and quality, figures, and where its numbers come from.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.html")

import argparse
import base64
import hashlib
import re
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvq.errors import RecordError, printable, reason_of
from kvq.report import command
from kvq.report.labels import main_model, model_name
from kvq.report.payload import payload, script_json, shown
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Table, Tables
from kvq.results import Record, Store
from kvq.results.files import write_file
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE

_SCRIPTS = ("core.js", "facets.js", "runs.js", "plot.js", "detail.js", "main.js")
FIGURE_BYTES = 6 * 2**20
"""Most bytes of all figures on the page, those of the main model first; further figures are only named."""
_MOST_TEXTS = 20
"""Tables whose texts the page shows."""
# Files of one git checkout have times that differ by less than this.
_AT_ONCE_SECONDS = 60.0


class EmbeddedFigure(NamedTuple):
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
    """
    tables = build_tables(store) if tables is None else tables
    if not tables.tables:
        raise command.no_records(store)
    warnings = [f"skipped {broken.path.name}: {broken.reason}" for broken in tables.broken]
    try:
        main = main_model(row.record for table in tables.tables for row in table.rows)
        drawn = sorted((store.root / "figures" if figures is None else figures).glob("*.png"))
        drawn.sort(key=lambda path: f"-{main}-" not in path.name)
        newest = max(path.stat().st_mtime for path in store.runs.rglob("*.json"))  # when the last record was written
        if drawn and newest > min(path.stat().st_mtime for path in drawn) + _AT_ONCE_SECONDS:
            warnings.append("figures: some are older than the newest record; draw them again")
        content = render(tables, embed(drawn), warnings).encode("utf-8")
        write_file(out, content, durable=False)
    except OSError as error:
        raise RecordError(f"report: cannot write '{out}': {reason_of(error)}") from error
    return Written(out, sum(len(table.rows) for table in tables.tables), len(content), tuple(warnings))


def embed(paths: Sequence[Path], room: int = FIGURE_BYTES) -> list[EmbeddedFigure]:
    """PNG files as figures of the page, until `room` bytes are used."""
    found = []
    for path in paths:
        content = path.read_bytes()
        if not content.startswith(b"\x89PNG\r\n\x1a\n"):
            continue
        uri = f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
        width, height = struct.unpack(">II", content[16:24])
        room -= len(uri)
        title = re.sub(r"-[0-9a-f]{6,8}$", "", path.stem)
        found.append(EmbeddedFigure(path.stem, title.replace("-", " · "), uri if room >= 0 else None, width, height))
    return found


def render(tables: Tables, figures: Sequence[EmbeddedFigure] = (), warnings: Sequence[str] = ()) -> str:
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
    # One function around all scripts, so that they define no global names.
    scripts = "\n".join(_asset(name) for name in _SCRIPTS)
    style, script = _asset("page.css"), f'\n(() => {{\n"use strict";\n{scripts}\n}})();\n'
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    return environment.from_string(_asset("page.html.j2")).render(
        policy=_policy(style, script),
        frontier_rule=FRONTIER_RULE,
        noise_rule=NOISE_RULE,
        style=Markup(style),
        script=Markup(script),
        data=script_json(payload(tables, main)),
        tables=tables.tables,
        texts=[table for table in tables.tables if table.texts is not None][:_MOST_TEXTS],
        largest=max(tables.tables, key=lambda table: (_model(table) == main, len(table.rows))),
        summary=summary(records, stale, len(tables.broken)),
        dates=days(records),
        hours=hours(records),
        environments=environments(records),
        figures=figures,
        warnings=warnings,
    )


def _model(table: Table) -> str | None:
    return model_name(table.rows[0].record.model) if table.rows else None


def _policy(style: str, script: str) -> str:
    """The content security policy: the page fetches nothing and runs no other script or style."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode() for text in (style, script))
    own_style, own_script = (f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; style-src {own_style}; script-src {own_script}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _asset(name: str) -> str:
    return resources.files("kvq.report").joinpath("page", name).read_text(encoding="utf-8")


def environments(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Runs of the same code, versions and machine as one line each, those of most runs first."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        known = record.provenance
        versions = tuple(sorted(known.packages.items()))
        machine = (known.python, known.platform, known.cpu, known.device, known.threads)
        groups[(known.git_commit, known.git_dirty, versions, *machine)].append(record)
    return [_environment(runs) for runs in sorted(groups.values(), key=lambda runs: (-len(runs), runs[0].key))]


def _environment(runs: Sequence[Record]) -> dict[str, Any]:
    known = runs[0].provenance
    changed = ", with changes" if known.git_dirty else ""
    commit = "not from a checkout" if known.git_commit is None else known.git_commit[:12] + changed
    threads = "1 thread" if known.threads == 1 else f"{known.threads} threads"
    return {
        "runs": len(runs),
        "commit": shown(commit),
        "versions": shown(", ".join(f"{name} {version}" for name, version in sorted(known.packages.items())), 1000),
        "machine": shown(f"{known.device if known.device != 'cpu' else known.cpu}, {threads}"),
        "system": shown(f"Python {known.python}, {known.platform}"),
        "dates": days(runs),
        "hours": hours(runs),
    }


def days(records: Sequence[Record]) -> str:
    """First and last day (UTC) on which the runs were started."""
    found = sorted({record.provenance.started.date() for record in records})
    ends = [f"{day.day} {day:%B %Y}" for day in (found[0], found[-1])] if found else []
    return " – ".join(dict.fromkeys(ends))


def hours(records: Sequence[Record]) -> str:
    """Time that the runs took, together."""
    seconds = sum(sum(record.provenance.wall_seconds.values()) for record in records)
    if seconds < 90:
        return f"{seconds:.0f}\u202fs"
    return f"{seconds / 60:.0f}\u202fmin" if seconds < 5400 else f"{seconds / 3600:.1f}\u202fh"


def summary(records: Sequence[Record], stale: int, broken: int) -> list[tuple[str, str]]:
    """The page's counts, as (number, what it counts)."""
    status = Counter(record.status for record in records)
    counts = [
        (status["done"], "runs measured", "run measured"),
        (len({record.method for record in records}), "methods", "method"),
        (len({record.model for record in records}), "models", "model"),
        (len({record.dataset for record in records}), "data sets", "data set"),
        (len({record.task for record in records}), "tasks", "task"),
        (status["failed"], "failed", "failed"),
        (status["unsupported"], "unsupported", "unsupported"),
        (stale, "stale", "stale"),
        (broken, "unreadable files", "unreadable file"),
    ]
    always = 5
    return [
        (f"{count:,}".replace(",", "\u202f"), one if count == 1 else many)
        for place, (count, many, one) in enumerate(counts)
        if count or place < always
    ]


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
