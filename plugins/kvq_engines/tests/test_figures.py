"""Engines beside their presets, in a table and a figure of their records."""

import numpy as np
import pytest

from kvq.report.figures.every import drawings
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import csv, markdown
from kvq.results import Store
from kvq_engines.figures import KINDS, agreement_figure, agreement_table
from tests.report import sweeps

METRICS = {
    "kl_p999": 0.4,
    "kl_max": 1.5,
    "preset_kl": 0.012,
    "preset_off": -0.0004,
    "preset_off_se": 0.0003,
    "agreement_kl": 0.0009,
    "agreement_correlation": 0.95,
    "agreement_kl_q8": 0.00002,
    "agreement_correlation_q8": 0.999,
    "agreement_kl_stored": 0.000001,
    "preset_kl_self": 0.0004,
}
FULL = {"agreement_kl": 0.0, "preset_off": 0.0}


@pytest.fixture
def table(tmp_path):
    store = Store(tmp_path)
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 16.0)
    run = sweeps.put_run(store, "engine/llamacpp_mine", "", sweeps.losses(0.1, 0.01, 1), full, 4.5)
    sweeps.put_more(store, full, FULL)
    sweeps.put_more(store, run, METRICS)
    (found,) = build_tables(store).tables
    return found


def test_a_table_says_what_an_engine_and_its_preset_agree_on(table):
    shown = markdown(table)
    assert "KL p99.9 (nats)" in shown
    assert "−0.0004 ± 0.0003" in shown or "-0.0004 ± 0.0003" in shown
    assert "0.00090" in shown
    assert "agreement_kl_q8" in csv(table).splitlines()[0]


def test_the_figure_marks_each_kind_for_each_method(table):
    numbers = agreement_table(table)
    assert list(numbers["method"]) == ["fp16", "engine/llamacpp_mine"]
    assert numbers.loc[1, "agreement_kl"] == METRICS["agreement_kl"]
    (axis,) = agreement_figure(numbers, "title").axes
    assert [line.get_label() for line in axis.lines] == list(KINDS.values())
    assert axis.get_xscale() == "log"
    assert np.nanmin([line.get_xdata() for line in axis.lines]) > 0


def test_tables_without_engines_have_none(tmp_path):
    store = Store(tmp_path)
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 16.0)
    sweeps.put_run(store, "good", "2", sweeps.losses(0.1, 0.01, 1), full, 2.0)
    tables = build_tables(store)
    assert agreement_table(tables.tables[0]) is None
    assert "KL p99.9" not in markdown(tables.tables[0])
    assert not [one for one in drawings([], store, tables.tables) if one.stem.startswith("agreement")]
