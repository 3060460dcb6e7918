"""Write docs/citations.bib from CITATION.cff, and say which method each paper stands for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def bibtex(citation: dict[str, Any]) -> str:
    """BibTeX of the software and of every reference of a parsed CITATION.cff."""
    whole = {"title": citation["title"], "authors": [{"name": "{The kvq authors}"}], "year": 2026, "notes": "software"}
    return "\n".join(
        _entry("kvq", "software", whole) if one is None else _of(one) for one in (None, *citation["references"])
    )


def _of(reference: dict[str, Any]) -> str:
    first = reference["authors"][0]["family-names"].lower()
    word = re.sub(r"\W", "", reference["title"].split()[0].split(":")[0]).lower()
    return _entry(f"{first}{reference['year']}{word}", "misc", reference)


def _entry(key: str, kind: str, reference: dict[str, Any]) -> str:
    names = [one.get("name") or f"{one['family-names']}, {one['given-names']}" for one in reference["authors"]]
    arxiv = (
        reference.get("url", "").removeprefix("https://arxiv.org/abs/") if "arxiv" in reference.get("url", "") else ""
    )
    others = " and others" if "and others" in reference["notes"] else ""
    fields = {
        "title": f"{{{reference['title']}}}",
        "author": " and ".join(names) + others,
        "year": str(reference["year"]),
        "eprint": arxiv,
        "archiveprefix": "arXiv" if arxiv else "",
        "doi": reference.get("doi", ""),
        "url": reference.get("url", ""),
        "note": reference["notes"].rstrip("."),
    }
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}", ""])


def main() -> None:
    """Write the file."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (ROOT / "docs" / "citations.bib").write_text(bibtex(citation), encoding="utf-8")


if __name__ == "__main__":
    main()
