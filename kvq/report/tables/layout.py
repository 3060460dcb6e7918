"""Tables before they are written as Markdown, CSV, LaTeX or on a terminal: rows, columns, the text of cells."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvq.report.labels import read_with_plugins
from kvq.results import Broken, Record
from kvq.results.metrics import AT_LENGTH, IN_FLIGHT, METRICS, Metric, length_of, metric_of, total_bits

DASH = "–"
UNQUANTIZED = "nothing quantized"
"""Shown in place of a difference from full precision where no token was quantized."""
LISTED = read_with_plugins(Path(__file__).with_name("columns.yaml"))
"""What tables show."""
# Most columns of parts (lengths, subsets, tasks) that a table shows; more stand in its CSV.
_SHOWN_PARTS = 8
_PART = re.compile(r"(?P<name>\w+)\[(?P<part>length|subset|task|bucket|turn)=(?P<value>.+)\]")


@dataclass(frozen=True)
class Row:
    """One run. `name` is its label, with the settings in which it differs from other rows of that label.

    `variant`: departs from a preset and takes no part in the frontier; `unquantized`: every item was shorter than the
    residual; `best`, `best_measured`: on the frontier of effective, of measured bits; `p_value`: of its difference to
    full precision, corrected for all rows (Holm); `tokens`: the length of a line of `task=memory`; `pays`: of a run
    with tables, its `break_even` in tokens in flight, and the name of the run that it then undercuts.
    """

    record: Record
    name: str
    bits: str
    baseline: bool = False
    within_noise: bool = False
    best: bool = False
    best_measured: bool = False
    stale: bool = False
    footnote: int | None = None
    p_value: float | None = None
    variant: bool = False
    unquantized: bool = False
    tokens: int | None = None
    pays: tuple[float, str] | None = None

    @property
    def pays_text(self) -> str:
        """In words: from how many tokens in flight on its calibrated tables pay, and which rival it then undercuts."""
        tokens, rival = self.pays or (0, "")
        said = f"{tokens:,.0f} ({rival})" if math.isfinite(tokens) else f"never ({rival})"
        return DASH if self.pays is None else said if rival else "any"


@dataclass(frozen=True)
class Continuation:
    """A run's text: what is `same` as full precision's, the word that differs, the rest; `shared`: in words."""

    name: str
    shared: str
    same: str
    differs: str
    rest: str


@dataclass(frozen=True)
class Texts:
    """A prompt and its continuations, full precision's first."""

    prompt: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True)
