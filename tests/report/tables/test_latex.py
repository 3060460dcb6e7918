"""LaTeX: what is written compiles, whatever a record says, and fits the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.papers.__main__ import main as experiments_main
from kvq.report.tables.formats import PACKAGES, Sheet, escape_latex, floats, write_tables
from kvq.results import Store
from tests.properties import examples
from tests.report.hostile import ALL

ROOT = Path(__file__).parents[3]
NASTY = "a|b_*c*_ `x` [y](z) $1$ & 5% #1 ~ ^ \\ {q} \\input{/etc/passwd} ^^41 \\end{table}\n\x1b[31m\x00" + "".join(ALL)
LATEX = shutil.which("pdflatex")
LETTERS = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿ"
SIGNS = "\\{}$&%#_~^<>|[]\"'`Δ±≈×≤≥→←−µμ·°…†–—" + LETTERS
needs_latex = pytest.mark.skipif(LATEX is None, reason="pdflatex is not installed (Debian: texlive-latex-recommended)")


def sheet(rows: list[list[str]], header: list[str], **settings: object) -> Sheet:
    given: dict[str, object] = {"title": "c", "label": "tab:x", "labels": 1, "left": frozenset({0})}
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


def parts(text: str) -> list[str]:
    return text.split(r"\begin{table}")[1:]


def body_of(part: str) -> list[str]:
    lines = part.split("\\midrule\n")[1].split(r"\bottomrule")[0].splitlines()
    return [line for line in lines if line != r"\addlinespace"]


def test_what_is_wide_is_split_by_columns_that_keep_their_names() -> None:
    header = ["model", *(f"column {index}, {'x' * 20}" for index in range(9))]
    text = floats(sheet([[f"m{row}", *["1.0"] * 9] for row in range(3)], header))
    assert len(parts(text)) == 2
    assert [len(re.findall(r"(?<!\\)&", line)) for part in parts(text) for line in body_of(part)] == [4] * 3 + [5] * 3
    assert "(1 of 2)" in text
    assert text.count(r"\label{tab:x}") == 1
    assert all(line.startswith("m") for part in parts(text) for line in body_of(part))
    assert f"\\shortstack[r]{{column 8\\\\{'x' * 20}}}" in text


def test_what_is_long_is_split_between_methods() -> None:
    rows = [[f"method {index // 7}", str(index)] for index in range(140)]
    text = floats(sheet(rows, ["method", "bits"], notes=["a note", "b " * 400]))
    found = [body_of(part) for part in parts(text)]
    assert [line for part in found for line in part] == [f"{name} & {index} \\\\" for name, index in rows]
    assert max(map(len, found)) <= 44
    names = [{line.split(" & ")[0] for line in part} for part in found]
    assert sum(map(len, names)) == 20
    assert text.count("a note") == 1
    alone = floats(sheet([["one", str(index)] for index in range(60)], ["method", "bits"]))
    assert len(body_of(parts(alone)[0])) == 60


def test_long_notes_follow_the_table_and_commands_are_comments() -> None:
    notes = [f"note {index}" for index in range(30)]
    text = floats(sheet([["a", "-1.5"]], ["method", "x"], notes=notes, comments=["Run: x\nrm -rf"]))
    assert text.index("note 0") > text.index(r"\end{table}")
    assert text.startswith("% Run: x rm -rf\n")
    assert "a & $-$1.5" in text


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
    rows = [[f"a{sign}b", f"{sign}", NASTY] for sign in [*SIGNS, "Ж", "漢", "🙂", "ﬁ"]]
    table = sheet(rows, ["method [x]", NASTY, "bits, %_&"], title=NASTY, notes=[NASTY, "[1] x"], comments=[NASTY])
    log = compiled(floats(table), tmp_path)
    assert "Missing character" not in log
    assert "Overfull" not in log.replace("Overfull \\vbox", "")


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
    assert "Overfull \\hbox" not in log
    assert "too large" not in log
    assert "multiply defined" not in log
