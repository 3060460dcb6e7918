"""Figures of tasks whose metrics are shares: a bar for each run and quantity."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.report.figures.error import bars_figure
from kvq.results import Store
from kvq_lab.figures import shares_table

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.mark.parametrize("task", ["tools", "speculate", "reuse"])
def test_bars_are_the_metrics_of_committed_runs(task: str) -> None:
    store = Store(RESULTS)
    runs = [record for record in store.scan()[0] if record.task == task and record.model == "smollm2_135m"]
    table = shares_table(runs, store)
    assert len(table) > len(runs) > 10
    one = table[table["method"] == "kivi 2"].iloc[0]
    assert one["mean"] in next(run for run in runs if (run.method, run.bits) == ("kivi", "2")).metrics.values()
    made = bars_figure(table, "a title")
    assert [axis.get_xlabel() for axis in made.axes] == list(dict.fromkeys(table["quantity"]))
    assert all(len(axis.patches) == table["method"].nunique() for axis in made.axes)
