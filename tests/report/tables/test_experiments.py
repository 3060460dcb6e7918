"""Measured beside published, as functions of records made by hand."""

from __future__ import annotations

import csv as csv_reader
import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvq.config.run import LayoutConfig
from kvq.errors import RecordError
from kvq.report.tables import experiments
from kvq.report.tables.experiment_files import csv, fill, grids_of, latex, markdown, slug, write_experiments
from kvq.report.tables.experiments import Answers, Asked, CellRun, Experiment, address, by_signature, shown_cells
from kvq.report.tables.readings import Published, Reference, read_metric, read_reference
from kvq.results import Record
from tests.results import made

NASTY = "python run.py </td><script>alert(1)</script>|$x_1$\\input{/etc/passwd}\n# ../../up"


def published(method: str, value: float, note: str = "") -> Published:
    return Published("paper", "Table 1", "Big", method, "2.25", "", "Text", "perplexity", value, note)


REFERENCE = Reference([published("one", 5.25), published("two", 6.5, "a misprint"), published("three", 7.0)])


def record(method: str, **changes: object) -> Record:
    metrics = {"perplexity": 5.5, "bits_per_element": 2.3, "effective_bits": 2.4, "delta_nll": 0.1, "delta_nll_se": 0.2}
    metrics["within_noise"] = 1.0
    return made.record(method, "2", **({"metrics": metrics, "baseline_key": "b" * 64} | changes))


def experiment(records: list[Record], **changes: object) -> Experiment:
    def asked(method: str, **more: object) -> Asked:
        found = next((r for r in records if r.method == method), None)
        name = address(found).signature if found else None
        known = {"runs": (CellRun(f"python run.py method={method}", name),)} | more
        return Asked({"model": "Big", "method": method, "dataset": "Text"}, "perplexity", **known)

    cells = (asked("one"), asked("two", runs=(CellRun("x", waits="method=two: not in this version"),)), asked("three"))
    known = {"name": "paper/table1", "cells": cells, "runs": 3, "baselines": 1}
    known |= {"stand_ins": {}, "waiting": {"method=two": 1}}
    labels = {"model": ["Big"], "method": ["one", "ours"], "dataset": ["Text"]}
    layout = {"paper": "paper", "table": "Table 1", "title": "A title", "units": "perplexity", "axes": labels}
    layout["names"] = dict.fromkeys(["Big", "one", "ours", "Text"], "")
    layout |= {name: changes.pop(name) for name in ("table", "title", "scale", "own") if name in changes}
    return Experiment(layout=LayoutConfig(**layout), **(known | changes))


def test_measured_published_difference_and_dashes_with_reasons() -> None:
    records = [record("one")]
    [grid] = grids_of(fill(experiment(records), by_signature(records), REFERENCE))
    assert grid.header[:4] == ["method", "published bits", "measured bits", "effective bits"]
    assert grid.rows[0][:4] == ["one", "2.25", "2.300", "2.400"]
    assert grid.rows[0][4].startswith("≈ 5.50")
    noise = [experiments._within_noise(records[0], name) for name in ("nll", "effective_bits", "nll[turn=3]")]
    assert noise == [True, False, False]
    assert "/ 5.25 / +0.25" in grid.rows[0][4]
    assert grid.rows[1] == ["two", "2.25", "–", "–", "– [1] / 6.50* / –"]
    assert grid.rows[2][4] == "– / 7.00 / –"
    notes = "\n".join(grid.notes)
    assert "[1] method=two: not in this version" in notes
    assert "* a misprint" in notes
    assert "Not measured: 1 runs" in notes
    assert "python run.py method=three" in notes
    assert "python run.py +experiment=paper/table1" in notes


