"""Figures of tasks whose metrics are shares: a bar for each run and quantity."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvq.methods.policies import GqaCompensation
from kvq.report.figures.error import bars_figure
from kvq.results import Store
from kvq.results.metrics import IN_FLIGHT, total_bits
from kvq_lab.figures import least_bits, marginal_figure, marginal_tables, shares_table
from kvq_lab.totals import totals_figure, totals_table

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.mark.parametrize("task", ["speculate", "reuse"])
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


def test_the_least_bits_of_shared_heads_meet_their_bound() -> None:
    """Six query heads of a KV head, 0.066 (KVQuant++, section 7): 4.0 bits by its derivation, 2.0 as it prints it."""

    def bound(bits: float) -> float:
        return 6 * math.sqrt(3) * math.pi / 2 * 4.0**-bits

    assert bound(least_bits(6, 0.066)) == pytest.approx(0.066)
    assert bound(least_bits(6, 0.066, factor=0.5)) > 15 * 0.066
    assert (least_bits(6, 0.066), least_bits(6, 0.066, 0.5)) == pytest.approx((3.98, 1.99), abs=0.01)
    for shared in (1, 2, 3, 4, 6, 7, 8, 16, 32):
        extra = GqaCompensation().extra_bits(SimpleNamespace(num_attention_heads=shared, num_key_value_heads=1))
        raised = least_bits(1, 0.01) + extra
        assert -1e-9 <= raised - least_bits(shared, 0.01) < 1


def test_the_marginal_is_drawn_beside_its_limit() -> None:
    runs = [SimpleNamespace(method="kvquant_plus_plus/gqa")]
    ((_, table),) = marginal_tables(runs, Store(RESULTS)).items()  # type: ignore[arg-type]
    for dim, apart in ((8, 0.1), (64, 0.03)):
        part = table[table["panel"] == f"d = {dim}"]
        curves = [part.loc[part["curve"] == curve, ["x", "y"]].to_numpy().T for curve in ("unit vector", "Gaussian")]
        assert [np.trapezoid(y, x) for x, y in curves] == pytest.approx([1, 1], abs=0.01)
        gap = np.abs(curves[0][1] - curves[1][1]).max() / curves[1][1].max()
        assert 0.1 * apart < gap < apart
    made = marginal_figure(table, "a title")
    assert [axis.get_ylabel() for axis in made.axes] == ["density", "density", "bits"]
    assert marginal_tables([], Store(RESULTS)) == {}
