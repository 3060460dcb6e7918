"""`kvq leaderboard`: one page of methods by model and budget of measured bits, from nothing but records.

Of each model the decoding protocol with most methods counts. A method's budget is the least that holds its measured
bits. Needles are those of the same method on the same model, where they are on record.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from kvq.errors import RecordError
from kvq.report.comparisons import read_records
from kvq.report.labels import model_name
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Row, Table
from kvq.results import Record, Store, run_key
from kvq.results.files import record_path_of, write_file
from kvq.results.metrics import IN_FLIGHT, total_bits
from kvq.results.presets import part_of
from kvq_lab.words import parse_words, run_command

BUDGETS = (1.25, 2.25, 3.25, 4.25, 8.0)
"""Measured bits per element."""
CONTEXT = 32768
"""Tokens whose bytes are shown."""
_USAGE = """A page of methods by model and budget of measured bits, from records.

  kvq leaderboard [results=FOLDER] [out=FILE]     (default: results, results/leaderboard.html)
"""


@dataclass(frozen=True)
class Entry:
    """A line of the leaderboard; what is not on record is None.

    `totals`: bits per element with tables counted, at the tokens in flight of `IN_FLIGHT`; `pays`: of a method with
    tables, from how many tokens in flight they pay, and against which method (`kvq.results.metrics.break_even`).
    `noise`: within noise of full precision. `frontier`: no method of its table is better at equal or fewer bits beyond
    noise. `engine`: an engine's format, by preset or measured in the engine itself.
    """

    model: str
    budget: float
    method: str
    bits: float
    totals: tuple[float | None, ...]
    pays: str
    loss: float
    error: float | None
    tail: float | None
    needles: float | None
    bytes: float | None
    noise: bool
    frontier: bool
    engine: str
    text: str
    windows: int
    record: str


def budget_of(bits: float) -> float | None:
    """The smallest of `BUDGETS` that is at least `bits` per element; None: `bits` exceeds the largest."""
    return next((budget for budget in BUDGETS if bits <= budget), None)


def list_entries(store: Store) -> list[Entry]:
    """Entries of each model's largest table within the budgets, sorted by model, budget and loss."""
    tables: dict[str, Table] = {}
    records, _ = read_records(store)
    for table in decoding_tables(store, records):
        model = table.rows[0].record.model
        if model not in tables or len(_rows_to_list(table)) > len(_rows_to_list(tables[model])):
            tables[model] = table
    needles = _needles_of(records)
    entries = [
        _make_entry(row, budget, needles.get(_method_key(row.record)))
        for table in tables.values()
        for row in _rows_to_list(table)
        if (budget := budget_of(row.record.metrics["bits_per_element"])) is not None
    ]
    return sorted(entries, key=lambda entry: (entry.model, entry.budget, entry.loss))


def _rows_to_list(table: Table) -> list[Row]:
    """Finished rows of quantized methods with loss and bits, without canaries, variants and stale runs."""
    return [
        row
        for row in table.rows
        if not (row.baseline or row.stale or row.variant or row.unquantized)
        and row.record.status == "done"
        and {"delta_nll", "bits_per_element"} <= row.record.metrics.keys()
        and row.record.method not in ("identity", "zero")
    ]


def _needles_of(records: Iterable[Record]) -> dict[str, float]:
    """By method, bits, residual and model, all settings alike, the share of needles retrieved in the largest run."""
    done = [record for record in records if record.status == "done" and record.task == "niah"]
    done.sort(key=lambda record: record.metrics.get("items", 0))
    return {_method_key(record): record.metrics["accuracy"] for record in done if "accuracy" in record.metrics}


def _method_key(record: Record) -> str:
    return run_key({name: record.config.get(name) for name in ("model", "method", "residual")})


def _make_entry(row: Row, budget: float, needles: float | None) -> Entry:
    record, metrics = row.record, row.record.metrics
    engine = record.provenance.engine or ("by preset" if record.method.startswith("engine/") else "")
    return Entry(
        model=model_name(record.model),
        budget=budget,
        method=f"{row.name} {record.bits}".strip(),
        bits=metrics["bits_per_element"],
        totals=tuple(total_bits(metrics, tokens) for tokens in IN_FLIGHT.values()),
        pays=row.pays_text,
        loss=metrics["delta_nll"],
        error=metrics.get("delta_nll_se"),
        tail=metrics.get("kl_p999"),
        needles=needles,
        bytes=_bytes_at_context(metrics),
        noise=row.within_noise,
        frontier=row.best_measured,
        engine=engine,
        text=record.dataset,
        windows=int(metrics.get("windows", 0)),
        record=record_path_of(record).as_posix(),
    )


def _bytes_at_context(metrics: Mapping[str, float]) -> float | None:
    """Bytes of `CONTEXT` packed tokens of one sequence with the tables; None where the run sized no cache."""
    if not {"total_bytes", "cached_tokens", "effective_bits"} <= metrics.keys() or not metrics["effective_bits"]:
        return None
    per_token = metrics["total_bytes"] / metrics["cached_tokens"] / metrics["effective_bits"]
    return CONTEXT * per_token * metrics["bits_per_element"] + metrics.get("calibration_bytes", 0.0)


def decoding_tables(store: Store, records: Sequence[Record]) -> tuple[Table, ...]:
    """Tables of the records of `task=ppl` with `scoring=generation`."""
    losses = [record for record in records if record.task == "ppl"]
    scored = [record for record in losses if part_of(record.config, "task").get("scoring") == "generation"]
    return build_tables(store, scanned=(scored, [])).tables


def render_page(entries: Sequence[Entry], runs: str = "runs") -> str:
    """The page as HTML without external resources; its only links are to records in the folder `runs`."""
    source = resources.files("kvq_lab").joinpath("leaderboard.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry.model, entry.budget), []).append(asdict(entry))
    models = list(dict.fromkeys(entry.model for entry in entries))
    variables = {"groups": groups, "models": models, "budgets": BUDGETS, "context": CONTEXT, "lengths": IN_FLIGHT}
    return environment.from_string(source).render(**variables, runs=runs)


def _write_leaderboard(words: list[str]) -> int:
    values = {"results": "results"} | parse_words(words, ("results", "out"))
    store = Store(values["results"])
    entries = list_entries(store)
    if not entries:
        raise RecordError(f"no method is on record in '{store.runs}'; measure some: python run.py -m method=nsn,kivi")
    out = Path(values.get("out", str(store.root / "leaderboard.html")))
    try:
        runs = Path(os.path.relpath(store.runs, out.parent)).as_posix()
        write_file(out, render_page(entries, runs).encode(), durable=False)
    except OSError as error:
        raise RecordError(f"out={out}: cannot be written: {error.strerror}") from error
    print(f"{out} ({len(entries)} methods on {len({entry.model for entry in entries})} models)")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and return 0; 1: nothing to show or no place to write it; 2: an unknown word."""
    return run_command(arguments, _USAGE, _write_leaderboard, RecordError, needs_words=False)