def test_a_standard_error_stands_beside_its_number() -> None:
    records = [record("one")]
    asked = replace(experiment(records).cells[0], metric="delta_nll")
    alone = experiment(records, cells=(asked,), table=None, scale=-100.0)
    [grid] = grids_of(fill(alone, by_signature(records), REFERENCE))
    assert grid.rows[0][3] == "≈ -10.0000 ± 20.0000"
    assert "± standard error." in grid.notes
    [row] = csv_reader.DictReader(io.StringIO(csv(fill(alone, by_signature(records), REFERENCE))))
    assert float(row["standard_error"]) == 20
    two = experiment(records, cells=(replace(asked, runs=2 * asked.runs),), table=None)
    assert [cell.error for cell in shown_cells(two, by_signature(records), REFERENCE)] == [None]


def test_of_several_records_the_youngest_that_is_done_counts() -> None:
    times = [made.provenance(started=datetime(2026, 1, day, tzinfo=UTC), dtype=f"float{day}") for day in (1, 2, 3)]
    base = made.config("one", "2")
    records = [
        record(
            "one",
            settings=base | {"model": {"fingerprint": str(index)}},
            provenance=time,
            metrics={"perplexity": index},
        )
        for index, time in enumerate(times)
    ]
    records[2] = records[2].model_copy(update={"status": "failed"})
    assert {found.metrics["perplexity"] for found in by_signature(records).values()} == {1}


def test_times_of_two_machines_never_share_a_table() -> None:
    base = made.config("one", "2")
    records = [
        record(
            "one", settings=base | {"machine": name, "dataset": {"fingerprint": name}}, metrics={"perplexity": value}
        )
        for name, value in (("a GPU", 1.0), ("a CPU", 2.0))
    ]
    assert len(by_signature(records)) == 2
    assert len({found.signature for found in by_signature(records)}) == 1
    name = address(records[0]).signature
    plain = record("two")
    cells = (
        Asked({"model": "Big", "method": "one", "dataset": "Text"}, "perplexity", (CellRun("x", name),)),
        Asked(
            {"model": "Big", "method": "two", "dataset": "Text"},
            "perplexity",
            (CellRun("y", address(plain).signature),),
        ),
    )
    filled = fill(experiment([], cells=cells), by_signature([*records, plain]), REFERENCE)
    grids = grids_of(filled)
    assert [grid.title for grid in grids] == [
        "A title: times on a CPU; Big; Text",
        "A title: times on a GPU; Big; Text",
    ]
    assert [[row[-1].split(" /")[0] for row in grid.rows] for grid in grids] == [["2.00", "≈ 5.50"], ["1.00", "≈ 5.50"]]
    rows = list(csv_reader.DictReader(io.StringIO(csv(filled))))
    assert {(row["machine"], row["method"], row["measured"]) for row in rows} >= {("a CPU", "one", "2.0")}


def test_a_label_of_our_own_is_shown_beside_published_ones() -> None:
    records = [record("one"), record("ours")]
    cells = [
        Asked({"method": method}, "perplexity", (CellRun("x", address(found).signature),))
        for method, found in zip(("one", "ours"), records, strict=True)
    ]
    for own, shown in ((frozenset(), ["one"]), (frozenset({"ours"}), ["one", "ours"])):
        table = experiment(records, cells=tuple(cells), own=own)
        found = shown_cells(table, by_signature(records), REFERENCE)
        assert [cell.asked.labels["method"] for cell in found] == shown


def test_pooled_counts_and_metrics_that_follow_from_others() -> None:
    records = [record("one", metrics={"accuracy": 0.5, "items": 10.0})]
    assert read_metric(records[0], "items with accuracy") == 5
    assert read_metric(records[0], "") == 0.5
    assert read_metric(records[0], "perplexity") is None
    relative = record("one", metrics={"perplexity": 11.0, "delta_perplexity": 1.0})
    assert read_metric(relative, "delta_perplexity_percent") == pytest.approx(10.0)
    timed = made.record(
        "nsn", "3", metrics={"decode_b1_t512": 0.02, "decode_over_dynamic_b1_t512": 1.25, "x_1": 1, "x_2": 2}
    )
    assert read_metric(timed, "milliseconds of decode_b1_t*") == pytest.approx(20)
    assert read_metric(timed, "overhead in percent of decode_over_dynamic_b1_t512") == pytest.approx(25)
    assert read_metric(timed, "x_*") is None
    [cell, *_] = shown_cells(experiment(records), by_signature(records), REFERENCE)
    assert cell.reason == "the run has no metric 'perplexity'"


