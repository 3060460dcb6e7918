"""What a tracker is told follows from the record alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.report.wandb import entry_of, sample_table, sweep_of
from kvq.results import Store
from tests.report import sweeps


def test_an_entry_is_the_record_under_a_stable_name(tmp_path: Path) -> None:
    record = sweeps.sweep(Store(tmp_path))["good 3"]
    entry = entry_of(record)
    assert entry == entry_of(record)
    assert entry["id"] == record.key[:32]
    assert entry["config"]["settings"] == record.config
    assert entry["config"]["provenance"]["seed"] == 0
    assert entry["name"] == "good 3 · tiny · pydocs · ppl (32-bit cache)"
    assert entry["tags"] == ("good", "tiny", "pydocs", "done")
    other = record.model_copy(update={"metrics": record.metrics | {"nll": 9.0}})
    assert entry_of(other)["id"] == entry["id"]


@pytest.mark.parametrize(
    ("command", "group"),
    [
        ("run.py method=kivi bits=2", None),
        ("run.py -m method=kivi,nsn bits=2,3", "method=kivi,nsn bits=2,3"),
        ("run.py method=kivi,nsn --multirun", "method=kivi,nsn"),
        ("run.py +experiment=main", "+experiment=main"),
        ("run.py -m dataset.path=a/b.txt 'method=kivi'", "dataset.path=a-b.txt method=kivi"),
        ("run.py -m 'unbalanced", "'unbalanced"),
        ("", None),
    ],
)
def test_a_sweep_is_named_by_its_command(command: str, group: str | None) -> None:
    assert sweep_of(command) == group


def test_samples_as_a_table() -> None:
    rows = [{"a": 1, "b": [1, 2]}, {"a": None, "c": "x"}, {"a": 3}]
    assert sample_table(rows[:2]) == (["a", "b", "c"], [[1, "[1, 2]", None], [None, None, "x"]])
    assert sample_table([]) == ([], [])


def test_a_logger_is_no_part_of_a_run() -> None:
    given = ["method=kivi", "bits=2"]
    plain, logged = (
        canonical(resolve(compose([*given, *more])), "model", "data")
        for more in ([], ["logger=wandb", "logger.mode=offline", "logger.project=mine", "logger.group=g"])
    )
    assert plain == logged
    assert "logger" not in plain
