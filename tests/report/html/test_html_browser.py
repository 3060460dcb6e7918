"""The report's page in a real browser: what it shows and does, and that nothing of a record runs or is fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.docs import browser
from kvq.report.html import render, write_report
from kvq.report.tables.build import build_tables
from kvq.results import Record, Store
from tests.report import hostile, sweeps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(browser.missing()), reason=str(browser.missing())),
    # What selenium leaves to the garbage collector is none of the page's business.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser.browser() as driver:
        driver.get("about:blank")
        driver.get_log("performance")  # the browser's own first page
        yield driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Record]:
    store = Store(folder / "results")
    runs = sweeps.sweep(store)
    return runs | dict(zip(("done", "refused", "apart"), hostile.put_hostile(store, runs["fp16"]), strict=True))


@pytest.fixture(scope="module")
def address(folder: Path, runs: dict[str, Record]) -> str:
    return write_report(Store(folder / "results"), folder / "report.html").as_uri()


@pytest.fixture
def page(driver: Any, address: str) -> Any:
    """The page as it opens, wide and light; afterwards it must have thrown no error and asked for nothing."""
    browser.resize(driver, 1360, 1000)
    browser.scheme(driver, "light")
    opened(driver, address)
    yield driver
    assert driver.execute_script("return window.hurt") is None
    assert [line for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
    asked = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in sent} <= {"file", "data", "blob"}


def opened(driver: Any, address: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get("about:blank")  # else another fragment of the same page would load nothing
    driver.get(address)
    ready = "return document.documentElement.dataset.ready"  # the records are inflated first
    assert WebDriverWait(driver, 60).until(lambda driver: driver.execute_script(ready)) == "true"


def js(driver: Any, code: str, *given: Any) -> Any:
    return driver.execute_script(f"return {code}", *given)


def column(driver: Any, name: str) -> list[str]:
    return js(
        driver,
        "[...document.querySelectorAll('#run-table tbody tr')].map(row => row.querySelector("
        '`td[data-label="${arguments[0]}"]`).textContent)',
        name,
    )


def click(driver: Any, selector: str) -> None:
    from selenium.webdriver.common.by import By

    element = driver.find_element(By.CSS_SELECTOR, selector)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def until(driver: Any, condition: str) -> None:
    """Wait for a condition of the page, at most ten seconds."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 10).until(lambda page: js(page, condition) is True)


def press(driver: Any, *names: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    for name in names:
        ActionChains(driver).send_keys(getattr(Keys, name)).perform()


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace("≈ ", "").split(" ± ")[0]) for cell in cells if cell != "–"]


def test_rows_are_those_of_the_task_and_a_heading_sorts_them(page: Any) -> None:
    assert js(page, "document.getElementById('tally').textContent") == "9 of 10 runs"
    click(page, "th[data-column='perplexity'] button")
    shown = column(page, "PPL")
    assert numbers(shown) == sorted(numbers(shown))
    assert shown[-1] == "–"  # no number, last whichever way
    assert js(page, "document.querySelector('th[data-column=perplexity]').ariaSort") == "ascending"
    click(page, "th[data-column='perplexity'] button")
    shown = column(page, "PPL")
    assert numbers(shown) == sorted(numbers(shown), reverse=True)
    assert shown[-1] == "–"


def test_filters_narrow_the_table_and_the_plot_and_stay_in_the_address(page: Any, address: str) -> None:
    assert js(page, "document.querySelectorAll('.point').length") == 7
    click(page, "[data-facet='method'] summary")
    click(page, "[data-facet='method'] input[value='good']")
    click(page, "[data-facet='bits'] summary")
    assert js(page, "document.querySelector('[data-facet=method]').open") is False
    click(page, "[data-facet='bits'] input[value='3']")
    assert column(page, "Bits") == ["3"]
    assert js(page, "document.querySelectorAll('.point').length") == 1
    kept = js(page, "location.href")
    opened(page, kept)
    assert column(page, "Bits") == ["3"]
    click(page, "#reset")
    assert js(page, "document.getElementById('tally').textContent") == "9 of 10 runs"


def test_search_and_the_range_of_bits(page: Any, runs: dict[str, Record]) -> None:
    click(page, "#search")
    page.switch_to.active_element.send_keys("flat")
    assert set(js(page, "[...document.querySelectorAll('#run-table .open')].map(b => b.textContent)")) == {"flat"}
    page.switch_to.active_element.send_keys(" nothing at all")
    assert js(page, "document.querySelector('#run-table .nothing').textContent").startswith("No run passes")
    click(page, "#reset")
    click(page, "#high")
    page.switch_to.active_element.send_keys("3.15")
    sizes = numbers(column(page, "Eff."))
    assert sizes
    assert max(sizes) <= 3.15


