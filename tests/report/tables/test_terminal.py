"""What a person sees: a table that fits, plain text in a pipe, one line for what went wrong."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvq.report.__main__ import main
from kvq.report.tables.formats import print_tables
from kvq.results import Store
from tests.report import sweeps
from tests.results import made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def shown(store: Store, **options: object) -> str:
    out = io.StringIO()
    print_tables(store, Console(file=out, **options))
    return out.getvalue()


def test_plain_in_a_pipe(store: Store) -> None:
    runs = sweeps.sweep(store)
    text = shown(store)
    assert "\x1b" not in text
    assert not set(text) & set("─│┃━")
    lines = text.splitlines()
    rows = lines[2 : 2 + len(runs)]
    assert max(len(line) for line in lines[: 2 + len(runs)]) <= 100
    assert [row.split()[:2] for row in rows] == [
        ["fp16", "float32"],
        *(["flat", bits] for bits in "234"),
        *(["good", bits] for bits in "234"),
    ]
    assert f"{runs['good 3'].metrics['perplexity']:.3f}" in rows[5]
    notes = [
        "≈ within noise of full precision; bold: frontier of bits and loss.",
        f"All notes: kvq report --print --results {store.root}",
    ]
    assert lines[2 + len(runs) :] == notes


def test_a_terminal_of_100_columns_cuts_no_number(store: Store) -> None:
    runs = sweeps.sweep(store)
    text = shown(store, force_terminal=True, width=100, color_system=None)
    assert "…" not in text
    for run in runs.values():
        assert f"{run.metrics['perplexity']:.3f}" in text
    assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_has_every_method_whole(store: Store, width: int) -> None:
    full = sweeps.sweep(store)["fp16"]
    name = "kivi_had/nsnquant_setting"
    run = sweeps.put_run(store, name, "2", sweeps.losses(0.4, 0.01, 9), full, 2.25)
    lines = shown(store, force_terminal=True, width=width, color_system=None).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    (row,) = [line for line in lines if line.startswith(name + " ")]
    metrics = run.metrics
    assert f"{metrics['perplexity']:.3f}" in row
    assert f"{metrics['delta_nll']:+.4f} ± {metrics['delta_nll_se']:.4f}" in row
    (note,) = [line for line in lines if line.startswith("Not shown at this width: ")]
    assert ("Perplexity" in note, "KL p99" in note) == (False, True)


def test_markup_in_names_is_shown_as_it_is(store: Store) -> None:
    store.put(made.record("[red]x[/red]", "2", status="failed", reason="[bold]why[/bold] [/nothing]"))
    text = shown(store)
    assert "[red]x[/red]" in text
    assert "[bold]why[/bold] [/nothing]" in text


def test_only_the_sweeps_runs(store: Store) -> None:
    runs = sweeps.sweep(store)
    out = io.StringIO()
    print_tables(store, Console(file=out), keys=[runs["good 2"].key])
    assert "good" in out.getvalue()
    assert "flat" not in out.getvalue()


def test_command_writes_and_names_files(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps.sweep(store)
    (store.runs / "torn.json").write_text("{")
    assert main(["--results", str(store.root), "--print"]) == 0
    captured = capsys.readouterr()
    written = [Path(line) for line in captured.out.splitlines() if line.startswith(str(store.root))]
    assert all(path.is_file() for path in written)
    tables = [path.name for path in written if path.parent == store.root / "tables"]
    assert len(tables) == 4
    assert "ppl: tiny on pydocs" in captured.out
    assert captured.err.splitlines() == [
        f"skipped {store.runs / 'torn.json'}: not valid JSON: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    ]


def test_command_elsewhere(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps.sweep(store)
    assert main(["--results", str(store.root), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "index.md").is_file()
    assert not (store.root / "tables").exists()
    assert "ppl: tiny" not in capsys.readouterr().out


def test_memory_has_a_line_for_each_run_and_length_in_gib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    units = {"total_bytes_1024": "bytes", "total_bytes_512": "bytes", "compression_1024": "x", "compression_512": "x"}
    for method, size in (("kivi", 2.0**28), ("nsn", 2.0**27)):
        metrics = {
            "total_bytes_1024": 2 * size,
            "total_bytes_512": size,
            "compression_1024": 5.0,
            "compression_512": 4.5,
        }
        store.put(made.record(method, "2", task="memory", dataset="shape", metrics=metrics, units=units))
    assert main(["--results", str(tmp_path), "--print"]) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines() if line.startswith(("Method", "kivi", "nsn"))]
    assert lines == [
        ["Method", "Bits", "Tokens", "GiB", "x", "less"],
        ["kivi", "2", "512", "0.2500", "4.50"],
        ["nsn", "2", "512", "0.1250", "4.50"],
        ["kivi", "2", "1,024", "0.5000", "5.00"],
        ["nsn", "2", "1,024", "0.2500", "5.00"],
    ]
    [page] = (tmp_path / "tables").glob("memory-*.md")
    for text in (said, page.read_text()):
        assert "total_bytes" not in text
    assert "Cache (GiB)" in page.read_text()
