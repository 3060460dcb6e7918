"""How the page names, rounds and judges what a run measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from kvq.results import Record
from kvq.results.direction import is_lower_better

Better = Literal["lower", "higher", ""]
_MOST_COLUMNS = 8


class Metric(NamedTuple):
    """A measured quantity: its title with the unit, a short one, decimals and factor of what is shown."""

    title: str
    short: str
    digits: int = 3
    scale: float = 1.0
    signed: bool = False
    better: Better = ""


SIZES = {
    "bits_per_element": Metric("Measured bits/element", "Measured", 3),
    "effective_bits": Metric("Effective bits/element", "Effective", 3),
}
"""What a run costs: bits of the packed cache, and with the residual in full precision."""

QUALITY = {
    "perplexity": Metric("Perplexity", "PPL", 3, better="lower"),
    "delta_perplexity": Metric("Δppl", "Δppl", 3, signed=True, better="lower"),
    "delta_nll": Metric("ΔNLL (nats/token)", "ΔNLL", 4, signed=True, better="lower"),
    "kl_mean": Metric("KL mean (nats)", "KL", 4, better="lower"),
    "kl_p99": Metric("KL p99 (nats)", "KL p99", 3, better="lower"),
    "top1_agreement": Metric("Top-1 agreement (%)", "Top-1 %", 2, 100.0, better="higher"),
    "accuracy": Metric("Accuracy (%)", "Accuracy %", 1, 100.0, better="higher"),
    "delta_accuracy": Metric("Δ accuracy (points)", "Δ", 1, 100.0, True, "higher"),
    "score": Metric("Score (%)", "Score %", 1, 100.0, better="higher"),
    "delta_score": Metric("Δ score (points)", "Δ", 1, 100.0, True, "higher"),
    "lost": Metric("Lost (items)", "Lost", 0, better="lower"),
    "gained": Metric("Gained (items)", "Gained", 0, better="higher"),
    "wrong_needle": Metric("Wrong needle (%)", "Wrong %", 1, 100.0, better="lower"),
    "bit_mixing": Metric("Bit-mixing (%)", "Mixed %", 1, 100.0, better="lower"),
    "other": Metric("Other answers (%)", "Other %", 1, 100.0, better="lower"),
    "rouge_l": Metric("ROUGE-L against full precision (%)", "ROUGE-L %", 1, 100.0, better="higher"),
}


def describe(records: Iterable[Record]) -> dict[str, Metric]:
    """Every metric of the records by name: those known first, in their order, the others with their unit."""
    units: dict[str, str] = {}
    for record in records:
        for name in record.metrics:
            units.setdefault(name, record.units.get(name, "1"))
    known = {name: metric for name, metric in (SIZES | QUALITY).items() if name in units}
    others = {
        name: Metric(f"{name} ({units[name]})", name, 4, better="lower" if is_lower_better(name) else "")
        for name in sorted(units)
        if name not in known
    }
    return known | others


def columns(records: Iterable[Record]) -> list[str]:
    """Metrics that a table of one task shows: quality where the task measures it, else the first that it measured."""
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    quality = [name for name in QUALITY if name in names]
    rest = [name for name in names if name not in SIZES and not name.endswith("_se")]
    return (quality or rest)[:_MOST_COLUMNS]


def error_of(name: str, metrics: Mapping[str, Any]) -> str | None:
    """Name of a metric's standard error, where the run has one."""
    return f"{name}_se" if f"{name}_se" in metrics else None
