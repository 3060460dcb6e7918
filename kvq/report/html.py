"""`python -m kvq.report.html`: write the page of a results folder, with the figures drawn before; needs no model.

One file without network: tables, plot, figures, provenance. Text of records never becomes markup, script or a link.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.report.html")

import argparse
import base64
import json
import re
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvq.config import plugins
from kvq.errors import RecordError, printable, reason_of
from kvq.report import command
from kvq.report.labels import by_bits, colour_of, main_model, model_name
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import one_line
from kvq.report.tables.layout import Row, Table, Tables
from kvq.results import Record, Store
from kvq.results.files import write_file
from kvq.results.metrics import METRICS, Metric, metric_of
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE

_SCRIPTS = ("core.js", "facets.js", "runs.js", "plot.js", "detail.js", "main.js")
_OF_A_RUN = ("started", "wall_seconds", "peak_memory_bytes")
_APART = {"key", "metrics", "config", "provenance"}
"""Fields of a record that the page has of a run itself, or part by part."""
SIZES = [metric.name for metric in METRICS.values() if metric.role == "size"]
QUALITY = [metric.name for metric in METRICS.values() if metric.role == "quality"]
# Inside a script element these could end it or begin another; in JSON their escapes mean the same.


class EmbeddedFigure(NamedTuple):
    """A figure on the page: its PNG as a data address, or None where there was no room for it."""

    name: str
    title: str
    uri: str | None
    width: int
    height: int


def write_report(store: Store, out: Path) -> Path:
    """Write the page of a store to `out`, with the figures that were drawn into `figures/` of the results folder."""
    tables = build_tables(store)
    if not tables.tables:
        raise command.no_records(store)
    warnings = tuple(f"skipped {broken.path.name}: {broken.reason}" for broken in tables.broken)
    for line in warnings:
        print(printable(line), file=sys.stderr)
    try:
        main = main_model(row.record for table in tables.tables for row in table.rows)
        drawn = sorted((store.root / "figures").glob("*.png"), key=lambda path: (f"-{main}-" not in path.name, path))
        write_file(out, render(tables, embed_figures(drawn), warnings).encode("utf-8"), durable=False)
    except OSError as error:
        raise RecordError(f"report: cannot write '{out}': {reason_of(error)}") from error
    return out


def embed_figures(paths: Sequence[Path], room: int = 6 * 2**20) -> list[EmbeddedFigure]:
    """Read PNG files as figures of the page, their bytes in its text until `room` bytes are used; others are left."""
    found = []
    for path in paths:
        content = path.read_bytes()
        uri = f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
        room -= len(uri)
        title = re.sub(r"-[0-9a-f]{6,8}$", "", path.stem).replace("-", " · ")
        size = struct.unpack(">II", content[16:24])
        found.append(EmbeddedFigure(path.stem, title, uri if room >= 0 else None, *size))
    return found


def render(tables: Tables, figures: Sequence[EmbeddedFigure] = (), warnings: Sequence[str] = ()) -> str:
    """The page as text, tables of the main model first; `warnings`: lines about what was skipped."""
    main = main_model(row.record for table in tables.tables for row in table.rows)

    def is_of_main(table: Table) -> bool:
        return bool(table.rows) and model_name(table.rows[0].record.model) == main

    tables = replace(tables, tables=tuple(sorted(tables.tables, key=is_of_main, reverse=True)))
    rows = [row for table in tables.tables for row in table.rows]
    records = [row.record for row in rows]
    assets = resources.files("kvq.report").joinpath("page")
    style, template, *scripts = (
        assets.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.html.j2", *_SCRIPTS)
    )
    # One function around all scripts, so that they define no global names.
    script = '\n(() => {{\n"use strict";\n{}\n}})();\n'.format("\n".join(scripts))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    return environment.from_string(template).render(
        frontier_rule=FRONTIER_RULE,
        noise_rule=NOISE_RULE,
        style=Markup(style),
        script=Markup(script),
        data=script_json(payload(tables, main)),
        tables=tables.tables,
        texts=[table for table in tables.tables if table.texts is not None][:20],  # shown on the page
        largest=max(tables.tables, key=lambda table: (is_of_main(table), len(table.rows))),
        summary=count_records(records, sum(row.stale for row in rows), len(tables.broken)),
        dates=days_of(records),
        hours=time_of(records),
        environments=environments_of(records),
        figures=figures,
        warnings=warnings,
    )


def environments_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A line of the page for each code, set of package versions and machine on which runs were measured, most first."""
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = defaultdict(list)
    for record in records:
        known = record.provenance
        changed = ", with changes" if known.git_dirty else ""
        threads = "1 thread" if known.threads == 1 else f"{known.threads} threads"
        texts = {
            "commit": "not from a checkout" if known.git_commit is None else known.git_commit[:12] + changed,
            "versions": ", ".join(f"{name} {version}" for name, version in sorted(known.packages.items())),
            "machine": f"{known.device if known.device != 'cpu' else known.cpu}, {threads}",
            "system": f"Python {known.python}, {known.platform}",
        }
        groups[tuple((name, shown(text, 1000)) for name, text in texts.items())].append(record)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0].key))
    return [{"runs": len(runs), "dates": days_of(runs), "hours": time_of(runs), **dict(own)} for own, runs in ordered]


