"""docs/findings.md and docs/engines.md say what the records say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvq.results import Store
from tests.results import made

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "experiments" / "docs" / "findings.py"))
Findings, PLACE = SCRIPT["Findings"], SCRIPT["PLACE"]
TEMPLATE = ROOT / "experiments" / "docs" / "templates" / "findings.md"

PRINTED = {"0.75", "1.25", "2.25", "5.09"}
"""Decimals of the page that no record holds: nominal bits and the papers' figures."""


@pytest.fixture
def findings(tmp_path: Path) -> Any:
    store = Store(tmp_path)
    for method, bits, loss in (("kivi", "2", 0.2), ("nsn", "2", 0.05), ("nsn", "3", 0.0125), ("cq", "", 0.1)):
        record = made.record(method, bits, metrics={"delta_nll": loss, "accuracy[length=8]": 0.5})
        store.put(record, [{"side": "key", "error": loss}, {"side": "value", "error": 7.0}])
    return Findings(tmp_path)


USE = "<!-- use: task=ppl metric=delta_nll as=.3f -->\n"


@pytest.mark.parametrize(
    "name", ["engines", *(pytest.param(name, marks=pytest.mark.long) for name in ("findings", "rivals", "waterfill"))]
)
def test_the_page_is_what_the_records_say(name: str) -> None:
    """`python experiments/docs/findings.py` writes it; a claim that fails is a sentence to change."""
    template = TEMPLATE.with_name(f"{name}.md")
    assert template in SCRIPT["TEMPLATES"]
    findings = Findings(ROOT / "results")
    page = findings.page(template.read_text(encoding="utf-8"))
    assert findings.failed == []
    assert page == SCRIPT["page_of"](template).read_text(encoding="utf-8")
    assert SCRIPT["page_of"](template) == ROOT / "docs" / f"{name}.md"


def test_no_measured_decimal_is_typed_by_hand() -> None:
    text = re.sub(r"<!--.*?-->", "", PLACE.sub("", TEMPLATE.read_text(encoding="utf-8")))
    assert set(re.findall(r"\d*\.\d{2,}(?!\d)", text)) == PRINTED


def test_a_claim_that_does_not_hold_is_named(findings: Any) -> None:
    assert findings.page(USE + "<!-- claim: kivi 2 < nsn 2 -->\nSo.\n") == "So.\n"
    assert findings.failed == ["kivi 2 < nsn 2: 0.2 < 0.05"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("oscar 2", "0 records"),
        ("nsn 2|3", "2 records"),
        ("nsn 2 metric=none", "no metric 'none'"),
        ("nsn 2 nowhere", "no alias 'nowhere'"),
        ("nsn 2 metric=rows.error row.side=both", "no such rows"),
    ],
)
def test_a_place_of_no_one_run_says_so(findings: Any, place: str, said: str) -> None:
    with pytest.raises(SCRIPT["NoSuchRun"], match=said):
        findings.page(USE + "{{" + place + "}}\n")
