"""Statistics over a cell's pooled records: the claims of nsn's README follow from its printed numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from kvq.report.html import list_metrics, shown_metrics
from kvq.report.tables.build import build_tables
from kvq.report.tables.experiments import Asked, CellRun, address, by_signature, shown_cells
from kvq.report.tables.layout import measured
from kvq.report.tables.readings import read_reference, read_statistic
from kvq.results import Record, Store
from kvq.results.metrics import METRICS, metric_of
from tests.report.tables.test_experiments import experiment
from tests.results import made

PERCENT = "delta_perplexity_percent"


def of_model(model: str, method: str = "nsn", **metrics: float) -> Record:
    settings = made.config(method, "3", model={"path": model})
    return made.record(method, "3", settings=settings, model=model, metrics=metrics)


def statistic(records: list[Record], metric: str, *full: Record) -> float | None:
    known, value = read_statistic(records, metric, {record.key: record for record in full})
    assert known
    return value


def test_the_main_table_gives_the_claim_of_its_models() -> None:
    rows = [row for row in read_reference().tables["nsn", "main table"] if row.metric != "perplexity"]
    baseline = {row.model: row.value for row in read_reference().tables["nsn", "main table"] if row.method == "FP16"}
    records = [
        of_model(row.model, perplexity=baseline[row.model] + row.value, delta_perplexity=row.value)
        for row in rows
        if row.metric == "delta perplexity"
    ]
    assert len(records) == 8
    assert statistic(records, f"models below 5 of {PERCENT}") == 8
    assert statistic(records, f"models above 4.5 of {PERCENT}") == 2
    printed = sorted(row.value for row in rows if row.metric == "delta perplexity, % of baseline")
    assert statistic(records, f"median of {PERCENT}") == pytest.approx((printed[3] + printed[4]) / 2, abs=0.01)


def test_a_reduction_is_of_pairs_by_model() -> None:
    losses: dict[str, tuple[float, float]] = {"a": (0.1, 0.4), "b": (0.5, 1.0)}
    records = [
        of_model(model, str(place), delta_perplexity=x) for model in losses for place, x in enumerate(losses[model])
    ]
    assert statistic(records, "mean reduction in percent of delta_perplexity") == pytest.approx((75 + 50) / 2)
    assert statistic(records[:3], "mean reduction in percent of delta_perplexity") is None


def test_a_rank_correlation_is_over_models_whatever_run_has_the_metric() -> None:
    spread, loss = [0.1, 0.5, 0.2, 0.9, 0.3], [1.0, 9.0, 4.0, 8.0, 3.0]
    records: list[Record] = []
    for model, (x, y) in enumerate(zip(spread, loss, strict=True)):
        records += [of_model(str(model), value_cv_layer0=x), of_model(str(model), "rtn", delta_perplexity=y)]
    expected = scipy.stats.spearmanr(spread, loss)

    def rho(order: list[float]) -> float:
        return float(scipy.stats.spearmanr(spread, order).statistic)

    exact = scipy.stats.permutation_test((loss,), rho, permutation_type="pairings", n_resamples=math.factorial(5))
    name = "spearman of value_cv_layer0 and delta_perplexity"
    assert statistic(records, name) == pytest.approx(expected.statistic)
    assert statistic(records, f"p of {name}") == pytest.approx(exact.pvalue)
    assert statistic(records[:-1], name) is None


@pytest.mark.parametrize(("found", "full", "p"), [(25, 29, 0.194), (23, 30, 0.0105)])
def test_fishers_test_is_of_pooled_items(found: int, full: int, p: float) -> None:
    """The needles of nsn's README: 0.194 is printed, 0.0105 stands in the note of the other."""

    def run(model: str, hits: float, **changes: Any) -> Record:
        settings = made.config(str(changes), "3", model={"path": model})
        metrics = {"accuracy": hits / 10, "items": 10.0}
        return made.record("nsn", "3", settings=settings, model=model, metrics=metrics, **changes)

    plain = [run("a", full - 20), run("b", 10), run("c", 10)]
    records = [
        run(base.model, hits, baseline_key=base.key) for base, hits in zip(plain, (found - 20, 10, 10), strict=True)
    ]
    assert statistic(records, "fisher p of accuracy", *plain) == pytest.approx(p, rel=0.01)
    assert statistic(records, "fisher p of accuracy", *plain[:2]) is None
    assert statistic(records, "change of accuracy", *plain) == pytest.approx((found - full) / 30)


def test_a_metric_is_no_statistic() -> None:
    assert read_statistic([of_model("a", perplexity=1.0)], "perplexity", {}) == (False, None)


def test_a_cell_shows_a_statistic_of_all_its_runs() -> None:
    records = [of_model(model, delta_perplexity=loss) for model, loss in (("a", 1.0), ("b", 2.0), ("c", 7.0))]
    runs = tuple(CellRun("x", address(record).signature) for record in records)
    cell = Asked({"method": "one"}, "median of delta_perplexity", runs)
    [shown] = shown_cells(experiment(records, cells=(cell,), table=None), by_signature(records), read_reference())
    assert shown.value == 2.0
    lacking = [of_model("a", perplexity=3.0)]
    cell = Asked({"method": "one"}, "median of delta_perplexity", (CellRun("x", address(lacking[0]).signature),))
    [shown] = shown_cells(experiment(lacking, cells=(cell,), table=None), by_signature(lacking), read_reference())
    assert shown.reason == "the run has no metric 'median of delta_perplexity'"


QUIZ = {"name": "quiz", "questions": 8}


def put(store: Store, method: str, value: float, unit: str | None) -> Record:
    units = {} if unit is None else {"accuracy": unit}
    config = made.config(method, "2", QUIZ)
    return store.put(
        made.record(method, "2", settings=config, task="quiz", metrics={"accuracy": value}, units=units), []
    )


@pytest.mark.parametrize(
    ("value", "unit", "title", "text"),
    [(75.0, "%", "accuracy (%)", "75.0000"), (0.75, "fraction", None, "75.0"), (0.75, None, None, "75.0")],
)
def test_a_number_has_the_unit_of_its_record(
    tmp_path: Path, value: float, unit: str | None, title: str | None, text: str
) -> None:
    store = Store(tmp_path)
    put(store, "kivi", value, unit)
    (table,) = build_tables(store).tables
    (column,) = measured(table)
    assert (column.title, column.cell(table.rows[0])) == (title or METRICS["accuracy"].title, text)


def test_two_units_of_a_metric_stand_in_two_columns_and_the_page_shows_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    records = [put(store, "kivi", 75.0, "%"), put(store, "nsn", 0.5, "fraction")]
    (table,) = build_tables(store).tables
    shown = {column.title: [column.cell(row) for row in table.rows] for column in measured(table)}
    assert {title: sorted(cells) for title, cells in shown.items()} == {
        "accuracy (%)": ["75.0000", "–"],
        METRICS["accuracy"].title: ["50.0", "–"],
    }
    described = list_metrics(records)
    assert described == {"accuracy": metric_of("accuracy", "%")}
    assert [shown_metrics(record, described) for record in records] == [["accuracy"], []]
