"""`python experiments/docs/notebooks.py [NAME]`: run the notebooks and keep what they print and draw, made small."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MOST_BYTES = 2**20
"""Of all notebooks together."""
_COLOURS, _WIDTH = 48, 760


def slim(notebook: Any) -> Any:
    """The notebook without metadata, warnings and paths of this machine; its pictures in few colours."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = _without_paths(output.text)
            if "data" in output:
                output.metadata = nbformat.from_dict({})
                if "image/png" in output.data:
                    output.data = nbformat.from_dict({"image/png": _small(output.data["image/png"])})
                for kind in {"text/plain", "text/html"} & output.data.keys():
                    output.data[kind] = _without_paths(output.data[kind])
            if "execution_count" in output:
                output.execution_count = number
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def _without_paths(text: str) -> str:
    """Text with paths of the checkout as relative ones, and folders made for one run as `results`."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "results", text.replace(str(ROOT), "."))


def _small(png: str) -> str:
    """A PNG in base64, in few colours and no wider than a page."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    if picture.width > _WIDTH:
        picture = picture.resize((_WIDTH, round(picture.height * _WIDTH / picture.width)), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(out, format="png", optimize=True)
    return base64.b64encode(out.getvalue()).decode("ascii") + "\n"


def main() -> int:
    """Run every notebook, or those that are named, and rewrite them; 1 where one fails."""
    import nbclient

    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    for path in sorted(FOLDER.glob("*.ipynb")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        notebook = nbformat.read(path, as_version=4)
        try:
            resources = {"metadata": {"path": str(FOLDER)}}
            nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
        except nbclient.exceptions.CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        path.write_text(nbformat.writes(slim(notebook), indent=1).rstrip("\n") + "\n", encoding="utf-8")
        print(f"{path.name} ({path.stat().st_size / 1024:.0f} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