def test_numbers_are_rounded_as_in_the_tables(page: Any) -> None:
    """Python and JavaScript differ at exact halves."""
    kinds = [column(page, "Eff."), column(page, "PPL"), column(page, "Top-1%")]
    tables = js(
        page,
        "[3, 4, 9].map(place => [...document.querySelectorAll('details[open] tbody tr')]"
        ".map(row => row.cells[place].textContent))",
    )
    assert [sorted(cell for cell in cells if cell != "–") for cells in kinds] == [
        sorted(cell for cell in cells if not cell.startswith("–")) for cells in tables
    ]


def test_a_point_opens_its_run_and_escape_returns_to_it(page: Any, runs: dict[str, Record]) -> None:
    wanted = runs["good 2"]
    click(page, f".point[data-key='{wanted.key}']")
    assert js(page, "document.getElementById('detail').open") is True
    text = js(page, "document.getElementById('detail-body').innerText")
    assert wanted.provenance.command in text
    assert "key.quantizer.bits" in text
    assert f"run={wanted.key}" in js(page, "location.hash")
    press(page, "ESCAPE")
    assert js(page, "document.getElementById('detail').open") is False
    until(page, "!location.hash.includes('run=')")  # the dialog says that it is closed a moment later


def test_everything_works_from_the_keyboard(page: Any, runs: dict[str, Record]) -> None:
    js(page, "document.querySelector('.point[tabindex=\"0\"]').focus()")
    first = js(page, "document.activeElement.dataset.key")
    press(page, "ARROW_RIGHT")
    second = js(page, "document.activeElement.dataset.key")
    assert {first, second} <= {record.key for record in runs.values()}
    assert first != second
    assert js(page, "document.getElementById('tip').hidden") is False
    press(page, "ENTER")
    assert second in js(page, "location.hash")
    press(page, "ESCAPE")
    assert js(page, "document.activeElement.dataset.key") == second
    js(page, "document.querySelector('.skip').focus()")
    press(page, "ENTER")
    assert js(page, "document.activeElement.id") == "runs"


@pytest.mark.parametrize("every", [60, pytest.param(6, marks=pytest.mark.long)])
def test_the_record_shown_is_the_record_on_disk(driver: Any, folder: Path, committed: Any, every: int) -> None:
    """Of the committed records, but for integral floats, which JavaScript has not, and verdicts, judged anew."""
    store, judged = Store(RESULTS), {record.key: record.metrics for record in committed[0]}
    page = folder / "committed.html"
    page.write_text(render(build_tables(store, scanned=committed)), encoding="utf-8")
    opened(driver, page.as_uri())
    for key in sorted(judged)[::every]:
        driver.execute_script("location.hash = '#?run=' + arguments[0]; location.reload()", key)
        shown = js(driver, "document.querySelector('#detail-body details code').textContent")
        stored = json.loads(store.record_path(key).read_text(encoding="utf-8"))
        assert json.loads(shown) == stored | {"metrics": judged[key]}


def test_hostile_text_is_text(page: Any, runs: dict[str, Record]) -> None:
    names = js(page, "[...document.querySelectorAll('#run-table .open')].map(button => button.textContent)")
    assert hostile.SCRIPT in names
    for run in ("done", "refused", "apart"):
        driver_hash = f"#?task=&run={runs[run].key}"
        page.execute_script("location.hash = arguments[0]; location.reload()", driver_hash)
        text = js(page, "document.getElementById('detail-body').textContent")
        assert hostile.SCRIPT in text
        assert js(page, "document.querySelectorAll('#detail img, #detail script, #detail iframe').length") == 0
    assert js(page, "document.querySelectorAll('body img').length") == 0
    assert js(page, "document.querySelectorAll('script').length") == 2


def test_narrow_pages_do_not_scroll_sideways(page: Any) -> None:
    for width in (360, 768):
        browser.resize(page, width, 800)
        assert js(page, "document.documentElement.scrollWidth") <= width
        assert js(page, "document.querySelector('#plot svg').getBoundingClientRect().right") <= width
    browser.resize(page, 360, 800)
    assert js(page, "getComputedStyle(document.querySelector('#run-table tbody tr')).display") == "grid"


def test_dark_and_light_have_contrast(page: Any) -> None:
    """WCAG's 4.5:1 for text and its soft variant, in both schemes and by the button."""
    names = "['--ink', '--soft', '--accent', '--paper']"
    code = f"{names}.map(name => getComputedStyle(document.documentElement).getPropertyValue(name))"
    papers = []
    for name in ("light", "dark"):
        browser.scheme(page, name)
        *inks, paper = (luminance(colour) for colour in js(page, code))
        papers.append(paper)
        for ink in inks:
            high, low = max(ink, paper), min(ink, paper)
            assert (high + 0.05) / (low + 0.05) >= 4.5
    assert papers[0] > 0.8 > 0.1 > papers[1]
    click(page, "#theme")
    assert luminance(js(page, code)[-1]) == papers[0]


def luminance(colour: str) -> float:
    digits = colour.strip().removeprefix("#")
    assert re.fullmatch("[0-9a-f]{6}", digits)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
