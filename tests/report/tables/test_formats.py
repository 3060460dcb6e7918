"""Markdown, CSV and LaTeX carry the same cells, and nothing a user wrote can break out of one."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import RecordError
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import CSV_METRICS, escape_latex, escape_markdown, latex, markdown, write_tables
from kvq.report.tables.formats import csv as as_csv
from kvq.report.tables.layout import COLUMNS, Table
from kvq.results import Store
from tests.report import sweeps
from tests.results import made

NASTY = "a|b_*c*_ <script> `x` [y](z) $1$ & 5% #1 ~ ^ \\ {q}\n| new | row |\x1b[31m\x00"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def table_of(store: Store) -> Table:
    (table,) = build_tables(store).tables
    return table


def test_markdown_has_the_tables_cells(store: Store) -> None:
    sweeps.sweep(store)
    table = table_of(store)
    lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
    assert split_row(lines[0]) == [column.title for column in COLUMNS]
    assert set(split_row(lines[1])) == {":---", "---:"}
    for line, row in zip(lines[2:], table.rows, strict=True):
        bold = [cell.startswith("**") for cell in split_row(line)]
        assert [cell.strip("*") for cell in split_row(line)] == [column.cell(row) for column in COLUMNS]
        assert sum(bold) == row.best


def test_csv_has_every_number_in_full(store: Store) -> None:
    runs = sweeps.sweep(store)
    store.put(made.record("nsn", "9", status="unsupported", reason="no, not\n9", baseline_key=runs["fp16"].key))
    frame = pd.read_csv(io.StringIO(as_csv(table_of(store))), index_col="key", dtype={"bits": str})
    assert len(frame) == 8
    for run in runs.values():
        assert {name: frame.loc[run.key, name] for name in CSV_METRICS if name in run.metrics} == {
            name: value for name, value in run.metrics.items() if name in CSV_METRICS
        }
    failed = frame[frame["status"] == "unsupported"]
    assert failed["reason"].tolist() == ["no, not 9"]
    assert failed["perplexity"].isna().all()


def test_latex_is_balanced_booktabs(store: Store) -> None:
    runs = sweeps.sweep(store)
    settings = made.config("x", "2") | {"method": {"label": NASTY}}
    store.put(made.record(NASTY, "2", settings=settings, status="failed", reason=NASTY, baseline_key=runs["fp16"].key))
    text = latex(table_of(store))
    body = text.split("\\endfoot\n")[1].split(r"\end{longtable}")[0].strip().splitlines()
    assert len(body) == 8
    for line in body:
        assert line.endswith(r"\\")
        assert len(re.findall(r"(?<!\\)&", line)) == len(COLUMNS) - 1
        assert not line.lstrip().startswith("[")
    assert text.isascii()
    plain = re.sub(r"\\[\\{}$&%#_]", "", text)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert "%" not in plain.removeprefix("% needs")
    assert text.count(r"\textbf{") == 2


def test_nothing_breaks_out_of_a_markdown_cell(store: Store) -> None:
    settings = made.config("x", "2") | {"model": {"path": NASTY}}
    store.put(made.record(NASTY, NASTY, settings=settings, model=NASTY, dataset=NASTY, status="failed", reason=NASTY))
    table = table_of(store)
    text = markdown(table)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert all(len(split_row(row)) == len(COLUMNS) for row in rows)
    assert "<script>" not in text
    assert "\x1b" not in text
    assert re.fullmatch(r"[A-Za-z0-9._-]+", table.slug)
    paths = write_tables(store, store.root / "tables")
    assert {path.parent for path in paths} == {store.root / "tables"}


@given(st.text())
def test_escapes_stay_on_one_line_and_leave_nothing_bare(text: str) -> None:
    shown = escape_markdown(text)
    assert len(shown.splitlines()) <= 1
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*\[\]$]", re.sub(r"\\.", "", shown))
    assert "<" not in shown
    tex = escape_latex(text)
    assert len(tex.splitlines()) <= 1
    commands = r"\\[{}$&%#_]|\\text[a-z]+\{\}|\$\\[a-zA-Z]+\$|\{\[\}|\{\]\}|-\{\}|\\texttt\{U\+[0-9A-F]+\}"
    assert not re.search(r"[\\{}$&%#_~^<>|]", re.sub(commands, "", tex))


def test_twice_the_same_bytes(store: Store) -> None:
    runs = sweeps.sweep(store)
    store.put(made.record("nsn", "9", status="failed", reason="why", baseline_key=runs["fp16"].key))
    first = {path: path.read_bytes() for path in write_tables(store, store.root / "tables")}
    again = {path: path.read_bytes() for path in write_tables(store, store.root / "tables")}
    assert first == again
    assert sorted(path.suffix for path in first) == [".csv", ".md", ".md", ".tex"]
    assert sorted(path.name for path in (store.root / "tables").iterdir()) == sorted(path.name for path in first)


def test_the_order_of_records_on_disk_does_not_matter(store: Store, tmp_path: Path) -> None:
    sweeps.sweep(store)
    other = Store(tmp_path / "other")
    for record in reversed(store.scan()[0]):
        other.put(record, store.samples(record.key))
    texts = [[path.read_bytes() for path in write_tables(each, each.root / "tables")] for each in (store, other)]
    assert texts[0] == texts[1]


def test_index_links_every_table_and_names_broken_files(store: Store) -> None:
    runs = sweeps.sweep(store)
    store.put(made.record("nsn", "9", status="failed", reason="why", baseline_key=runs["fp16"].key))
    store.put(made.record("nsn", "2", settings=made.config("nsn", "2", seed=4)))
    (store.runs / "torn_x.json").write_text("{")
    paths = write_tables(store, store.root / "tables")
    text = paths[0].read_text(encoding="utf-8")
    assert paths[0].name == "index.md"
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert sorted(link for link in links if "/" not in link) == sorted(p.name for p in paths[1:] if p.suffix == ".md")
    assert [link for link in links if "/" in link] == ["experiments/index.md", "../figures/index.md"]
    assert "| 7 done, 1 failed |" in text
    assert "(32-bit cache, seed 4)](" in text
    assert "| 1 done |" in text
    assert "torn_x.json: not valid JSON" in text


def test_tables_that_are_gone_are_removed_and_nothing_else(store: Store) -> None:
    sweeps.sweep(store)
    odd = store.put(made.record("nsn", "2", settings=made.config("nsn", "2", seed=4)))
    folder = store.root / "tables"
    before = set(write_tables(store, folder))
    kept = [folder / "mine.md", folder / "mine-01234567.csv"]
    for path in kept:
        path.write_text("mine")
    store.record_path(odd.key).unlink()
    after = set(write_tables(store, folder))
    assert len(before - after) == 3
    assert set(folder.iterdir()) == after | set(kept)


def test_failures_are_one_line(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no records under .*run a sweep first"):
        write_tables(store, tmp_path / "tables")
    sweeps.sweep(store)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"tables: cannot write under .*: Not a directory"):
        write_tables(store, tmp_path / "file" / "tables")


def test_csv_reads_back_whatever_names_say(store: Store) -> None:
    store.put(made.record('a "quoted", name\nwith lines', "2"))
    rows = list(csv.DictReader(io.StringIO(as_csv(table_of(store)))))
    assert [row["method"] for row in rows] == ['a "quoted", name\nwith lines']
