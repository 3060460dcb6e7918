"""Which model a reader is shown first."""

from __future__ import annotations

from kvq.report.labels import FEWEST, PREFERRED, main_model
from kvq.results import Record
from tests.results import made


def runs(model: str, count: int, task: str = "ppl") -> list[Record]:
    return [made.record("kivi", "2", task=task, model=model, metrics={"nll": 1.0}) for _ in range(count)]


def test_the_first_preferred_model_with_enough_runs_else_the_one_with_most() -> None:
    first, second = PREFERRED
    assert main_model([]) is None
    assert main_model([*runs("a", 3), *runs("b", 2), *runs("b", 9, task="tni")]) == "a"
    assert main_model([*runs("a", 90), *runs(second, FEWEST)]) == second
    assert main_model([*runs(second, 90), *runs(first, FEWEST - 1)]) == second
    assert main_model([*runs(second, 90), *runs(first, FEWEST)]) == first
    assert main_model(runs("a", 2, task="tni")) == "a"