def test_strings_of_records_do_no_harm(tmp_path: Path) -> None:
    records = [record("one", status="failed", reason=NASTY, metrics={})]
    made_up = experiment(records, name="../../up `x`", title=NASTY, waiting={})
    grids = grids_of(fill(made_up, by_signature(records), REFERENCE))
    page, paper = markdown(made_up, grids).split("\n", 3)[3], latex(made_up, grids)
    assert "<script>" not in page
    assert "\\input{" not in paper
    assert "$x_1$" not in paper
    rows = list(csv_reader.DictReader(io.StringIO(csv(fill(made_up, by_signature(records), REFERENCE)))))
    assert len(rows) == 3
    assert "/" not in slug(made_up.name)
    paths = write_experiments([made_up], by_signature(records), REFERENCE, tmp_path / "out")
    assert {path.parent for path in paths} == {tmp_path / "out"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_published_figures_are_read_whole() -> None:
    tables = read_reference().tables
    assert sum(map(len, tables.values())) == 1422
    assert len(tables) == 45


def test_bits_stand_where_they_are_printed_and_an_approximation_says_so() -> None:
    tables = read_reference().tables
    unprinted = [f"Table {number}" for number in (5, 6, 8, 9, 10, 12, 13, 19, 21)]
    assert {row.avg_bits for table in unprinted for row in tables["nsnquant", table]} == {""}
    assert {row.avg_bits for row in tables["nsn", "memory"]} == {""}
    assert {row.dataset for (paper, _), rows in tables.items() if paper == "kvquant-plus-plus" for row in rows} == {""}
    rough = {row.value for rows in tables.values() for row in rows if row.note.startswith("approximate")}
    assert {274, 30.9, 10.3, 88.0} <= rough


def test_an_approximate_figure_has_no_decimals_of_others() -> None:
    rough = Reference([published("one", 5.25), published("three", 274, "approximate: printed without decimals")])
    [grid] = grids_of(fill(experiment([]), Answers(), rough))
    assert [row[-1] for row in grid.rows] == ["– / 5.25 / –", "– / ~274* / –"]


def test_a_torn_reference_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "paper_results.csv"
    for text, said in (
        ("paper,table\na,b\n", "cannot read"),
        (
            "paper,table,model,method,avg_bits,setting,dataset,metric,value,note\n" + "a," * 8 + "x,\n",
            "could not convert",
        ),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RecordError, match=said):
            read_reference(path)
    with pytest.raises(RecordError, match="cannot read"):
        read_reference(tmp_path / "none.csv")
    with pytest.raises(RecordError, match="2 published figures"):
        Reference([published("one", 1.0), published("one", 2.0)]).find("paper", "Table 1", {"method": "one"})


def test_a_run_that_quantized_nothing_says_so() -> None:
    full = made.record("fp16", "", metrics={"perplexity": 5.5, "effective_bits": 32.0})
    metrics = {"perplexity": 5.5, "effective_bits": 32.0, "packed_bytes": 0.0, "delta_nll": 0.0, "delta_nll_se": 0.0}
    records = [record("one", metrics=metrics, baseline_key=full.key), full]
    filled = fill(experiment(records), by_signature(records), REFERENCE)
    [grid] = grids_of(filled)
    assert grid.rows[0][4].startswith("5.50 (nothing quantized) / 5.25")
    assert any(note.startswith("nothing quantized: ") for note in grid.notes)
    assert not any(note.startswith("≈") for note in grid.notes)
    assert [row["unquantized"] for row in csv_reader.DictReader(io.StringIO(csv(filled)))][:2] == ["True", "False"]
    records[0] = record("one", metrics=metrics | {"packed_bytes": 8.0}, baseline_key=full.key)
    assert not any(cell.unquantized for cell in shown_cells(experiment(records), by_signature(records), REFERENCE))