def days_of(records: Sequence[Record]) -> str:
    """First and last day (UTC) on which the runs were started."""
    found = sorted({record.provenance.started.date() for record in records})
    ends = [f"{day.day} {day:%B %Y}" for day in (found[0], found[-1])] if found else []
    return " – ".join(dict.fromkeys(ends))


def time_of(records: Sequence[Record]) -> str:
    """Time that the runs took, together, in seconds, minutes or hours."""
    seconds = sum(sum(record.provenance.wall_seconds.values()) for record in records)
    if seconds < 90:
        return f"{seconds:.0f}\u202fs"
    return f"{seconds / 60:.0f}\u202fmin" if seconds < 5400 else f"{seconds / 3600:.1f}\u202fh"


def count_records(records: Sequence[Record], stale: int, broken: int) -> list[tuple[str, str]]:
    """The page's counts, as (number, what it counts)."""
    status = Counter(record.status for record in records)
    names = (("method", "method"), ("model", "model"), ("dataset", "data set"), ("task", "task"))
    counts = [
        (status["done"], "runs measured", "run measured"),
        *((len({getattr(record, field) for record in records}), f"{name}s", name) for field, name in names),
        (status["failed"], "failed", "failed"),
        (status["unsupported"], "unsupported", "unsupported"),
        (stale, "stale", "stale"),
        (broken, "unreadable files", "unreadable file"),
    ]
    return [
        (f"{count:,}".replace(",", "\u202f"), one if count == 1 else many)
        for place, (count, many, one) in enumerate(counts)
        if count or place < 5  # the first five always
    ]


def script_json(value: Any) -> Markup:
    """`value` as JSON that is safe between `<script type="application/json">` and its end, in ASCII."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate({ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}))


def shown(text: str, longest: int = 300) -> str:
    """`text` on one line without control characters or marks that change the direction of writing, cut to `longest`."""
    line = one_line(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


class ValuePool:
    """JSON values that many records share, each kept once and named by its index, in the order in which they came."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    @property
    def values(self) -> list[Any]:
        """The values, each at its index."""
        return [json.loads(text) for text in self._places]

    def add(self, value: Any) -> int:
        """Add a JSON value and return its index."""
        return self._places.setdefault(json.dumps(value, sort_keys=True), len(self._places))

    def add_parts(self, value: Mapping[str, Any]) -> dict[str, int]:
        """Add the parts of a mapping and return their indices by name."""
        return {shown(str(name)): self.add(part) for name, part in value.items()}


def payload(tables: Tables, main: str | None = None) -> dict[str, Any]:
    """What the page's script reads: `runs` name parts of records by their index in `pool`; `main`: of that model."""
    rows = [(place, row) for place, table in enumerate(tables.tables) for row in table.rows]
    records, pool = [row.record for _, row in rows], ValuePool()
    tasks: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        tasks[record.task].append(record)
    metrics = list_metrics(records)
    return {
        "tasks": [
            {"name": shown(task), "runs": len(runs), "columns": _columns_of(runs)}
            for task, runs in sorted(tasks.items(), key=lambda item: (-len(item[1]), item[0]))
        ],
        "metrics": {
            name: {**metric._asdict(), "title": shown(metric.title, 80), "short": shown(metric.short, 40)}
            for name, metric in metrics.items()
        },
        "methods": _methods_of(records),
        "protocols": [
            {"slug": table.slug, "title": shown(table.title), "words": shown(table.words)}
            | {"main": any(model_name(row.record.model) == main for row in table.rows)}
            | {"lines": [shown(line, 2000) for line in table.protocol]}
            for table in tables.tables
        ],
        "runs": [_run_data(place, row, pool, metrics) for place, row in rows],
        "pool": pool.values,
    }


