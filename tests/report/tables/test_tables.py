"""Tables say what the records say: numbers, marks and notes computed here from the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvq
from kvq.errors import RecordError
from kvq.report.comparisons import widths
from kvq.report.labels import by_bits
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import COLUMNS, Row, Table
from kvq.results import Record, Store
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE
from kvq.results.presets import parse_label
from tests.report import sweeps
from tests.results import made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def only(store: Store, **options: Any) -> Table:
    (table,) = build_tables(store, **options).tables
    return table


def cells(row: Row) -> dict[str, str]:
    return {column.title: column.cell(row) for column in COLUMNS}


def row_of(table: Table, record: Record) -> Row:
    (row,) = [row for row in table.rows if row.record.key == record.key]
    return row


def test_rows_stand_in_order_with_their_numbers(store: Store) -> None:
    runs = sweeps.sweep(store)
    table = only(store)
    assert [(row.name, row.bits) for row in table.rows] == [
        ("fp16", "float32"),
        *(("flat", bits) for bits in "234"),
        *(("good", bits) for bits in "234"),
    ]
    assert [row.baseline for row in table.rows] == [True] + [False] * 6
    metrics = runs["good 3"].metrics
    assert cells(row_of(table, runs["good 3"])) == {
        "Method": "good",
        "Bits": "3",
        "Measured bits/element": "3.100",
        "Effective bits/element": "3.100",
        "Perplexity": f"{metrics['perplexity']:.3f}",
        "Δppl": f"{metrics['delta_perplexity']:+.3f}",
        "ΔNLL ± SE (nats/token)": f"{metrics['delta_nll']:+.4f} ± {metrics['delta_nll_se']:.4f}",
        "KL mean (nats)": "0.0123",
        "KL p99 (nats)": "0.456",
        "Top-1 agreement (%)": "98.77",
    }
    full = cells(row_of(table, runs["fp16"]))
    assert full["Perplexity"] == f"{runs['fp16'].metrics['perplexity']:.3f}"
    assert full["Δppl"] == full["ΔNLL ± SE (nats/token)"] == full["KL mean (nats)"] == "–"
    assert "scored: 24 windows, 2400 tokens" in table.protocol
    assert any("context=2048" in line and "windows=sliding" in line for line in table.protocol)


def test_marks_follow_from_the_paired_samples(store: Store) -> None:
    runs = sweeps.sweep(store)
    table = only(store)

    def paired(a: str, b: str) -> tuple[float, float]:
        """Mean and plain standard error of the difference over blocks of 2 windows."""
        sums = [np.array([row["nll"] for row in store.samples(runs[name].key)]) for name in (a, b)]
        blocks = (sums[0] - sums[1]).reshape(-1, 2).sum(1) / (2 * made.TOKENS)
        return float(blocks.mean()), float(blocks.std(ddof=1) / np.sqrt(len(blocks)))

    # Far from the threshold, so that the bootstrap's own error does not matter.
    mean, error = paired("good 4", "fp16")
    assert abs(mean) < error
    assert [row.record.key for row in table.rows if row.within_noise] == [runs["good 4"].key]
    assert cells(row_of(table, runs["good 4"]))["ΔNLL ± SE (nats/token)"].startswith("≈ ")
    # 'good' beats every 'flat' of more bits. Its 4 bits win too, but stand within noise of full precision.
    assert [row.record.key for row in table.rows if row.best] == [runs["good 2"].key, runs["good 3"].key]
    assert {"≈ within noise of full precision.", NOISE_RULE, FRONTIER_RULE} <= set(table.notes)
    mean, error = paired("flat 4", "flat 3")
    assert abs(mean) < error
    (note,) = [note for note in table.notes if note.startswith("flat: ")]
    assert "does not fall beyond noise from 3 to 4 bits" in note
    shown, shown_error = note.split("ΔNLL ")[1].removesuffix(" nats/token.").split(" ± ")
    assert float(shown) == pytest.approx(mean, abs=6e-5)
    assert float(shown_error) == pytest.approx(error, rel=0.15)
    assert any(note.startswith("For all other pairs of bit widths") for note in table.notes)
    assert not any(note.startswith("good: ") for note in table.notes)


def test_it_says_when_perplexity_falls_everywhere_and_when_it_rises(store: Store) -> None:
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 32.0)
    for bits, mean in (("2", 0.3), ("k3v2", 0.2), ("k2v3", 0.25), ("3", 0.1)):
        sweeps.put_run(store, "good", bits, sweeps.losses(mean, 0.01, 1), full, 3.0)
    assert any(note.startswith("For every method measured at several bit widths") for note in only(store).notes)
    sweeps.put_run(store, "good", "4", sweeps.losses(0.4, 0.01, 2), full, 4.0)
    (note,) = [note for note in only(store).notes if note.startswith("good: ")]
    assert note.startswith("good: perplexity rises beyond noise from 3 to 4 bits: ΔNLL +0.29")


def test_one_window_has_no_error_and_no_verdict(store: Store) -> None:
    full = sweeps.put_run(store, "fp16", "", [250.0], None, 32.0)
    for bits, nll in (("2", 300.0), ("3", 270.0)):
        sweeps.put_run(store, "good", bits, [nll], full, float(bits))
    table = only(store)
    assert cells(table.rows[1])["ΔNLL ± SE (nats/token)"] == "+0.5000"
    assert not any(row.within_noise or row.best for row in table.rows)
    assert any("from 2 to 3 bits cannot be told: too few windows" in note for note in table.notes)
    assert not any(note.startswith(("±", "≈", "Bold", "A difference")) for note in table.notes)


def test_failed_and_unsupported_are_a_dash_with_the_reason(store: Store) -> None:
    runs = sweeps.sweep(store)
    full = runs["fp16"].key
    store.put(made.record("nsn", "9", status="unsupported", reason="bits=9: 1 to 8", baseline_key=full))
    store.put(made.record("good", "5", status="failed", reason="NaN in\nlayer 3", baseline_key=full))
    table = only(store)
    assert [(row.name, row.bits, row.footnote) for row in table.rows if row.footnote] == [
        ("good", "5", 1),
        ("nsn", "9", 2),
    ]
    shown = cells(table.rows[-1])
    assert shown.pop("Perplexity") == "– [2]"
    assert set(list(shown.values())[2:]) == {"–"}
    assert table.notes[-2:] == (
        "[1] good, 5 bits, failed: NaN in layer 3",
        "[2] nsn, 9 bits, unsupported: bits=9: 1 to 8",
    )


def test_stale_rows_are_marked_not_hidden(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = sweeps.sweep(store)
    assert not any("†" in note for note in only(store).notes)
    monkeypatch.setattr("kvq.report.tables.build.is_stale", lambda record: record.key == runs["good 2"].key)
    table = only(store)
    assert [cells(row)["Method"] for row in table.rows if row.stale] == ["good †"]
    assert sum(note.startswith("† stale") for note in table.notes) == 1


def test_one_table_per_protocol(store: Store) -> None:
    kinds = [
        {},
        {"seed": 1},
        {"task": {"name": "ppl", "context": 512}},
        {"model": {"path": "x"}},
        {"dataset": {"seed": 3}},
    ]
    for kind in kinds:
        for bits in "23":
            store.put(made.record("good", bits, settings=made.config("good", bits, **kind)))
    tables = build_tables(store).tables
    assert len(tables) == len({table.slug for table in tables}) == len(kinds)
    assert all(len(table.rows) == 2 for table in tables)
    assert {table.title for table in tables} == {
        "ppl: tiny on pydocs (32-bit cache, model path embedded:tiny)",
        "ppl: tiny on pydocs (32-bit cache, seed 1)",
        "ppl: tiny on pydocs (context 512, 32-bit cache)",
        "ppl: tiny on pydocs (32-bit cache, model path x)",
        "ppl: tiny on pydocs (32-bit cache, dataset seed 3, model path embedded:tiny)",
    }
    assert [table.slug for table in tables] == sorted(table.slug for table in tables)


def test_a_sweeps_own_runs_with_their_baseline(store: Store) -> None:
    runs = sweeps.sweep(store)
    table = only(store, keys=[runs["good 2"].key])
    assert {row.record.key for row in table.rows} == {runs["fp16"].key, runs["good 2"].key}
    store.record_path(runs["fp16"].key).unlink()
    table = only(store, keys=[runs["good 2"].key])
    assert any(runs["fp16"].key[:12] in note and "no record" in note for note in table.notes)


def test_labels() -> None:
    assert parse_label("3") == (3.0, 3.0)
    assert parse_label("k3v2.5") == (3.0, 2.5)
    assert parse_label("") is parse_label("fast") is None
    assert sorted(["", "10", "k3v2", "2", "3", "x"], key=by_bits) == ["2", "k3v2", "3", "10", "", "x"]
    runs = [made.record("kivi", bits) for bits in ("4", "k3v2", "k2v3", "", "2")]
    assert [(low.bits, high.bits) for low, high in widths(runs)] == [("2", "k2v3"), ("k3v2", "4")]


def test_twins_do_not_take_each_other_off_the_frontier(store: Store) -> None:
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 32.0)
    runs = [("good", "2", 0.3, 2.1), ("twin", "2", 0.3, 2.2), ("good", "3", 0.1, 3.1), ("bad", "3", 0.6, 3.0)]
    for seed, (method, bits, mean, size) in enumerate(runs):
        sweeps.put_run(store, method, bits, sweeps.losses(mean, 0.01, seed + 1), full, size)
    sweeps.put_run(store, "good/variant", "2", sweeps.losses(0.05, 0.01, 9), full, 1.9)
    table = only(store)
    assert [(row.name, row.bits) for row in table.rows if row.best] == [("good", "2"), ("good", "3")]
    assert [row.name for row in table.rows if row.variant] == ["good/variant"]
    assert any(note.startswith("The frontier is over methods") for note in table.notes)


def test_all_runs_are_one_frame(store: Store) -> None:
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 16.0)
    run = sweeps.put_run(store, "kivi", "2", sweeps.losses(0.1, 0.01, 1), full, 3.0)
    found = kvq.load_results(store.root)
    assert list(found["key"]) == [full.key, run.key]
    assert list(found["baseline"]) == [True, False]
    line = found.set_index("key").loc[run.key]
    assert line["delta_nll"] == run.metrics["delta_nll"]
    assert (line["label"], line["bits"], line["task.scoring"]) == ("kivi", "2", run.config["task"].get("scoring"))
    assert found["table"].nunique() == 1
    assert len(found.columns) <= 60


def test_a_frame_of_an_empty_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no records"):
        kvq.load_results(tmp_path)
