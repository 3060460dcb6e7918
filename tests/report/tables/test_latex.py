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
from kvq.report.tables.formats import PACKAGES, escape_latex, landscape, write_tables
from kvq.report.tables.layout import Sheet
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
    rows = [[f"a{sign}b", f"{sign}", NASTY] for sign in [*SIGNS, "Ж", "漢", "🙂", "ﬁ"]]
    table = sheet(rows, ["method [x]", NASTY, "bits, %_&"], title=NASTY, notes=[NASTY, "[1] x"], comments=[NASTY])
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
