"""docs/findings.md and docs/engines.md say what the records say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvq.report.figures.every import drawings
from kvq.report.labels import labelled
from kvq.results import Store
from tests.results import made

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "experiments" / "docs" / "findings.py"))
Findings, PLACE = SCRIPT["Findings"], SCRIPT["PLACE"]
TEMPLATE = ROOT / "experiments" / "docs" / "templates" / "findings.md"

PRINTED = {"1.25", "2.25", "5.09"}
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


def test_every_format_of_the_engines_page_has_a_place_for_its_loss() -> None:
    """Its rows read the preset that they name, or say below the table whose numbers they show."""
    text = TEMPLATE.with_name("engines.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| ") and "`engine/" in row]
    assert len(rows) > 35
    for row in rows:
        named = re.findall(r"`(engine/[\w/]+)[` ]", row)
        real, embedded = PLACE.findall(row)
        assert real.endswith((" - paired fp16 -", " 3 paired fp16 -")), row
        assert embedded == real.replace(" paired", " embedded paired"), row
        read = set(real.partition(" ")[0].split("|"))
        assert named[0] in read or read == {"engine/vllm_fp8"}, row


def test_no_measured_decimal_is_typed_by_hand() -> None:
    text = re.sub(r"<!--.*?-->", "", PLACE.sub("", TEMPLATE.read_text(encoding="utf-8")))
    assert set(re.findall(r"\d*\.\d{2,}(?!\d)", text)) == PRINTED


@pytest.mark.long
def test_what_is_said_of_noise_is_claimed() -> None:
    """A sentence on noise, or one that says what to take, stands below a claim on noise."""
    text = TEMPLATE.read_text(encoding="utf-8")
    items = re.findall(r"((?:^<!-- claim: .+ -->\n)*)(^- .+\n(?:  .+\n)*)", text, re.M)
    said = [(claims, item) for claims, item in items if re.search(r"\bnoise\b|\*\*[^*]*\btake\b", item)]
    assert len(said) > 4
    for claims, item in said:
        assert " ~ " in claims or "within_noise" in claims or "(`widths`)" in item, item
    store = Store(ROOT / "results")
    scored = [record for record in labelled(store)[0] if record.task == "ppl"]
    widths = [drawing for drawing in drawings(scored, store, skipped=[]) if drawing.stem.startswith("widths")]
    assert widths
    assert not any(drawing.table["valley"].any() for drawing in widths)


def test_runs_that_are_within_noise_of_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for method, shift in (("kivi", 0.0), ("nsn", 0.5), ("cq", 0.0)):
        jitter = 0.1 if method == "cq" else 0.0
        rows = made.samples([250.0 + shift + jitter * (-1) ** place for place in range(8)])
        store.put(made.record(method, "2", metrics={"nll": 2.5}), rows)
    found = Findings(tmp_path)
    assert (
        found.page("<!-- use: task=ppl metric=nll -->\n<!-- claim: cq 2 ~ kivi 2 -->\n<!-- claim: nsn 2 ~ kivi 2 -->\n")
        == ""
    )
    assert found.failed == ["nsn 2 ~ kivi 2: they differ beyond noise, tested as one pair"]


def test_places(findings: Any) -> None:
    text = (
        USE
        + "{{nsn 2}} {{nsn 3 as=+.4f}} {{cq -}} {{kivi 2 minus nsn 2}} {{kivi 2 over nsn 2 as=.1f}} "
        + "{{nsn 2 metric=accuracy[length=8] as=.0%}} {{kivi|x 2 metric=rows.error row.side=key as=.1f}}\n"
    )
    assert findings.page(text) == "0.050 +0.0125 0.100 0.150 4.0 50% 0.2\n"


def test_lines_are_settings_and_paragraphs_wrap(findings: Any) -> None:
    text = (
        USE + "<!-- alias: three = bits=3 -->\n<!-- claim: nsn 3 < nsn 2 < kivi 2 < 1 -->\n- one\n  {{nsn 2 three}}\n"
    )
    assert findings.page(text) == "- one 0.013\n" or findings.page(text) == "- one 0.012\n"
    assert findings.failed == []


def test_a_claim_that_does_not_hold_is_named(findings: Any) -> None:
    assert findings.page(USE + "<!-- claim: kivi 2 < nsn 2 -->\nSo.\n") == "So.\n"
    assert findings.failed == ["kivi 2 < nsn 2: 0.2 < 0.05"]


def test_a_run_that_is_not_measured_has_a_dash_in_a_table_alone(findings: Any) -> None:
    """In a sentence other words may stand for it."""
    text = (
        USE
        + "| {{cq - else=–}} | {{qjl - else=–}} | {{qjl - else=– paired cq -}} |\nIt is {{qjl - else=unmeasured}}.\n"
    )
    assert findings.page(text) == "| 0.100 | – | – |\nIt is unmeasured.\n"
    with pytest.raises(SCRIPT["NoSuchRun"], match="0 records"):
        findings.page(USE + "It is {{qjl - else=–}}.\n")
    with pytest.raises(SCRIPT["NoSuchRun"], match="2 records"):
        findings.page(USE + "| {{nsn 2|3 else=–}} |\n")


def test_settings_of_a_method_are_not_those_of_what_it_is_compared_with(findings: Any) -> None:
    assert findings.page(USE + "{{kivi 2 method.key.quantizer._target_=kivi over nsn 2 as=.1f}}\n") == "4.0\n"
    with pytest.raises(SCRIPT["NoSuchRun"], match="0 records"):
        findings.page(USE + "{{kivi 2 over nsn 2 method.key.quantizer._target_=kivi}}\n")


def test_a_record_that_departs_from_its_preset_is_read_where_the_setting_is_named(tmp_path: Path) -> None:
    settings = made.config("kivi", "2") | {"method": {"eviction": {"budget": 0.19}}}
    words = {"method": ["eviction budget 0.19"], "protocol": [], "first_token": []}
    record = made.record("kivi", "2", settings=settings, metrics={"delta_nll": 0.5}, from_presets=words)
    Store(tmp_path).put(record)
    findings = Findings(tmp_path)
    with pytest.raises(
        SCRIPT["NoSuchRun"], match=r"departs from its preset \(eviction budget 0.19\); name the setting"
    ):
        findings.page(USE + "{{kivi 2}}\n")
    assert findings.page(USE + "{{kivi 2 method.eviction.budget=0.19}}\n") == "0.500\n"


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


def test_methods_in_the_order_of_their_loss_and_of_their_texts() -> None:
    config = made.config("rtn", "2", made.TASK | {"scoring": "generation"})
    records = []
    for index in range(9):
        own = {"settings": config | {"seed": index}, "bits": "2"}
        records.append(made.record(f"m{index}", **own, metrics={"delta_nll": 0.1 * index}))
        texts = {"settings": config | {"seed": 100 + index}, "bits": "2", "task": "trajectory"}
        records.append(made.record(f"m{index}", **texts, metrics={"kept_tokens": 60.0 - index**2}))
    table = SCRIPT["text_order_table"](records)
    assert (len(table), set(table["model"]), set(table["methods"])) == (9, {"tiny"}, {9})
    assert table["rho"].tolist() == [1.0] * 9
    assert SCRIPT["text_order_table"](records[::2]).empty
