"""Where less is better, a run that scores less is the better one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvq.report.comparisons import read_records
from kvq.report.html import list_metrics
from kvq.results import Store
from kvq.results.metrics import is_lower_better
from tests.results import made


@pytest.mark.parametrize(
    ("metric", "lower"),
    [("word_perplexity/none[wikitext]", True), ("brier_score", True), ("acc/none[x]", False), ("exact_match", False)],
)
def test_directions(metric: str, lower: bool) -> None:
    assert is_lower_better(metric) == lower
    record = made.record("kivi", "2", metrics={metric: 1.0})
    assert list_metrics([record])[metric].better == ("lower" if lower else "")


@pytest.mark.parametrize(("metric", "kept"), [("acc", 1.0), ("brier_score", 0.0)])
def test_a_larger_error_is_not_called_no_worse(tmp_path: Path, metric: str, kept: float) -> None:
    store = Store(tmp_path)
    task = {"name": "lm_eval", "margin": 0.1}

    def put(method: str, score: float, **more: Any) -> str:
        rows = [{"item": str(item), "score": score, "metric": metric} for item in range(200)]
        settings = made.config(method, "2", task=task)
        return store.put(made.record(method, "2", settings=settings, metrics={"items": 200.0}, **more), rows).key

    full = put("fp16", 0.3)
    key = put("kivi", 0.9, baseline_key=full)
    (judged,) = [record for record in read_records(store)[0] if record.key == key]
    assert judged.metrics["not_worse"] == kept
