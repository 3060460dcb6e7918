"""Markdown, CSV and LaTeX carry the same cells, and nothing a user wrote can break out of one."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvq.errors import RecordError
from kvq.papers.__main__ import main as experiments_main
from kvq.report.__main__ import main
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import (
    CSV_METRICS,
    PACKAGES,
    escape_latex,
    escape_markdown,
    landscape,
    latex,
    markdown,
    print_tables,
    write_tables,
)
from kvq.report.tables.formats import csv as as_csv
from kvq.report.tables.layout import COLUMNS, Sheet, Table
from kvq.results import Store
from tests.properties import examples
from tests.report import sweeps
from tests.report.hostile import ALL
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
    [page] = (path for path in paths[1:] if path.suffix == ".md")
    anchors = re.findall(r'id="([^"]+)"', page.read_text(encoding="utf-8"))
    assert [link for link in links if "/" not in link] == [f"{page.name}#{anchor}" for anchor in anchors]
    assert len(anchors) == 2
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
    assert {path.suffix for path in before - after} == {".csv", ".tex"}
    assert len(before - after) == 2
    assert set(folder.iterdir()) == after | set(kept)


def test_failures_are_one_line(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no records under .*run a sweep first"):
        write_tables(store, tmp_path / "tables")
    sweeps.sweep(store)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"tables: cannot write under .*: Not a directory"):
        write_tables(store, tmp_path / "file" / "tables")


ROOT = Path(__file__).parents[3]
TEX = "a|b_*c*_ `x` [y](z) $1$ & 5% #1 ~ ^ \\ {q} \\input{/etc/passwd} ^^41 \\end{table}\n\x1b[31m\x00" + "".join(ALL)
LATEX = shutil.which("pdflatex")
LETTERS = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿ"
SIGNS = "\\{}$&%#_~^<>|[]\"'`Δ±≈×≤≥→←−µμ·°…†–—" + LETTERS
needs_latex = pytest.mark.skipif(LATEX is None, reason="pdflatex is not installed (Debian: texlive-latex-recommended)")


def sheet(rows: list[list[str]], header: list[str], **settings: object) -> Sheet:
    given: dict[str, object] = {"title": "c", "label": "tab:x", "left": {0}}
    return Sheet(header=header, rows=rows, **(given | settings))  # type: ignore[arg-type]


def compiled(text: str, folder: Path) -> str:
    """The log of a document with `text` in it, which must compile."""
    assert LATEX is not None
    packages = ",".join(PACKAGES)
    body = f"\\documentclass{{article}}\\usepackage{{{packages}}}\n\\begin{{document}}\n{text}\n\\end{{document}}\n"
    (folder / "paper.tex").write_text(body, encoding="utf-8")
    command = [LATEX, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
    log = done.stdout.decode("utf-8", errors="replace")
    assert done.returncode == 0, log[-2000:]
    return log


def test_rows_follow_each_other_on_any_number_of_pages_that_are_as_wide_as_the_columns() -> None:
    rows = [[f"method_{index // 7}", str(-index), "1.0"] for index in range(140)]
    text = landscape(sheet(rows, ["method", "bits", "loss"], notes=["a note"], comments=["Run: x\nrm -rf"]))
    body = text.split("\\endfoot\n")[1].split(r"\end{longtable}")[0].splitlines()
    assert [line.replace(r"\allowbreak{}", "").replace("$-$", "-") for line in body] == [
        f"{name} & {index} & 1.0 \\\\".replace("_", r"\_") for name, index, _ in rows
    ]
    shares = [int(share) for share in re.findall(r"dimexpr (\d)\\linewidth/4-", text)]
    assert shares == [2, 1, 1]  # of four
    assert text.startswith("% Run: x rm -rf\n")
    assert text.count(r"\label{tab:x}") == text.count("a note") == 1
    assert text.count("method & bits & loss") == 2  # on the first page and on the others


def test_only_signs_that_are_declared_are_left() -> None:
    for sign in SIGNS:
        shown = escape_latex(sign)
        assert shown.isascii() or sign in LETTERS
    assert escape_latex("Ж漢") == r"\texttt{U+0416}\texttt{U+6F22}"
    assert escape_latex("--x---") == "-{}-x-{}-{}-"


@given(st.text())
@settings(max_examples=examples(50))
def test_no_text_leaves_a_sign_that_latex_does_not_know(text: str) -> None:
    assert all(letter.isascii() or letter in LETTERS for letter in escape_latex(text))


@needs_latex
def test_every_sign_and_nasty_text_compile(tmp_path: Path) -> None:
    rows = [[f"a{sign}b", f"{sign}", TEX] for sign in [*SIGNS, "Ж", "漢", "🙂", "ﬁ"]]
    table = sheet(rows, ["method [x]", TEX, "bits, %_&"], title=TEX, notes=[TEX, "[1] x"], comments=[TEX])
    log = compiled(landscape(table), tmp_path)
    assert "Missing character" not in log


@needs_latex
@pytest.mark.long
def test_the_tables_of_the_committed_records_compile(tmp_path: Path) -> None:
    store = Store(ROOT / "results")
    write_tables(store, tmp_path / "tables")
    assert experiments_main(["--results", str(store.root), "--out", str(tmp_path / "tables" / "experiments")]) == 0
    files = sorted((tmp_path / "tables").rglob("*.tex"))
    assert len(files) > 40
    inputs = "\n".join(f"\\input{{{path.relative_to(tmp_path)}}}\\clearpage" for path in files)
    log = compiled(inputs, tmp_path)
    assert "multiply defined" not in log


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


def test_memory_has_a_line_for_each_run_and_length_in_gib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    units = dict.fromkeys(("total_bytes_512", "total_bytes_1024"), "bytes")
    units |= dict.fromkeys(("compression_512", "compression_1024"), "x")
    for method, size in (("kivi", 2.0**28), ("nsn", 2.0**27)):
        metrics = dict(zip(units, (size, 2 * size, 4.5, 5.0), strict=True))
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
