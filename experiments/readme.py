"""Put the tables of results/tables into the README's marked places: `python experiments/readme.py`.

A place is `<!-- table: ppl-tiny-pydocs-f6320084 of kivi nsn at 2 3 -->` to `<!-- end -->`: a table's name, then, where
not all rows are wanted, methods (full precision always stands first) and bits.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"(<!-- table: ([\w-]+)(?: of ([\w/ ]+?))?(?: at ([\w ]+))? -->\n)(.*?)(<!-- end -->)", re.S)
HEAD = 3
"""Lines of a table before its methods: titles, alignment, full precision."""


def table_lines(name: str, methods: str | None, bits: str | None) -> str:
    """The rows of a Markdown table, of these methods and bits (None: of all).

    Raises:
        SystemExit: no such table.
    """
    path = ROOT / "results" / "tables" / f"{name}.md"
    if not path.is_file():
        raise SystemExit(f"{path.relative_to(ROOT)}: no such table; run make tables")
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    wanted = [(0, methods), (1, bits)]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    kept = [
        row
        for index, row in enumerate(rows)
        if index < HEAD or all(names is None or cells[index][at] in names.split() for at, names in wanted)
    ]
    return "\n".join(kept) + "\n"


def filled(text: str) -> str:
    """`text` with every marked place filled from results/tables."""
    return PLACE.sub(lambda place: f"{place[1]}{table_lines(place[2], place[3], place[4])}{place[6]}", text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
