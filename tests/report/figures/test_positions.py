"""Loss by position, in a figure of records that have it."""

import pytest

from kvq.report.figures.perplexity import places_table, positions_figure
from kvq.report.tables.build import build_tables
from kvq.results import Store
from tests.report import sweeps


@pytest.fixture
def table(tmp_path):
    store = Store(tmp_path)
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 16.0)
    run = sweeps.put_run(store, "kivi", "2", sweeps.losses(0.1, 0.01, 1), full, 3.0)
    sweeps.put_run(store, "oscar", "2", sweeps.losses(0.1, 0.01, 1), full, 3.0)
    more = {"delta_nll[position=1024]": 0.3, "delta_nll_se[position=1024]": 0.1, "delta_nll[position=0]": 0.2}
    sweeps.put_more(store, run, more)
    (found,) = build_tables(store).tables
    return found


def test_a_line_for_each_run_that_has_positions(table):
    numbers = places_table(table, "position")
    assert numbers[["method", "first", "delta_nll"]].values.tolist() == [["kivi", 0, 0.2], ["kivi", 1024, 0.3]]
    (axis,) = positions_figure(numbers, "title").axes
    assert axis.containers[0].lines[0].get_xdata().tolist() == [0, 1024]


def test_none_without(tmp_path):
    store = Store(tmp_path)
    sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 16.0)
    assert all(places_table(table, "position") is None for table in build_tables(store).tables)