class Sheet:
    """A table as text that is not escaped, which is written as Markdown and LaTeX and printed on a terminal.

    `left`: columns aligned left, the others are numbers; `short`: titles of columns for a terminal; `bold`: (row,
    column) of cells in bold; `label`: for `\\ref`; `comments`: lines in LaTeX alone, such as commands.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int]
    short: Sequence[str] = ()
    bold: Collection[tuple[int, int]] = ()
    label: str = ""
    notes: Sequence[str] = ()
    comments: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """Runs of one protocol; `words`: what departs from presets; `about`: the protocol in a line, for figures."""

    slug: str
    title: str
    protocol: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    words: str = ""
    about: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    texts: Texts | None = None

    @property
    def page(self) -> str:
        """The name of the Markdown file that has this table and all others of its task, model and data set."""
        return self.slug.rpartition("-")[0]

    @property
    def lines(self) -> tuple[Row, ...]:
        """The rows as they are shown: of `task=memory` one for each run and length, shortest length first."""
        if not self.is_of_memory:
            return self.rows
        lengths = [{n for name in row.record.metrics if (n := length_of(name))} for row in self.rows]
        known = [(tokens, row) for row, own in zip(self.rows, lengths, strict=True) for tokens in own]
        without = [row for row, own in zip(self.rows, lengths, strict=True) if not own]
        return (*(replace(row, tokens=n) for n, row in sorted(known, key=lambda pair: pair[0])), *without)

    @functools.cached_property
    def sheet(self) -> Sheet:
        """The text of `lines`."""
        columns, lines = columns_of(self), self.lines
        return Sheet(
            title=self.title,
            header=[column.title for column in columns],
            rows=[[column.cell(row) for column in columns] for row in lines],
            left=[place for place, column in enumerate(columns) if column is COLUMNS[0]],
            short=[column.short for column in columns],
            bold={(r, c) for r, row in enumerate(lines) if row.best for c, one in enumerate(columns) if one is _MAIN},
            label=f"tab:{self.slug}",
            notes=self.notes,
        )

    @property
    def is_of_memory(self) -> bool:
        """Whether the runs of this table measured bytes at several lengths."""
        return bool(self.rows) and self.rows[0].record.task == "memory"


@dataclass(frozen=True)
class Tables:
    """All tables of a store, and the files in it that are not records."""

    tables: tuple[Table, ...]
    broken: tuple[Broken, ...] = ()


class Column(NamedTuple):
    """A column: its title with the unit, a short one for a terminal, the text of its cells."""

    title: str
    short: str
    cell: Callable[[Row], str]


def fixed(value: float, digits: int, signed: bool = False) -> str:
    """`value` with `digits` decimals; from 10,000 on in three significant digits."""
    sign = "+" if signed else ""
    if abs(value) >= 1e4:
        return f"{value:{sign}.3g}"
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"  # + 0.0 turns a rounded -0.0 into 0.0


def _number(row: Row, metric: Metric, with_error: bool = False) -> str:
    """A metric of a run as text, with its standard error if `with_error`; a dash where it lacks it in this unit."""
    value, error = (row.record.metrics.get(f"{metric.name}{end}") for end in ("", "_se"))
    if value is None or row.record.units.get(metric.name, metric.unit) != metric.unit:
        return DASH
    after = f" ± {fixed(error * metric.scale, metric.digits)}" if with_error and error is not None else ""
    return fixed(value * metric.scale, metric.digits, metric.signed) + after


def _difference(row: Row, metric: Metric) -> str:
    """A difference from full precision, with its standard error."""
    text = _number(row, metric, with_error=True)
    if text != DASH and row.unquantized:
        return UNQUANTIZED
    return f"≈ {text}" if row.within_noise and text != DASH else text


def _main(row: Row, metric: Metric) -> str:
    """The metric that a table is about (perplexity, accuracy); of a failed run a dash with the number of its note."""
    return _number(row, metric) if row.footnote is None else f"{DASH} [{row.footnote}]"


def _column(name: str, text: Callable[..., str] = _number, unit: str | None = None, **more: Any) -> Column:
    """A column of a metric in a unit (None: its own); `text` makes a cell from a row, the metric and `more`."""
    metric = metric_of(name, unit)
    return Column(metric.title, metric.short, functools.partial(text, metric=metric, **more))


_DELTA_NLL = _column("delta_nll", _difference)._replace(title="ΔNLL ± SE (nats/token)", short="ΔNLL ± SE")
_MAIN = _column("perplexity", _main)
COLUMNS = (
    Column("Method", "Method", lambda row: f"{row.name} †" if row.stale else row.name),
    Column("Bits", "Bits", lambda row: row.bits),
    *map(_column, ("bits_per_element", "effective_bits")),
    *(_MAIN, _column("delta_perplexity"), _DELTA_NLL),
    *map(_column, ("kl_mean", "kl_p99", "top1_agreement")),
)


def _bits_with_tables(row: Row) -> str:
    """Bits per element of a run with its calibrated tables, at 32K tokens in flight."""
    bits = total_bits(row.record.metrics, IN_FLIGHT["32K"])
    return DASH if bits is None or row.baseline else fixed(bits, 3)


_WITH_TABLES = (
    Column("Total bits/element at 32K tokens in flight, tables counted", "At 32K", _bits_with_tables),
    Column("Tables pay from (tokens in flight; against)", "Pays from", lambda row: row.pays_text),
)
_TOKENS = Column("Tokens", "Tokens", lambda row: DASH if row.tokens is None else f"{row.tokens:,}")


def measured(table: Table) -> list[Column]:
    """A column for each metric that a table's records hold, and for each unit that they give it in."""
    rows = [row for row in table.rows if not row.baseline] or table.rows
    pairs = {(name, row.record.units.get(name)) for row in rows for name in row.record.metrics}
    pairs -= {(name, None) for name, unit in pairs if unit is not None}

    def natural(pair: tuple[str, str | None]) -> tuple[Any, str]:
        """Sort key under which 512 comes before 1024."""
        pieces = re.split(r"(\d+)", pair[0])
        return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces], pair[1] or ""

    return [_column(name, unit=unit) for name, unit in sorted(pairs, key=natural)]


