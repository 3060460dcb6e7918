"""Odd records through every report: each is shown or named, and the sound ones and their figures are all there."""

from __future__ import annotations

import functools
import random
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from kvq.errors import RecordError
from kvq.papers import __main__ as papers
from kvq.papers.expected import experiments
from kvq.report.__main__ import main as tables
from kvq.report.comparisons import read_records
from kvq.report.figures import drawing
from kvq.report.figures import every as figures
from kvq.report.html import main as page
from kvq.report.wandb import entry_of, sample_table
from kvq.results import Store
from tests.fuzz.amounts import pieces
from tests.fuzz.odd_records import examples, mutated, put

RESULTS = Path(__file__).parents[2] / "results"
PIECES = pieces(full=1000, quick=15, most=125)
IS_QUICK = len(PIECES) == 1
Sound = list[tuple[dict, bytes]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def sound() -> Sound:
    found = examples(RESULTS, tasks=1 if IS_QUICK else 2)
    if not found:
        pytest.skip("needs the committed records")
    return found


class Drawn(NamedTuple):
    """The sound records in a folder, and their figures; what is drawn there already is not drawn again."""

    folder: Path
    names: frozenset[str]

    @property
    def figures(self) -> Path:
        return self.folder / "figures"


@pytest.fixture(scope="module")
def drawn(sound: Sound, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    folder = tmp_path_factory.mktemp("drawn")
    for record, samples in sound:
        put(folder / "sound", record, samples)
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_cheaply(monkeypatch)
        assert figures.main(["--results", str(folder / "sound"), "--out", str(folder / "figures")]) == 0
    return Drawn(folder, frozenset(path.name for path in (folder / "figures").glob("*.pdf")))


def draw_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of few dots, in the quick tests none: a figure is made, and its numbers are written, all the same."""
    monkeypatch.setattr(drawing, "_DPI", 40)
    if IS_QUICK:
        monkeypatch.setattr(drawing, "image_of", lambda made, kind="png": b"")


_composed = functools.cache(experiments)


@pytest.fixture(autouse=True)
def _cheaper(monkeypatch: pytest.MonkeyPatch, sound: Sound) -> None:
    """The papers' tables are composed once, for the sound records: that and images take the most time."""
    draw_cheaply(monkeypatch)
    present = frozenset((record["model"], record["method"]) for record, _ in sound)
    monkeypatch.setattr(papers, "experiments", lambda _: _composed(present))


@pytest.mark.parametrize(("seed", "count"), PIECES)
def test_no_record_stops_a_report(
    sound: Sound, drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, count: int
) -> None:
    rng, others = random.Random(seed), [samples for _, samples in sound]
    for record, samples in sound:
        put(tmp_path, record, samples)
    known, odd = {record["key"] for record, _ in sound}, set()
    while len(odd) < count:
        found = mutated(*rng.choice(sound), others, rng)
        if found is not None and found[0]["key"] not in known | odd:
            put(tmp_path, *found)
            odd.add(found[0]["key"])
    given = ["--results", str(tmp_path)]
    capsys.readouterr()
    assert tables([*given, "--print"]) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    written = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "tables").glob("*.csv"))
    assert not [key for key in known if key not in written]
    assert not [key for key in odd if key not in written and key[:8] not in said.err]  # as its file is named
    _check_figures(given, drawn, capsys)
    assert page(given) == 0
    shown = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not [key for key in known if key not in shown]
    assert not [key for key in odd if key not in shown and key[:8] not in said.err]
    if not IS_QUICK:
        assert papers.main(given) == 0
    store = Store(tmp_path)
    for record in read_records(store)[0]:
        assert entry_of(record)["id"] == record.key[:32]
        with suppress(RecordError):  # as the tracker, which sends the numbers without them
            sample_table(store.samples_of(record)[:50])
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out


def _check_figures(given: list[str], drawn: Drawn, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not drawn because of odd records is named."""
    code = figures.main([*given, "--out", str(drawn.figures)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert code == ("skipped: " in said.err)
    here = [Path(line).name for line in said.out.splitlines() if line.startswith(str(drawn.folder))]
    assert here or code