def _methods_of(records: Sequence[Record]) -> dict[str, Any]:
    """Label, colour and arXiv paper of each method, most runs first; a preset has the paper of its method."""
    presets = {choice.name: choice.read() for choice in plugins.all_choices() if choice.group == "method"}
    counts, found = Counter(record.method for record in records), {}
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        settings = {**presets.get(name.partition("/")[0], {}), **presets.get(name, {})}
        number = settings.get("arxiv")
        arxiv = number if isinstance(number, str) and re.fullmatch(r"\d{4}\.\d{4,5}", number) else None
        found[shown(name)] = {
            "label": shown(str(settings.get("label") or name)),
            "colour": colour_of(name),
            "arxiv": arxiv,
            "link": f"https://arxiv.org/abs/{arxiv}" if arxiv else None,
            "paper": f"arXiv {arxiv}" if arxiv else "no paper",
        }
    return found


def _run_data(place: int, row: Row, pool: ValuePool, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """A run of `payload` from its row; `place`: the index of its protocol; `pool` takes the parts of its record."""
    record = row.record
    names = shown_metrics(record, metrics)
    bits = by_bits(record.bits)[0]
    provenance = record.provenance.model_dump(mode="json", exclude_unset=True)  # as in the file
    of_run = pool.add_parts({name: part for name, part in provenance.items() if name not in _OF_A_RUN})
    run: dict[str, Any] = {of: shown(getattr(record, of)) for of in ("key", "status", "task", "dataset", "method")}
    run |= {"model": shown(model_name(record.model)), "reason": shown(record.reason or "", 1000)}
    run |= {"name": shown(row.name), "bits": shown(row.bits), "order": None if bits == float("inf") else bits}
    run |= {name: getattr(row, name) for name in ("baseline", "best", "variant", "unquantized", "stale")}
    run |= {"noise": row.within_noise, "started": record.provenance.started.isoformat().replace("+00:00", "Z")}
    run |= {"protocol": place, "names": pool.add(names), "values": [record.metrics[name] for name in names]}
    run["record"] = {
        "config": pool.add_parts(record.config),
        "provenance": of_run,
        "own": {name: provenance[name] for name in _OF_A_RUN},
        "fields": pool.add_parts(record.model_dump(mode="json", exclude=_APART, exclude_unset=True)),
    }
    return run | ({} if row.p_value is None else {"p": row.p_value})


def list_metrics(records: Iterable[Record]) -> dict[str, Metric]:
    """Every metric by name, with the first unit: sizes and quality first, in their order, then the others."""
    units: dict[str, str | None] = {}
    for record in records:
        for name in record.metrics:
            units[name] = units.get(name) or record.units.get(name)
    first = [name for name in (*SIZES, *QUALITY) if name in units]
    return {name: metric_of(name, units[name]) for name in (*first, *sorted(units.keys() - set(first)))}


def shown_metrics(record: Record, metrics: Mapping[str, Metric]) -> list[str]:
    """Names of a record's metrics that are in the unit under which the page shows them."""
    return [name for name in record.metrics if record.units.get(name, metrics[name].unit) == metrics[name].unit]


def _columns_of(records: Iterable[Record]) -> list[str]:
    """Metrics that a table of one task shows: quality where the task measures it, else the first that it measured."""
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    quality = [name for name in QUALITY if name in names]
    rest = [name for name in names if name not in SIZES and not name.endswith("_se")]
    return (quality or rest)[:8]  # columns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command.parser_of("kvq.report.html", __doc__, "the page (default: report.html in the results folder)")

    def write(given: argparse.Namespace) -> int:
        path = write_report(Store(given.results), given.out or given.results / "report.html")
        print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")
        return 0

    return command.run(parser.parse_args(arguments), write)
