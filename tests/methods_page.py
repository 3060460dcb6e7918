"""What docs/methods.md says, as data: its rows, and the methods and presets of the configuration it must cover."""

import functools
from pathlib import Path

from kvq.config import compose, resolve
from tests.presets import NAMES

PAGE = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
PRESETS = [name for name in NAMES if "/" in name]
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 8
}


@functools.cache
def config(name):
    """The method's settings at 2 bits."""
    return resolve(compose([f"method={name}", "bits=2"]))
