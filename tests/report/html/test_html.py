"""The report's page: all of the records, nothing but data from them, the same bytes for the same records."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvq.config import plugins
from kvq.report.html import embed_figures, main, payload, render, script_json, shown
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import Row, Table, Tables
from kvq.results import Store
from tests.report import hostile, sweeps
from tests.results import made

ROOT = Path(__file__).resolve().parents[3]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Page(HTMLParser):
    """Elements with their attributes, and what stands in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in self.raw else None
        if self._inside:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[self._inside][-1] += data


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "results")
    runs = sweeps.sweep(store)
    hostile.put_hostile(store, runs["fp16"])
    return store


def test_every_run_is_there_with_its_numbers_and_settings(store: Store) -> None:
    records = {record.key: record for record in store.scan()[0]}
    data = payload(build_tables(store))
    assert {run["key"] for run in data["runs"]} == records.keys()
    for run in data["runs"]:
        record, pool = records[run["key"]], data["pool"]
        metrics = dict(zip(pool[run["names"]], run["values"], strict=True))
        metrics.pop("within_noise", None)  # of the table, for runs with a loss
        assert metrics == record.metrics
        config = {name: pool[place] for name, place in run["record"]["config"].items()}
        assert config == record.config
        assert data["protocols"][run["protocol"]]["title"].startswith(shown(record.task))
    assert [run["bits"] for run in data["runs"] if run["method"] == "good"] == ["2", "3", "4"]
    assert any(run["best"] for run in data["runs"])
    assert any(run["noise"] for run in data["runs"])


def test_text_of_records_is_never_markup(store: Store) -> None:
    text = render(build_tables(store), warnings=list(hostile.ALL))
    page = Page(text)
    assert [attributes.get("type") for tag, attributes in page.elements if tag == "script"] == [
        "application/json",
        None,
    ]
    assert {tag for tag, _ in page.elements} & {"iframe", "object", "embed", "base", "link", "form", "svg"} == set()
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "srcdoc")], tag
        assert (
            tag == "script" or "src" not in attributes or (attributes["src"] or "").startswith("data:image/png;base64,")
        )
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(identifiers)) == len(identifiers)
    for target in (attributes["href"] or "" for _, attributes in page.elements if "href" in attributes):
        assert target.removeprefix("#") in identifiers
    names = {run["method"] for run in json.loads(page.raw["script"][0])["runs"]}
    assert {hostile.SCRIPT, hostile.IMAGE, hostile.TEMPLATE} <= names
    assert "\u202e" not in text
    assert "49" not in re.findall(r"<td>([^<]*)</td>", text)


def test_the_pages_script_and_style_ask_for_nothing(store: Store) -> None:
    page = Page(render(build_tables(store)))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttp|import\(", page.raw["script"][1]
    )
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w./]*", page.raw["script"][1] + page.raw["style"][0]))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address that is read
    assert not re.search(r"url\(|@import|@font-face", page.raw["style"][0])


def test_a_page_that_cannot_be_written_is_one_line(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store.root / "a file"
    folder.write_text("", encoding="utf-8")
    assert main(["--results", str(store.root), "--out", str(folder / "page.html")]) == 1
    assert capsys.readouterr().err.startswith("error: report: cannot write '")


def test_figures_stop_where_the_page_would_get_too_large(tmp_path: Path, store: Store) -> None:
    for name in ("a-tiny-0123ab", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(PNG)
    (tmp_path / "a.csv").write_text("x", encoding="utf-8")
    figures = embed_figures(sorted(tmp_path.glob("*.png")), room=2 * len("data:image/png;base64,") + 3 * len(PNG))
    assert [(figure.title, figure.width, figure.uri is None) for figure in figures] == [
        ("a · tiny", 1, False),
        ("b", 1, False),
        ("c", 1, True),
    ]
    text = render(build_tables(store), figures)
    assert text.count('<img src="data:image/png;base64,') == 2
    assert "figures/c.png" in text


def test_json_in_a_script_cannot_end_it() -> None:
    value = {hostile.SCRIPT: [hostile.COMMENT, "]]>&amp;", "\u2028 é", "__proto__"]}
    text = str(script_json(value))
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="Out of range"):
        script_json(float("nan"))


@pytest.mark.parametrize(
    ("given", "linked"),
    [(number, True) for number in ("2402.02750", "2605.19660")]
    + [(text, False) for text in (None, 2402.0275, "", "javascript:alert(1)", "2402.02750/../x", "2402.02750\n", "x")],
)
def test_papers_are_linked_and_nothing_else(given: object, linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = SimpleNamespace(group="method", name="mine", read=lambda: {"arxiv": given})
    monkeypatch.setattr(plugins, "all_choices", lambda: [choice])
    table = Table("", "", (), (Row(made.record("mine", "2"), "mine", "2"),), ())
    assert payload(Tables((table,)))["methods"]["mine"]["link"] == (
        f"https://arxiv.org/abs/{given}" if linked else None
    )
