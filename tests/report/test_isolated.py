"""What breaks an output is named and left out; the rest is made."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import RecordError
from kvq.report.__main__ import main as tables
from kvq.report.comparisons import read_records
from kvq.report.figures.every import file_name
from kvq.report.figures.every import main as figures
from kvq.report.html import list_metrics
from kvq.report.html import main as page
from kvq.results import Broken, Record, Store
from kvq.results.metrics import is_lower_better
from kvq.results.record import parse_record
from tests.report.sweeps import sweep
from tests.results import made


@pytest.mark.parametrize("report", [tables, figures, page])
def test_without_records_each_report_is_one_line(
    report: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(["--results", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no records under" in err


def test_long_names_fit_into_the_names_of_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    sweep(store)
    for seed in (1, 2):
        settings = made.config("x", "2") | {"seed": seed}
        store.put(made.record("x", "2", settings=settings, model="m" * 300, dataset="d" * 300))
    assert tables(["--results", str(tmp_path)]) == 0
    names = [path.name for path in (tmp_path / "tables").glob("*mmm*.csv")]
    assert len(names) == 2
    assert max(map(len, names)) < 200
    assert file_name("a" * 300 + "-1234") != file_name("a" * 300 + "-5678")
    assert len(file_name("a" * 300)) == 200


@pytest.mark.parametrize("date", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_date_that_has_no_utc_is_one_line(date: str) -> None:
    record = made.record("x").model_dump(mode="json")
    record["provenance"]["started"] = date
    with pytest.raises(RecordError, match=r"^not a record: "):
        parse_record(json.dumps(record).encode())


def test_items_are_judged_by_their_samples_not_by_what_was_recorded(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def put(method: str, scores: list[float], **more: object) -> str:
        task = {"name": "longbench", "margin": 0.05}
        record = made.record(method, settings=made.config(method, "", task), task="longbench", **more)
        return store.put(record, [{"item": str(i), "score": score} for i, score in enumerate(scores)]).key

    unsound = {"p_value": 0.0011, "not_worse_p": 4e-8, "not_worse": 1.0, "within_noise": 0.0, "items": 3.0}
    full = put("fp16", [0.03, 0.04, 0.02], metrics={"items": 3.0})
    keys = [put("zero", [0.0] * 3, metrics=unsound, baseline_key=full)]
    keys.append(put("lost", [0.0] * 3, metrics=unsound, baseline_key=full))
    store.samples_path(keys[1]).unlink()
    found = {record.key: record.metrics for record in read_records(store)[0]}
    assert found[keys[0]] == {"items": 3.0, "flips": 1.0, "within_noise": 1.0, "not_worse": 0.0}
    assert found[keys[1]] == {"items": 3.0}
    assert store.get(keys[0]).metrics == unsound  # type: ignore[union-attr]


def test_zero_is_never_not_worse_and_identity_never_worse_on_the_committed_records(
    committed: tuple[list[Record], list[Broken]],
) -> None:
    judged = [record for record in committed[0] if "not_worse" in record.metrics]
    assert judged
    for record in judged:
        if record.metrics.get("accuracy", record.metrics.get("score")) == 0 or record.method == "zero":
            assert record.metrics["not_worse"] == 0
        if record.method == "identity" or record.metrics["flips"] == 0:
            assert record.metrics["within_noise"] == 1
            assert record.metrics.get("p_value", 1) == 1  # too few items have none


def test_tables_load_no_model_library() -> None:
    """Reading results needs neither torch nor transformers."""
    code = "import sys, kvq.report.__main__; print(sorted({'torch', 'transformers', 'kvq.codecs'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
