"""All runs as one DataFrame."""

import pytest

import kvq
from kvq.errors import RecordError
from kvq.results import Store
from tests.report import sweeps


def test_a_row_for_each_run(tmp_path):
    store = Store(tmp_path)
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 16.0)
    run = sweeps.put_run(store, "kivi", "2", sweeps.losses(0.1, 0.01, 1), full, 3.0)
    found = kvq.load_results(tmp_path)
    assert list(found["key"]) == [full.key, run.key]
    assert list(found["baseline"]) == [True, False]
    line = found.set_index("key").loc[run.key]
    assert line["delta_nll"] == run.metrics["delta_nll"]
    assert (line["label"], line["bits"], line["task.scoring"]) == ("kivi", "2", run.config["task"].get("scoring"))
    assert found["table"].nunique() == 1
    assert len(found.columns) <= 60


def test_an_empty_folder_is_one_line(tmp_path):
    with pytest.raises(RecordError, match="no records"):
        kvq.load_results(tmp_path)
