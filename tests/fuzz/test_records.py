"""Odd records through every report: no traceback, and the sound ones are all there."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kvq.report.__main__ import main as tables
from kvq.report.diff import main as diff
from kvq.report.figures import every as figures
from kvq.report.html.__main__ import main as page
from kvq.report.judged import read_records
from kvq.report.tables.experiments import by_signature
from kvq.report.wandb.entry import entry_of
from kvq.results import Store
from tests.fuzz.odd_records import examples, mutated, put

RESULTS = Path(__file__).parents[2] / "results"
COUNT = int(os.environ.get("KVQ_FUZZ", "1000"))
STORES = 8

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def sound() -> list[tuple[dict, bytes]]:
    found = examples(RESULTS, tasks=2)
    if not found:
        pytest.skip("needs the committed records")
    return found


@pytest.mark.parametrize("seed", range(STORES))
def test_no_record_stops_a_report(
    sound: list[tuple[dict, bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng, others = random.Random(seed), [samples for _, samples in sound]
    for record, samples in sound:
        put(tmp_path / "sound", record, samples)
        put(tmp_path / "odd", record, samples)
    known = {record["key"] for record, _ in sound}
    made = 0
    while made < COUNT // STORES:
        found = mutated(*rng.choice(sound), others, rng)
        if found is not None and found[0]["key"] not in known:
            put(tmp_path / "odd", *found)
            made += 1
    given = ["--results", str(tmp_path / "odd")]
    assert tables([*given, "--print"]) == 0
    assert figures.main(given) in (0, 1)
    assert page(given) == 0
    assert diff([str(tmp_path / "sound"), str(tmp_path / "odd")]) == 0
    records, _ = read_records(Store(tmp_path / "odd"))
    assert by_signature(records)
    assert all(entry_of(record) for record in records)
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    written = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "odd" / "tables").glob("*.csv"))
    assert all(key in written for key in known)
