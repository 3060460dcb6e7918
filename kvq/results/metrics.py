"""The registry of metrics, `metrics.csv`: unit, whether less is better, title and number format of each.

A metric that is not listed (of a task outside the package, of lm-eval) is shown by its name with its record's unit.
A part, `accuracy[length=512]`, is the quantity before the bracket.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from kvq.errors import RecordError

IN_FLIGHT = {"1K": 2**10, "8K": 2**13, "32K": 2**15, "128K": 2**17, "1M": 2**20}
"""Tokens in flight, those of all sequences together, at which tables are counted with what tokens store."""
SMALL = 0.01
"""Bits per element of 32K tokens, below which tables are not worth a word."""


class Metric(NamedTuple):
    """A measured quantity.

    Attributes:
        name: as records spell it.
        unit: of the number in a record.
        title: with the unit that is shown.
        short: title for a narrow column.
        digits, scale, signed: decimals, the factor of what is shown (100: percent), whether a plus sign is shown.
        better: whether less or more is better; empty: neither.
        role: `size` (what a run costs), `quality` (what it scores), empty (bookkeeping).
    """

    name: str
    unit: str
    title: str
    short: str
    digits: int = 3
    scale: float = 1.0
    signed: bool = False
    better: Literal["lower", "higher", ""] = ""
    role: Literal["size", "quality", ""] = ""


_TEXT = (Path(__file__).parent / "metrics.csv").read_text(encoding="utf-8")
# Its columns are the attributes of `Metric`; an empty field is the default.
_ROWS = [{name: value for name, value in row.items() if value} for row in csv.DictReader(_TEXT.splitlines())]
_LISTED = TypeAdapter(list[Metric]).validate_python(_ROWS)
METRICS = {metric.name: metric for metric in _LISTED if not metric.name.endswith("_*")}
AT_LENGTH = {
    (name := metric.name.removesuffix("_*")): metric._replace(name=name)
    for metric in _LISTED
    if metric.name not in METRICS
}
"""Metrics of `task=memory`, which a record has for each number of tokens: `total_bytes_4096`."""
# Metrics of lm-eval of which less is better; of the others more is, unless they are listed above.
_LOWER = ("word_perplexity", "byte_perplexity", "bits_per_byte", "loss", "brier_score", "mse", "mae", "rmse")
_LOWER_TOO = ("wer", "cer", "ter", "toxicity")
_AT_LENGTH = re.compile(rf"({'|'.join(AT_LENGTH)})_(\d+)")


def length_of(name: str) -> int | None:
    """The number of tokens of a metric of `AT_LENGTH`; None: of another."""
    match = _AT_LENGTH.fullmatch(name)
    return None if match is None else int(match[2])


def metric_of(name: str, unit: str | None = None) -> Metric:
    """The listed metric of this name; of one not listed, or with another unit, its name, `unit` and four decimals.

    A record's unit wins: 75 % of a task outside the package is no 7,500 % because a listed metric is a fraction.
    """
    listed = METRICS.get(name)
    if listed is not None and unit in (None, listed.unit):
        return listed
    if match := _AT_LENGTH.fullmatch(name):
        known, tokens = AT_LENGTH[match[1]], f"at {int(match[2]):,} tokens"
        return known._replace(name=name, title=f"{known.title}, {tokens}", short=f"{known.short} {tokens}")
    shown = name if unit in (None, "1") else f"{name} ({unit})"
    return Metric(name, unit or "1", shown, name, 4, better="lower" if is_lower_better(name) else "")


def is_lower_better(name: str) -> bool:
    """Whether less is better, by the name: `word_perplexity/none[wikitext]` is a perplexity."""
    quantity = re.split(r"[\[/,]", name, maxsplit=1)[0].lower().removeprefix("delta_")
    known = METRICS.get(quantity)
    return known.better == "lower" if known is not None and known.better else quantity in (*_LOWER, *_LOWER_TOO)


def units_of(names: Iterable[str], more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Units of metrics; a part and a standard error have that of the whole. `more`: of those not listed here."""
    known = dict(more or {}) | {metric.name: metric.unit for metric in METRICS.values()}
    found = {name: known.get(name.partition("[")[0].removesuffix("_se")) or known.get(name) for name in names}
    if lacking := [name for name, unit in found.items() if unit is None]:
        raise RecordError(f"metric '{lacking[0]}': no unit is known; add it to METRICS, kvq/results/metrics.csv")
    return {name: unit for name, unit in found.items() if unit is not None}


def table_bits(metrics: Mapping[str, float], tokens: float) -> float | None:
    """Bits of a run's calibrated tables per element of so many tokens in flight; None: the record does not say.

    All sequences share the tables: 8 sequences of 4K tokens are 32K tokens in flight. Without tables 0.
    """
    share = metrics.get("calibration_bits_32k", None if metrics.get("calibration_bytes") else 0.0)
    return None if share is None else share * IN_FLIGHT["32K"] / tokens


def total_bits(metrics: Mapping[str, float], tokens: float) -> float | None:
    """Bits per element of a run's packed tokens, its tables counted over so many tokens in flight."""
    bits, tables = metrics.get("bits_per_element"), table_bits(metrics, tokens)
    return None if bits is None or tables is None else bits + tables


def break_even(metrics: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> tuple[float, int | None] | None:
    """Tokens in flight from which a method with calibrated tables stores fewer bits than the best method without.

    The other is the smallest of `others`, metrics of runs of the same protocol, without tables whose loss is no higher.
    Returns the tokens (infinite: never) and the index of that run; 0 and None where all others lose more; None where
    the run's tables are below `SMALL`, or a metric is missing.
    """
    tables, bits, loss = table_bits(metrics, 1.0), metrics.get("bits_per_element"), metrics.get("delta_nll")
    least = SMALL * IN_FLIGHT["32K"]
    if tables is None or bits is None or loss is None or tables < least:
        return None
    no_worse = [
        (other["bits_per_element"], place)
        for place, other in enumerate(others)
        if {"bits_per_element", "delta_nll"} <= other.keys()
        and other["delta_nll"] <= loss
        and ((own := table_bits(other, 1.0)) is not None and own < least)
    ]
    if not no_worse:
        return 0.0, None
    size, place = min(no_worse)
    return (tables / (size - bits) if size > bits else math.inf), place
