"""The notebooks run from top to bottom, read or measure what they say, and are committed without outputs."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest

from experiments.notebooks import stripped

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ["compare_methods", "paper_figures", "quickstart", "tni_walkthrough"]


def code(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_all_four_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert stripped(text) == text, "python experiments/notebooks.py strips them"
    nbformat.validate(nbformat.reads(text, as_version=4))
    assert "/home/" not in text
    for source in code(path):
        ast.parse(re.sub(r"^%.*$", "", source, flags=re.M))
        assert max(map(len, source.splitlines())) <= 130


def test_stripping_takes_what_running_leaves() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1", execution_count=3)])
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text="2")]
    notebook.metadata["language_info"] = {"name": "python", "version": "3.11.7"}
    clean = nbformat.reads(stripped(nbformat.writes(notebook)), as_version=4)
    assert clean.cells[0].source == "1 + 1"
    assert clean.cells[0].outputs == []
    assert clean.cells[0].execution_count is None
    assert clean.metadata["language_info"] == {"name": "python"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (path.stem != "quickstart")) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (pip install -e '.[notebooks]')")
    pytest.importorskip("ipykernel", reason="needs ipykernel (pip install -e '.[notebooks]')")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm without ipywidgets
    before = {file: file.stat().st_mtime_ns for file in (ROOT / "results").rglob("*")}
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds or path.stem == "quickstart"
    assert {file: file.stat().st_mtime_ns for file in (ROOT / "results").rglob("*")} == before
