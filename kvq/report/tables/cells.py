"""The columns of a table and the text of its cells."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from kvq.report.tables.layout import Row, Table

DASH = "–"


class Cell(NamedTuple):
    """Text as it is, not escaped."""

    text: str
    bold: bool = False


class Column(NamedTuple):
    """A column: its title with the unit, a short one for a terminal, its cells."""

    title: str
    short: str
    cell: Callable[[Row], Cell]
    numeric: bool = True


def fixed(value: float, digits: int, signed: bool = False) -> str:
    """`value` with `digits` decimals; from 10,000 on in three significant digits."""
    sign = "+" if signed else ""
    if abs(value) >= 1e4:
        return f"{value:{sign}.3g}"
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"  # + 0.0 turns a rounded -0.0 into 0.0


def _metric(name: str, digits: int, signed: bool = False, scale: float = 1.0) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        value = row.record.metrics.get(name)
        return Cell(DASH if value is None else fixed(value * scale, digits, signed))

    return cell


def _name(row: Row) -> Cell:
    return Cell(f"{row.name} †" if row.stale else row.name)


def _with_footnote(cell: Callable[[Row], Cell]) -> Callable[[Row], Cell]:
    return lambda row: cell(row) if row.footnote is None else Cell(f"{DASH} [{row.footnote}]")


def _perplexity(row: Row) -> Cell:
    if row.footnote is not None:
        return Cell(f"{DASH} [{row.footnote}]")
    return Cell(_metric("perplexity", 3)(row).text, bold=row.best)


def _delta_nll(row: Row) -> Cell:
    delta, error = row.record.metrics.get("delta_nll"), row.record.metrics.get("delta_nll_se")
    if delta is None:
        return Cell(DASH)
    spread = "" if error is None else f" ± {fixed(error, 4)}"
    return Cell(f"{'≈ ' if row.within_noise else ''}{fixed(delta, 4, signed=True)}{spread}")


COLUMNS = (
    Column("Method", "Method", _name, numeric=False),
    Column("Bits", "Bits", lambda row: Cell(row.bits)),
    Column("Measured bits/element", "Meas.", _metric("bits_per_element", 3)),
    Column("Effective bits/element", "Eff.", _metric("effective_bits", 3)),
    Column("Perplexity", "PPL", _perplexity),
    Column("Δppl", "Δppl", _metric("delta_perplexity", 3, signed=True)),
    Column("ΔNLL ± SE (nats/token)", "ΔNLL ± SE", _delta_nll),
    Column("KL mean (nats)", "KL", _metric("kl_mean", 4)),
    Column("KL p99 (nats)", "p99", _metric("kl_p99", 3)),
    Column("Top-1 agreement (%)", "Top-1%", _metric("top1_agreement", 2, scale=100.0)),
)

# What every table begins with.
_RUN = COLUMNS[:4]
# Tasks whose columns are chosen here; a table of any other shows what its records hold.
_CHOSEN = ("ppl", "niah", "longbench", "lm_eval", "multimodal")
# Most columns of parts (lengths, subsets, tasks) that a table shows; more stand in its CSV.
_SHOWN_PARTS = 8
_PART = re.compile(r"(?P<name>\w+)\[(?P<part>length|subset|task|bucket)=(?P<value>.+)\]")
_OUTCOMES = {
    "wrong_needle": ("Wrong needle (%)", "Wrong"),
    "bit_mixing": ("Bit-mixing (%)", "Mix"),
    "bit_mixing_random": ("Bit-mixing of random strings (%)", "Rand."),
    "other": ("Other (%)", "Other"),
    "rouge_l": ("ROUGE-L against full precision (%)", "R-L"),
}


def measured(table: Table) -> list[Column]:
    """A column for each metric that a table's records hold, with its unit."""
    units = {name: unit for row in table.rows for name, unit in row.record.units.items()}
    names = [name for row in table.rows if not row.baseline for name in row.record.metrics]
    names = sorted(set(names or [name for row in table.rows for name in row.record.metrics]), key=_natural)
    titles = {name: f"{name} ({unit})" if (unit := units.get(name, "1")) != "1" else name for name in names}
    return [Column(titles[name], name, _metric(name, 4)) for name in names]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which 512 comes before 1024."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def is_of_items(table: Table) -> bool:
    """Whether the runs of a table scored items, not windows of a text."""
    return any("items" in row.record.metrics for row in table.rows)


def is_of_diagnostics(table: Table) -> bool:
    """Whether the runs of a table are of a diagnostic task or one outside the package, with metrics of its own."""
    return bool(table.rows) and table.rows[0].record.task not in _CHOSEN and not is_of_items(table)


def columns_of(table: Table) -> tuple[Column, ...]:
    """The columns of a table: those of perplexity, or what its runs measured on items."""
    if is_of_diagnostics(table):
        return (*COLUMNS[:2], *measured(table)[:_SHOWN_PARTS])
    if not is_of_items(table):
        return COLUMNS
    names = {name for row in table.rows for name in row.record.metrics}
    main, short = ("accuracy", "Acc%") if "accuracy" in names else ("score", "Score%")
    columns = [
        *_RUN,
        Column(
            f"{main.capitalize()} (%)",
            short,
            _with_footnote(_metric(main, 1, scale=100.0)),
        ),
        Column("Δ ± SE (points)", "Δ ± SE", _difference(main)),
        Column("Lost, gained (items)", "-/+", _lost_and_gained),
        Column("p (Holm)", "p", _p_value),
    ]
    for name, (title, short) in _OUTCOMES.items():
        if name in names:
            columns.append(Column(title, short, _metric(name, 1, scale=100.0)))
    return (*columns, *_parts(names, main))


def _parts(names: set[str], main: str) -> list[Column]:
    found = [(match, name) for name in names if (match := _PART.fullmatch(name)) and match["name"] == main]
    if not 1 < len(found) <= _SHOWN_PARTS:
        return []
    found.sort(key=lambda pair: (pair[0]["part"], pair[0]["value"].zfill(9)))
    return [Column(f"{match['value']} (%)", match["value"], _metric(name, 1, scale=100.0)) for match, name in found]


def _difference(main: str) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        delta, error = (row.record.metrics.get(f"delta_{main}{end}") for end in ("", "_se"))
        if delta is None:
            return Cell(DASH)
        spread = "" if error is None else f" ± {fixed(100 * error, 1)}"
        return Cell(f"{'≈ ' if row.within_noise else ''}{fixed(100 * delta, 1, signed=True)}{spread}")

    return cell


def _lost_and_gained(row: Row) -> Cell:
    lost, gained = row.record.metrics.get("lost"), row.record.metrics.get("gained")
    return Cell(DASH if lost is None or gained is None else f"{lost:.0f}, {gained:.0f}")


def _p_value(row: Row) -> Cell:
    if row.p_value is None:
        return Cell(DASH)
    return Cell("<0.0001" if row.p_value < 1e-4 else fixed(row.p_value, 4))
