"""Every method's paper can be cited, and the BibTeX file is that of CITATION.cff."""

from __future__ import annotations

import yaml

from experiments.docs.citations import ROOT, bibtex
from kvq.config.plugins import all_choices


def test_every_paper_of_a_method_is_in_the_citation_file() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for choice in all_choices():
        arxiv = choice.read().get("arxiv") if choice.group == "method" else None
        assert arxiv is None or f"arXiv:{arxiv}" in cited, choice.name


def test_the_bibtex_file_is_up_to_date() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    made = bibtex(citation)
    assert (ROOT / "docs" / "citations.bib").read_text(encoding="utf-8") == made
    keys = [line for line in made.split("\n") if line.startswith("@")]
    assert len(set(keys)) == len(keys) == len(citation["references"]) + 1