def is_of_items(table: Table) -> bool:
    """Whether the runs of a table scored items, not windows of a text."""
    return any("items" in row.record.metrics for row in table.rows)


def is_of_diagnostics(table: Table) -> bool:
    """Whether the runs of a table are of a diagnostic task or one outside the package, with metrics of its own."""
    return bool(table.rows) and table.rows[0].record.task not in LISTED["chosen"] and not is_of_items(table)


def is_of_texts(table: Table) -> bool:
    """Whether the runs of a table wrote texts."""
    return bool(table.rows) and table.rows[0].record.task in LISTED["written"]


def columns_of(table: Table) -> tuple[Column, ...]:
    """The columns of a table: those of perplexity, or what its runs measured on items."""
    names = {name for row in table.rows for name in row.record.metrics}
    task = table.rows[0].record.task if table.rows else ""

    def known(listed: str, of: str = "") -> list[Column]:
        """Columns of those listed metrics (`LISTED`) that the table has; `of`: a key of the list."""
        return [_column(name) for name in (LISTED[listed][of] if of else LISTED[listed]) if name in names]

    if table.is_of_memory:
        lengths = {name.rpartition("_")[0] for name in names}
        known_metrics = [metric for name, metric in AT_LENGTH.items() if name in lengths]

        def at_length(row: Row, metric: Metric) -> str:
            return _number(row, metric._replace(name=f"{metric.name}_{row.tokens}"))

        cells = [Column(one.title, one.short, functools.partial(at_length, metric=one)) for one in known_metrics]
        return (*COLUMNS[:2], _TOKENS, *cells)
    if is_of_diagnostics(table):
        return (*COLUMNS[:2], *measured(table)[:_SHOWN_PARTS])
    if is_of_texts(table):
        return (*COLUMNS[:4], *(_column(name, with_error=True) for name in LISTED["written"][task]))
    if task in LISTED["continued"]:
        return (*COLUMNS[:4], _column("nll"), _DELTA_NLL, *known("continued", task), *_parts(names, "delta_nll"))
    if not is_of_items(table):
        off = _column("preset_off", _difference)._replace(title="Preset's NLL − engine's ± SE", short="Off ± SE")
        compared = [off, *known("agreement")] if "preset_off" in names else []
        tails = known("tails_of_files" if task == "kld" else "tails")
        counted = _WITH_TABLES if any(row.pays is not None for row in table.rows) else ()
        return (*COLUMNS, *tails, *counted, *compared)
    main = "accuracy" if "accuracy" in names else "score"
    columns = (
        _column(main, _main),
        _column(f"delta_{main}", _difference)._replace(title="Δ ± SE (points)", short="Δ ± SE"),
        Column("Lost, gained (items)", "-/+", _lost_and_gained),
        Column(
            "p (Holm)", "p", lambda row: DASH if (p := row.p_value) is None else "<0.0001" if p < 1e-4 else fixed(p, 4)
        ),
    )
    return (*COLUMNS[:4], *columns, *known("outcomes"), *_parts(names, main))


def _parts(names: set[str], main: str) -> list[Column]:
    """Columns of a metric's parts among these names, `accuracy[length=512]`; none of one part or of too many."""
    found = [(match, name) for name in names if (match := _PART.fullmatch(name)) and match["name"] == main]
    if not 1 < len(found) <= _SHOWN_PARTS:
        return []
    whole, columns = METRICS[main], []
    for match, name in sorted(found, key=lambda pair: (pair[0]["part"], pair[0]["value"].zfill(9))):
        value = match["value"]
        turn = (f"{whole.title}, turn {value}", f"turn {value}")
        titles = turn if match["part"] == "turn" else (f"{value} (%)", value)
        columns.append(Column(*titles, functools.partial(_number, metric=whole._replace(name=name))))
    return columns


def _lost_and_gained(row: Row) -> str:
    """How many items full precision has right and the run has not, and the reverse."""
    lost, gained = row.record.metrics.get("lost"), row.record.metrics.get("gained")
    return DASH if lost is None or gained is None else f"{lost:.0f}, {gained:.0f}"
