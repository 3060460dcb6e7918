"""Figures of tasks whose metrics are shares: a bar for each run and quantity."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.report.figures.error import bars_figure
from kvq.results import Store
from kvq.results.metrics import IN_FLIGHT, total_bits
from kvq_lab.figures import shares_table
from kvq_lab.totals import totals_figure, totals_table

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


def test_bits_in_all_of_committed_runs_at_two_shapes() -> None:
    """Rivals of waterfill are those that keep the first token; at the larger shape its tables are far larger."""
    store = Store(RESULTS)
    runs = [one for one in store.scan()[0] if one.model == "smollm2_135m" and one.dataset == "wikitext2"]
    runs = [one for one in runs if one.task == "ppl" and one.status == "done" and one.baseline_key is not None]
    table = totals_table([one for one in runs if one.config["task"]["scoring"] == "parallel"], store)
    assert {"waterfill", "waterfill_kv", "nsnquant, sink tokens 1"} <= set(table["method"])
    assert "nsnquant" not in set(table["method"])
    one = table[(table["method"] == "waterfill_kv") & (table["bits"] == "2.25")].set_index(["shape", "in_flight"])
    run = next(r for r in runs if (r.method, r.bits, r.label) == ("waterfill_kv", "2.25", "waterfill_kv"))
    for name, tokens in IN_FLIGHT.items():
        assert one.loc[("smollm2_135m", name), "total_bits"] == total_bits(run.metrics, tokens)
        assert one.loc[("8B", name), "total_bits"] > one.loc[("smollm2_135m", name), "total_bits"]
    made = totals_figure(table, "a title")
    assert len(made.axes) == 2 * len(IN_FLIGHT)
    assert sorted({line.get_label() for line in made.axes[0].lines}) == sorted(set(table["method"]))
