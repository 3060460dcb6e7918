"""The settings of committed records, composed anew, give the keys that the records have: none is lost by a change."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from kvq.config import Config, compose, resolve
from kvq.config.identity import canonical
from kvq.papers.cells import cells_of, jobs_of
from kvq.papers.expected import layout_named
from kvq.report.settings import flatten
from kvq.results import Record, Store, run_key

RESULTS = Path(__file__).parents[2] / "results"


@functools.cache
def records() -> list[Record]:
    found = Store(RESULTS).scan()[0]
    assert len(found) >= 398
    return found


def one_per_protocol() -> list[Record]:
    """The first record of each task, model and text, and of each method."""
    protocols = {json.dumps([r.config["task"], r.config["model"], r.config["dataset"]]): r for r in records()}
    return [*protocols.values(), *{record.method: record for record in records()}.values()]


def key_of(record: Record) -> str:
    """The key of a run with the record's names, task settings and fingerprints; residuals are the presets'."""
    given = [f"{group}={getattr(record, group)}" for group in ("model", "task", "dataset", "method")]
    given += [f"bits={record.bits}"] if record.bits else []
    task = [leaf for leaf in flatten(record.config["task"], "task") if leaf[0] != "task.name" and leaf[1] != "null"]
    given += ["=".join(leaf) for leaf in task]
    given += ["residual.prefill_block=whole"] if "9_2" in record.provenance.command else []  # KVQuant++, one block
    return _key(record, resolve(compose(given)))


def _key(record: Record, config: Config) -> str:
    """The key of a run of these settings with the record's fingerprints."""
    calibration = record.config["method"].get("calibration") or {}
    fingerprints = [record.config[group]["fingerprint"] for group in ("model", "dataset")]
    return run_key(canonical(config, *fingerprints, calibration.get("fingerprint")))


def asked_again(record: Record) -> bool:
    """Whether the experiment that made a record still asks for a run of its key: one whose runs depart from presets."""
    named = re.search(r"\+experiment=(oscar/\w+) model=(\w+)", record.provenance.command)
    return named is not None and any(_key(record, config) == record.key for config in _runs(*named.groups()))


@functools.cache
def _runs(experiment: str, model: str) -> list[Config]:
    """The runs of an experiment's stand-in on an embedded model."""
    layout = layout_named(experiment)
    return [resolve(compose(list(job))) for job in jobs_of(cells_of(layout), [f"model={model}"], layout.small)]


def check(some: list[Record]) -> None:
    lost = [
        f"{r.task} {r.model} {r.method} {r.bits}: {r.key[:12]}"
        for r in some
        if key_of(r) != r.key and not asked_again(r)
    ]
    assert not lost, f"{len(lost)} of {len(some)}: {lost[:5]}"


def test_one_record_of_each_protocol_and_method_is_found_by_its_key() -> None:
    check(one_per_protocol())


@pytest.mark.long
def test_every_committed_record_is_found_by_its_key() -> None:
    check(records())
