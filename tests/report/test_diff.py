"""What changed between two result sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.report.diff import compare, grid_of, main
from kvq.results import Store
from tests.report.sweeps import losses, put_run
from tests.results import made


def store(folder: Path, mean: float, jitter: float, seed: int = 1, method: str = "good") -> Store:
    made_store = Store(folder)
    full = put_run(made_store, "fp16", "", losses(0.0, 0.0, 0), None, 32.0)
    put_run(made_store, method, "2", losses(mean, jitter, seed), full, 2.1)
    return made_store


def test_the_same_folder_has_not_changed(tmp_path: Path) -> None:
    first = store(tmp_path / "a", 0.2, 0.01)
    assert {change.verdict for change in compare(first, first)} == {"same"}


@pytest.mark.parametrize(("mean", "jitter", "verdict"), [(0.2, 0.05, "within noise"), (0.5, 0.01, "changed")])
def test_losses_are_paired_by_window(tmp_path: Path, mean: float, jitter: float, verdict: str) -> None:
    changes = compare(store(tmp_path / "a", 0.2, 0.01), store(tmp_path / "b", mean, jitter, seed=2))
    [changed] = [change for change in changes if "good" in change.name]
    assert changed.verdict == verdict
    assert changed.difference == pytest.approx(mean - 0.2, abs=0.05)
    assert changed.error is not None


def items(folder: Path, right: int, method: str = "kivi") -> Store:
    made_store = Store(folder)
    rows = [{"item": str(index), "score": float(index < right)} for index in range(40)]
    metrics = {"accuracy": right / 40, "items": 40.0}
    made_store.put(made.record(method, "2", task="niah", metrics=metrics), rows)
    return made_store


@pytest.mark.parametrize(("right", "verdict"), [(38, "within noise"), (20, "changed")])
def test_items_are_paired_and_tested_exactly(tmp_path: Path, right: int, verdict: str) -> None:
    [change] = compare(items(tmp_path / "a", 40), items(tmp_path / "b", right))
    assert change.verdict == verdict
    assert change.p_value == pytest.approx(2 * 0.5 ** (40 - right), rel=1e-6)
    assert change.difference == pytest.approx((right - 40) / 40)


def test_runs_of_one_name_are_paired_though_settings_moved_on(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "a"), Store(tmp_path / "b")
    for folder, block in ((first, 2), (second, 4)):
        task = made.TASK | {"bootstrap": {"block": block, "resamples": 400, "seed": 0}}
        settings = made.config("kivi", "2", task=task)
        metrics = {"nll": 2.5 + block / 100, "bits_per_element": float(block)}
        folder.put(made.record("kivi", "2", settings=settings, metrics=metrics))
    second.put(made.record("nsn", "3", metrics={"nll": 1.0}))
    verdicts = {change.name.split(": ")[1]: change for change in compare(first, second)}
    assert verdicts["kivi 2"].verdict == "cannot be told"  # no samples
    assert "bootstrap.block: 2 to 4" in verdicts["kivi 2"].why or "no samples" in verdicts["kivi 2"].why
    assert verdicts["nsn 3"].verdict == "only in B"


def test_what_only_one_folder_has_is_a_line_for_all_of_it(tmp_path: Path) -> None:
    first, second = store(tmp_path / "a", 0.2, 0.01), store(tmp_path / "b", 0.2, 0.01)
    for bits in ("3", "4", "5"):
        put_run(second, "nsn", bits, losses(0.1, 0.01, 3), None, 3.0)
    changes = compare(first, second)
    grid = grid_of(changes)
    assert not grid.rows
    assert "Only in B: ppl tiny (3); --all names each." in grid.notes
    assert not any("Only in A" in note for note in grid.notes)
    assert [row[-2] for row in grid_of(changes, everything=True).rows].count("only in B") == 3
    assert not any(note.startswith("Only") for note in grid_of(changes, everything=True).notes)


def test_the_command_prints_counts_and_writes_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path / "a", 0.2, 0.01)
    store(tmp_path / "b", 0.5, 0.01)
    (tmp_path / "b" / "runs" / f"{'0' * 64}.json").write_text("{", encoding="utf-8")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--csv", str(tmp_path / "d.csv")]) == 0
    said = capsys.readouterr()
    assert "1 changed, 1 same." in said.out
    assert "not valid JSON" in said.err
    assert len((tmp_path / "d.csv").read_text().splitlines()) == 3
    assert main([str(tmp_path / "a"), str(tmp_path / "none")]) == 1
    assert "no records under" in capsys.readouterr().err
