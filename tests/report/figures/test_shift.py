"""The figure of calibrations on another text: what is compared with what, and the files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvq.report.figures.perplexity import shift_table
from kvq.results import Record, Store
from kvq.results.statistics import delta_nll_of_samples
from tests.report.sweeps import losses, put_run
from tests.results import made


def put(
    store: Store, method: str, dataset: str, text: str | None, values: list[float], full: Record | None, bits: float
) -> Record:
    settings: dict[str, Any] = made.config(method.partition("/")[0], "2", dataset={"fingerprint": dataset})
    if text is not None:
        settings["method"]["calibration"] = {"dataset": text, "samples": 16, "fingerprint": text * 2}
    key = made.record(method, settings=settings).key
    return put_run(store, method, "2", values, full, bits, settings=settings, dataset=dataset, key=key)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    for seed, dataset in enumerate(("pydocs", "pysource")):
        full = put(store, "fp16", dataset, None, losses(0.0, 0.0, 0), None, 32.0)
        for text, method in (("pydocs", "cq"), ("pysource", "cq/pysource")):
            cost = 0.1 if text == dataset else 0.3
            put(store, method, dataset, text, losses(cost, 0.01, seed), full, 2.25)
        put(store, "near", dataset, None, losses(0.2, 0.01, 5), full, 2.3)
        put(store, "far", dataset, None, losses(0.0, 0.01, 6), full, 4.3)
    return store


def test_a_shift_is_paired_with_the_same_method_on_the_text_of_the_test(store: Store) -> None:
    records = store.scan()[0]
    table = shift_table(records, store)
    assert len(table) == 2 * (2 + 1)  # each text: cq on both, and the method without calibration at as many bits
    shifted = table[table["shifted"]]
    assert set(shifted["method"]) == {"cq"}
    pairs = set(zip(shifted["dataset"], shifted["calibrated_on"], strict=True))
    assert pairs == {("pydocs", "pysource"), ("pysource", "pydocs")}
    calibrated = [record for record in records if "calibration" in record.config["method"]]
    for line in shifted.itertuples():
        here = [record for record in calibrated if record.dataset == line.dataset]
        runs = {record.config["method"]["calibration"]["dataset"]: record for record in here}
        other, own = (store.samples(runs[text].key) for text in (line.calibrated_on, line.dataset))
        assert line.shift == pytest.approx(delta_nll_of_samples(other, own).value)
        assert line.shift == pytest.approx(0.2, abs=0.01)
    assert all(math.isnan(value) for value in table[~table["shifted"]]["shift"])
    assert set(table[table["calibrated_on"] == "none"]["method"]) == {"near"}


def test_nothing_is_drawn_without_two_texts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    full = put(store, "fp16", "pydocs", None, losses(0.0, 0.0, 0), None, 32.0)
    put(store, "cq", "pydocs", "pydocs", losses(0.1, 0.01, 1), full, 2.25)
    assert shift_table(store.scan()[0], store).empty
