"""The notebooks run from top to bottom, read or measure what they say, and are committed with small outputs."""

from __future__ import annotations

import ast
import base64
import io
import os
import re
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from experiments.docs.notebooks import MOST_BYTES, slim

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ["choose_a_format", "compare_methods", "paper_figures", "quickstart", "tni_walkthrough"]


def code(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_as_it_ran(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = "python experiments/docs/notebooks.py runs them"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), ran
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs) or path.stem == "quickstart"
    assert not re.findall(r"/(?:home|root|tmp|work)/\w+", re.sub(r'"image/png": "[^"]*"', "", text))
    for source in code(path):
        ast.parse(re.sub(r"^%.*$", "", source, flags=re.M))
        assert max(map(len, source.splitlines())) <= 130


def test_they_are_small_together() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST_BYTES


def test_every_source_has_its_figures() -> None:
    """Behind each heading of a paper in `paper_figures` stands a figure or a table."""
    notebook = nbformat.read(ROOT / "notebooks" / "paper_figures.ipynb", as_version=4)
    drawn: dict[str, int] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (heading := re.match(r"## (.+)", cell.source)):
            drawn[heading[1]] = 0
        elif cell.cell_type == "code" and drawn:
            drawn[list(drawn)[-1]] += sum("image/png" in output.get("data", {}) for output in cell.outputs)
    assert all(drawn.values()), drawn
    for source in ("nsn", "NSNQuant", "OScaR", "KVQuant++"):
        assert any(re.search(rf"\b{re.escape(source)}", heading) for heading in drawn), source


def test_slimming_takes_what_running_leaves() -> None:
    picture = io.BytesIO()
    Image.effect_noise((1800, 600), 90).convert("RGB").save(picture, format="png")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1", execution_count=3)])
    cell = notebook.cells[0]
    cell.outputs = [
        nbformat.v4.new_output("stream", text=f"{ROOT}/results"),
        nbformat.v4.new_output("stream", name="stderr"),
    ]
    png = base64.b64encode(picture.getvalue()).decode()
    cell.outputs.append(nbformat.v4.new_output("display_data", data={"image/png": png, "text/plain": "<Figure>"}))
    notebook.metadata["language_info"] = {"name": "python", "version": "3.11.7"}
    clean = slim(notebook)
    assert clean.metadata["language_info"] == {"name": "python"}
    assert clean.cells[0].execution_count == 1
    said, drawn = clean.cells[0].outputs
    assert said.text == "./results"
    assert list(drawn.data) == ["image/png"]
    small = Image.open(io.BytesIO(base64.b64decode(drawn.data["image/png"])))
    assert small.size == (760, 253)
    assert len(small.getcolors()) <= 48


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.long) for path in NOTEBOOKS],
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
