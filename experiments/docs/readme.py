"""Put the tables of results/tables into the README's marked places: `python experiments/docs/readme.py`.

A place is `<!-- table: ppl-tiny-pydocs-f6320084 of kivi nsn at 2 3 columns 1 2 5 -->` to `<!-- end -->`: a name, then,
where not all of it is wanted, methods (full precision always stands first; with `;` between names of several words, as
in `of kivi/sink; nsn, sink tokens 1`), bits, and numbers of columns from 1.
"""

from __future__ import annotations

import re

from experiments.docs.places import ROOT, fill

WORDS = re.compile(r"([\w-]+)(?: of ([\w/,; ]+?))?(?: at ([\w. ]+?))?(?: columns ([\d ]+))?")
HEAD = 3
"""Lines of a table before its methods: titles, alignment, full precision."""


def named_methods(words: str) -> list[str]:
    """The methods that a place names, between `;` or, where there is none, between spaces."""
    return [name.strip() for name in words.split(";")] if ";" in words else words.split()


def table_lines(words: str) -> str:
    """The rows of the Markdown table that a place's words name, of its methods, bits and columns.

    Raises:
        SystemExit: no such table.
    """
    place = WORDS.fullmatch(words)
    name = place[1] if place else words
    path = ROOT / "results" / "tables" / f"{name.rpartition('-')[0]}.md"
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    section = page.partition(f'id="{name}"')[2].partition("\n## ")[0]
    if place is None or not section:
        raise SystemExit(f"{name}: no such table in {path.relative_to(ROOT)}; run make tables")
    rows = [line for line in section.splitlines() if line.startswith("|")]
    wanted = [(0, place[2] and named_methods(place[2])), (1, place[3] and place[3].split())]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    columns = [int(number) - 1 for number in (place[4] or "").split()]
    kept = [
        f"| {' | '.join(cells[index][at] for at in columns)} |" if columns else row
        for index, row in enumerate(rows)
        if index < HEAD or all(names is None or cells[index][at] in names for at, names in wanted)
    ]
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    fill(ROOT / "README.md", "table", table_lines)
