"""The leaderboard from constructed records."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvq.config import compose, resolve
from kvq.config.identity import by_names
from kvq.results import Record, Store, run_key
from kvq.results.record import versions_of
from kvq_lab import leaderboard
from kvq_lab.leaderboard import BUDGETS, budget_of, list_entries, render_page
from tests.report import sweeps
from tests.results import made


def put(store: Store, name: str, bits: str, loss: float, stored: float, full: Record | None, kl: float = 0.1) -> Record:
    """A run on record as a run of these settings would be."""
    config = resolve(compose([f"method={name}", *([f"bits={bits}"] if bits else [])]))
    settings = by_names(config)
    known = {"config": settings, "key": run_key(settings), "versions": versions_of(settings, type(config.task))}
    record = sweeps.put_run(store, name, bits, sweeps.losses(loss, 0.01, len(name + bits)), full, stored, **known)
    if full is None:
        return record
    metrics = record.metrics | {"kl_mean": kl, "bits_per_element": stored, "effective_bits": 2 * stored}
    metrics |= {"total_bytes": 4000.0, "cached_tokens": 10.0}  # a residual doubles the bits
    return store.put(record.model_copy(update={"metrics": metrics}), store.samples_of(record))


def filled(root: Path) -> Store:
    store = Store(root)
    full = put(store, "fp16", "", 0.0, 16.0, None)
    put(store, "identity", "", 0.0, 16.0, full, kl=0.0)
    put(store, "zero", "", 3.0, 0.0, full, kl=2.0)
    put(store, "kivi", "2", 0.4, 3.0, full)
    put(store, "oscar", "2", 0.1, 3.125, full)
    put(store, "engine/llamacpp_q8_0", "", 0.01, 8.5, full)
    put(store, "engine/llamacpp_q4_0", "", 0.05, 4.5, full)
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return filled(tmp_path / "results")


def test_budgets() -> None:
    assert [budget_of(bits) for bits in (0.5, 1.25, 1.26, 4.5, 8.0, 8.5)] == [1.25, 1.25, 2.25, 8.0, 8.0, None]
    assert list(BUDGETS) == sorted(BUDGETS)


def test_lines_by_budget_and_loss(store: Store) -> None:
    found = list_entries(store)
    assert [(one.budget, one.method) for one in found] == [
        (3.25, "oscar 2"),
        (3.25, "kivi 2"),
        (8.0, "engine/llamacpp_q4_0"),
    ]
    assert [one.engine for one in found] == ["", "", "by preset"]
    assert [one.bytes for one in found] == pytest.approx(3 * [leaderboard.CONTEXT * 400 / 2])
    assert all((store.runs / one.record).is_file() for one in found)


def test_tables_count_in_all_and_say_from_where_they_pay(store: Store) -> None:
    """OScaR with tables of 0.5 bits at 32K tokens undercuts llama.cpp's 4.5 bits, which loses less, from 12K on."""
    runs = {(one.method, one.bits): one for one in store.scan()[0]}
    oscar = runs["oscar", "2"]
    more = {"calibration_bytes": 1000.0, "calibration_bits_32k": 0.5}
    store.put(oscar.model_copy(update={"metrics": oscar.metrics | more}), store.samples_of(oscar))
    found = {one.method: one for one in list_entries(store)}
    assert found["oscar 2"].totals == pytest.approx([3.125 + 0.5 * 32 / k for k in (1, 8, 32, 128, 1024)])
    assert found["kivi 2"].totals == (3.0,) * 5
    assert found["oscar 2"].pays == "11,916 (engine/llamacpp_q4_0)"
    assert found["kivi 2"].pays == "–"
    assert found["oscar 2"].bytes == pytest.approx(leaderboard.CONTEXT * 400 / 6.25 * 3.125 + 1000)
    assert "11,916 (engine/llamacpp_q4_0)" in render_page(list(found.values()))


def test_needles_of_the_method_itself_stand_beside(store: Store) -> None:
    known = {one.method: one.config for one in store.scan()[0]}
    for method, items, changed in (
        ("kivi", 4, {"seed": 1}),
        ("kivi", 8, {"seed": 2}),
        ("kivi", 9, {"residual": {"size": 1}}),
        ("oscar", 9, {"residual": {"size": 1}}),
    ):
        settings = {**known[method], **changed}
        metrics = {"accuracy": (items - 2) / 8, "items": float(items)}
        store.put(made.record(method, "2", task="niah", metrics=metrics, settings=settings))
    by_name = {one.method: one for one in list_entries(store)}
    assert (by_name["kivi 2"].needles, by_name["oscar 2"].needles) == (0.75, None)


def test_the_page(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert leaderboard.main([f"results={store.root}"]) == 0
    assert "(3 methods on 1 models)" in capsys.readouterr().out
    assert leaderboard.main([f"results={store.root}", f"out={store.root / 'a' / 'page.html'}"]) == 0
    assert 'href="../runs/ppl' in (store.root / "a" / "page.html").read_text(encoding="utf-8")
    text = (store.root / "leaderboard.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.+)</h2>", text) == ["tiny, up to 3.25 bits", "tiny, up to 8 bits"]
    assert "http" not in text.replace("http-equiv", "")
    hostile = [replace(list_entries(store)[0], method="<script>alert(1)</script>", text='"><b>')]
    assert "<script>alert" not in render_page(hostile)
    assert '"><b>' not in render_page(hostile)


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leaderboard.main([f"results={tmp_path}"]) == 1
    assert "no method" in capsys.readouterr().err
    assert leaderboard.main(["speed=1"]) == 2
    assert "results= or out=" in capsys.readouterr().err
