"""The model that a reader is shown first where records have several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvq.report.labels import model_name
from kvq.results import Record

PREFERRED = ("smollm2_135m", "tiny_hard")
"""Models in the order in which they are asked: a trained model of some size, then the embedded one with sinks."""
FEWEST = 10
"""Runs of perplexity that a preferred model must have."""


def main_model(records: Iterable[Record]) -> str | None:
    """The first of `PREFERRED` with `FEWEST` runs of perplexity, else the model with most; None: no records."""
    records = list(records)
    counts = Counter(model_name(record.model) for record in records if record.task == "ppl" and record.status == "done")
    counts = counts or Counter(model_name(record.model) for record in records)
    return next(
        (name for name in PREFERRED if counts[name] >= FEWEST), max(counts, key=counts.__getitem__, default=None)
    )
