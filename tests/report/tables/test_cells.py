"""A record's own unit wins over that of a listed metric, and two units never share a column."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.report.html import list_metrics, shown_metrics
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import measured
from kvq.results import Record, Store
from kvq.results.metrics import METRICS, metric_of
from tests.results import made

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
