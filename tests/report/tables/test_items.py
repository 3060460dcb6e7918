"""Tables and figures of tasks of items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvq.report.__main__ import main
from kvq.report.figures.every import main as figures_main
from kvq.report.figures.loss import needle_grid, needles_figure
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Row, Table, columns_of
from kvq.results import Record, Store
from tests.results import made

TASK = {"name": "niah", "mode": "distractors"}


def put(store: Store, method: str, bits: str, hits: int, full: Record | None = None, p: float | None = None) -> Record:
    """A run of 8 items at 2 lengths and 2 depths, the first `hits` of them found."""
    rows = [
        {
            "item": f"item {index}",
            "length": (256, 512)[index // 4],
            "depth": (0.0, 1.0)[index % 2],
            "outcome": "hit" if index < hits else "bit_mixing",
            "score": float(index < hits),
        }
        for index in range(8)
    ]
    metrics: dict[str, float] = {
        "accuracy": hits / 8,
        "accuracy[length=256]": min(hits, 4) / 4,
        "accuracy[length=512]": max(hits - 4, 0) / 4,
        "bit_mixing": 1 - hits / 8,
        "bit_mixing_random": 0.0125,
        "bits_per_element": 3.0,
        "effective_bits": 4.0,
        "items": 8.0,
        "skipped_items": 1.0,
    }
    if p is None:
        metrics["noise_flips"] = 0.125
    else:
        metrics |= {
            "delta_accuracy": hits / 8 - 1,
            "delta_accuracy_se": 0.1,
            "p_value": p,
            "lost": 8.0 - hits,
            "gained": 0.0,
        }
        metrics |= {"within_noise": float(p > 0.05), "not_worse": float(hits == 8)}
    settings = made.config(method, bits, TASK)
    record = made.record(method, bits, settings=settings, task="niah", metrics=metrics)
    record = record.model_copy(update={"baseline_key": full.key if full else None})
    store.put(record, [*rows, {"item": "item 8", "skipped": "too long"}])
    return record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "results")
    full = put(store, "fp16", "", 8)
    put(store, "kivi", "2", 3, full, 0.02)
    put(store, "kivi", "4", 8, full, 1.0)
    put(store, "nsn", "2", 1, full, 0.001)
    return store


def only(store: Store) -> Table:
    (table,) = build_tables(store).tables
    return table


def cells(table: Table, row: Row) -> dict[str, str]:
    return {column.title: column.cell(row) for column in columns_of(table)}


def test_columns_follow_from_what_was_measured(store: Store) -> None:
    table = only(store)
    rows = {f"{row.name} {row.bits}": cells(table, row) for row in table.rows}
    assert list(rows) == ["fp16 float32", "kivi 2", "kivi 4", "nsn 2"]
    assert rows["kivi 2"] == {
        "Method": "kivi",
        "Bits": "2",
        "Measured bits/element": "3.000",
        "Effective bits/element": "4.000",
        "Accuracy (%)": "37.5",
        "Δ ± SE (points)": "-62.5 ± 10.0",
        "Lost, gained (items)": "5, 0",
        "p (Holm)": "0.0400",  # of three, the second smallest: twice 0.02
        "Bit-mixing (%)": "62.5",
        "Bit-mixing of random strings (%)": "1.2",
        "256 (%)": "75.0",
        "512 (%)": "0.0",
    }
    assert rows["kivi 4"]["Δ ± SE (points)"] == "≈ +0.0 ± 10.0"
    assert rows["nsn 2"]["p (Holm)"] == "0.0030"
    assert rows["fp16 float32"]["p (Holm)"] == rows["fp16 float32"]["Δ ± SE (points)"] == "–"
    assert not any(row.best for row in table.rows)
    assert "scored: 8 items, 1 skipped" in table.protocol
    notes = "\n".join(table.notes)
    assert "Full precision in another batch order changed 12.5% of the items." in notes
    assert "p at most 0.05: kivi 4." in notes
    assert "perplexity" not in notes


def test_the_heat_map_is_the_samples(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = only(store)
    grid = needle_grid(table, store)
    assert len(grid) == 4 * 4
    cell: dict[str, Any] = (
        grid[(grid.method == "kivi") & (grid.bits == "2") & (grid.length == 256)].set_index("depth").T
    )
    assert cell[0.0]["hit"] == 1.0
    assert cell[1.0]["hit"] == cell[1.0]["bit_mixing"] == 0.5
    assert cell[0.0]["items"] == 2
    figure = needles_figure(grid, table.title)
    panels = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    assert [axis.get_title() for axis in panels] == ["2 bits", "4 bits", "", ""]
    assert [axis.get_ylabel() for axis in panels] == ["kivi", "", "nsn", ""]
    assert [len(axis.images) for axis in panels] == [1, 1, 1, 0]  # nsn 4 was not measured
    assert [[text.get_text() for text in axis.texts] for axis in panels] == [[], [], [], ["–"]]
    assert "full precision finds 100.0%" in figure.get_supxlabel()
    folder = tmp_path / "results"
    assert figures_main(["--results", str(folder)]) == 0
    figures = {path.suffix: path.read_bytes() for path in (folder / "figures").glob("niah-*")}
    assert set(figures) == {".csv", ".pdf", ".png"}
    assert figures[".png"][:4] == b"\x89PNG"
    assert figures[".pdf"][:4] == b"%PDF"
    assert len(figures[".csv"].splitlines()) == 17
    assert all(f"figures/{table.slug}{kind}" in capsys.readouterr().out for kind in ())
    assert figures_main(["--results", str(folder)]) == 0
    assert {path.suffix: path.read_bytes() for path in (folder / "figures").glob("niah-*")} == figures
    store.samples_path(table.rows[0].record.key).unlink()
    capsys.readouterr()
    assert figures_main(["--results", str(folder)]) == 1
    assert "cannot read samples" in capsys.readouterr().err
    assert main(["--results", str(folder), "--print"]) == 0
    assert "kivi" in capsys.readouterr().out
