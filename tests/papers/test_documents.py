"""docs/experiments.md lists every table and figure of the source documents once, as records and experiments are."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from experiments.docs.documents import PAGE, ROOT, Item, Rows, documents_of
from experiments.docs.places import PLACE, filled
from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.papers.expected import layout_named, names
from kvq.report.figures.drawing import drawn_figures
from kvq.results import Store
from tests.results import made

PRINTED = {
    "nsn_readme": [],
    "nsnquant_paper": [f"Table {n}" for n in range(1, 22)] + [f"Figure {n}" for n in range(1, 14)],
    "oscar_paper_excerpt": ["Table 2", *(f"Figure {n}" for n in (1, 2, 3, 4, 19, 20, 21)), "Algorithm 1"],
    "oscar_review": ["Table 1", *(f"Figure {n}" for n in range(1, 8))],
    "kvquant_plus_plus_paper": [f"Figure {n}" for n in range(1, 10)],
}
"""Numbers read off the documents."""
UNNUMBERED = {
    "nsn_readme": {"main table", "NIAH", "INT4 valley", "mechanism", "memory", "throughput", "claims", "MMLU"},
    "nsnquant_paper": {"section 3.1"},
    "oscar_paper_excerpt": {"LongBench-E", "OCRBench", "MMAU-Pro", "Appendix D"},
    "oscar_review": {
        "gaps by task",
        "needles",
        *(f"limitation {n}" for n in (3, 5, 6, 7)),
        *(f"weakness {n}" for n in range(1, 8)),
    },
    "kvquant_plus_plus_paper": {
        *(f"section 2.2.{n}" for n in (1, 3, 5, 9)),
        *(f"section 3.{n}" for n in range(1, 6)),
        *(f"section {n}" for n in ("5.2", "5.3", "9.1", "9.2", "9.6")),
        "sections 7 and 9.5",
    },
}
"""What they print without a number, or ask for."""


def listed() -> dict[str, list[str]]:
    """First cells of the page's lists, by document."""
    page = PAGE.read_text(encoding="utf-8")
    return {
        place[3]: [line.split("|")[1].strip() for line in place[4].splitlines()[2:]] for place in PLACE.finditer(page)
    }


def test_each_table_and_figure_is_listed_once() -> None:
    assert list(listed()) == list(PRINTED)
    for document, lines in listed().items():
        numbered = Counter(line for line in lines if re.fullmatch(r"(Table|Figure|Algorithm) \d+", line))
        assert numbered == Counter(PRINTED[document]), document
        assert {line.partition(":")[0] for line in lines} >= UNNUMBERED[document], document
        assert len(set(lines)) == len(lines), document


OURS = (None, "embedded", "real", "speed", "suite", "waterfill")
"""Papers of experiments that stand in no document."""


@pytest.mark.long
def test_the_page_is_what_experiments_and_records_say() -> None:
    """`python experiments/docs/documents.py` writes it."""
    rows = Rows(ROOT / "results")
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, "document", rows.table) == page
    stands = {name for items in rows.documents.values() for item in items for name in item.experiments}
    assert stands >= {name for name in names() if layout_named(name).paper not in OURS}


def test_counts_are_of_records(tmp_path: Path) -> None:
    words = ["dataset=wikitext2", "task=ppl/nsnquant_table2", "method=nsnquant", "bits=2", "model=llama_2_7b"]
    config = resolve(compose(words))
    run = {"model": "llama_2_7b", "dataset": "wikitext2", "metrics": {"perplexity": 5.3}}
    Store(tmp_path).put(made.record("nsnquant", "2", settings=canonical(config, "f" * 64, "d" * 64), **run))
    (tmp_path / "figures").mkdir()
    stems = ("memory-llama_3_1_8b-pydocs-1", "memory-tiny_hard-pydocs-2", "memory-tiny-pydocs-3")
    lines = [f"- a title: [PNG]({stem}.png), [CSV]({stem}.csv)" for stem in stems]
    (tmp_path / "figures" / "index.md").write_text("\n".join(lines), encoding="utf-8")
    assert drawn_figures(tmp_path / "figures") == sorted(stems)
    rows = Rows(tmp_path)
    table6 = Item("Table 6", ("nsnquant/table6",), ("memory",), "no [boxes]")
    assert rows.row(table6) == [
        "Table 6",
        "`nsnquant/table6`, figures `memory`",
        "yes",
        "1 of 4, 1 figure",
        "0, 2 figures",
        r"no \[boxes\]",
    ]
    assert rows.row(Item("a scheme", none="shows nothing"))[1:] == ["–", "–", "–", "–", "shows nothing"]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("{experiments: [nsn/no]}", "d, Table 1: no experiment 'nsn/no'"),
        ("{figures: [no-such]}", "d, Table 1: no kind of figure 'no-such'"),
        ("{why: no}", "d, Table 1: 'why': experiments, figures or none"),
        ("{}", "d, Table 1: experiments, figures or the reason"),
    ],
)
def test_an_item_that_stands_for_nothing_is_refused(item: str, said: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)):
        documents_of(f"d: {{paper: null, items: {{Table 1: {item}}}}}")
