"""Text of records is text in a spreadsheet and on a terminal, and what is no number or no sample is named."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from kvq.cli import main as run
from kvq.errors import RecordError, printable
from kvq.report import command
from kvq.report.figures import drawing
from kvq.report.tables.formats import csv_of, plain_cell, print_tables
from kvq.results import Store
from kvq.results.record import dump_record, parse_record
from tests.report import sweeps
from tests.results import made

FORMULAS = ["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", "\t=1", " =1", "\n=1"]
NUMBERS = ["-0.5", "+3", "-1e-9", "-", "3", "", "a=b", "method", "-inf"]
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202e\x00\x08"


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_are_text_in_every_csv(tmp_path: Path, text: str) -> None:
    assert plain_cell(text) == f"'{text}"
    assert list(csv.reader(io.StringIO(csv_of([{text: text, "b": -1.5}])))) == [[f"'{text}", "b"], [f"'{text}", "-1.5"]]
    drawing.save(drawing.panels(1, 1)[0], pd.DataFrame({text: [text], "b": [-1.5]}), tmp_path, "a")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.reader(file))
    assert found == [[f"'{text}", "b"], [f"'{text}", "-1.5"]]


def test_a_carriage_return_ends_no_row() -> None:
    rows = list(csv.reader(io.StringIO(csv_of([{"a": "x\r=1", "b": "y\r\nz"}]), newline="")))
    assert rows == [["a", "b"], ["x\n=1", "y\nz"]]


@pytest.mark.parametrize("value", [*NUMBERS, -0.5, None, True, 3])
def test_other_cells_stay_as_they_are(value: object) -> None:
    assert plain_cell(value) is value


def test_no_control_character_reaches_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    baseline = sweeps.sweep(store)["fp16"]
    settings = made.config(ESCAPES, "2")
    odd = sweeps.put_run(
        store,
        f"{ESCAPES}a",
        "2",
        sweeps.losses(0.4, 0.01, 77),
        baseline,
        2.5,
        config=settings,
        key=made.record("x", settings=settings).key,
        dataset=f"pydocs{ESCAPES}",
        model=f"tiny{ESCAPES}",
    )
    out = io.StringIO()
    print_tables(store, Console(file=out, width=400))
    assert odd.method not in out.getvalue()
    assert printable(out.getvalue()) == out.getvalue()
    (store.runs / f"{ESCAPES.replace(chr(0), '')}.json").write_text("{}", encoding="utf-8")
    command.say_skipped(store.scan()[1])
    assert run([f"method={ESCAPES[:5]}"]) == 2
    said = capsys.readouterr().err
    assert "skipped" in said
    assert printable(said) == said


@pytest.mark.parametrize("value", ["1.5", True, False, "", "nan", None, [1.0]])
@pytest.mark.parametrize("where", ["metrics", "wall_seconds"])
def test_a_metric_that_is_no_number_is_refused(value: Any, where: str) -> None:
    data = json.loads(dump_record(made.record("kivi", "2", metrics={"nll": 1})))
    holder = data["provenance"] if where == "wall_seconds" else data
    holder[where]["load" if where == "wall_seconds" else "nll"] = value
    with pytest.raises(RecordError, match=rf"{where}\.(nll|load): ") as caught:
        parse_record(json.dumps(data).encode())
    assert "\n" not in str(caught.value)


def test_a_sample_that_cannot_be_stored_names_its_record(tmp_path: Path) -> None:
    record = made.record("kivi", "2")
    with pytest.raises(RecordError, match=rf"^record {record.key[:12]}: sample 0: 'nll' is nan"):
        Store(tmp_path).put(record, [{"window": 0, "nll": float("nan")}])
