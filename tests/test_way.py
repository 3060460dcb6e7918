"""The way from a command to its table: what a sweep of four runs composes, names, measures and reads, each once."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from kvq import runs
from kvq.cli import main
from kvq.config import composing
from kvq.results import store
from tests.sweeps import small_run

SWEEP = ["-m", "method=kivi/block,rtn", "bits=2,3"]
JOBS, FULL_PRECISION = 4, 1


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of what a way should do once for each run."""
    found: Counter[str] = Counter()

    def count(home: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(home, name)

        def counted(*given: Any, **more: Any) -> Any:
            found[name] += 1
            return work(*given, **more)

        monkeypatch.setattr(home, name, counted)

    count(composing, "composition")
    count(ConfigLoaderImpl, "load_configuration")
    count(runs, "canonical")
    count(runs, "run_key")
    count(runs, "_measure")
    count(store, "parse_record")
    return found


def test_a_sweep_composes_names_and_reads_each_run_once(
    tmp_path: Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [f"results_dir={tmp_path / 'results'}"]
    given = [*small_run(tmp_path), *results, "task.max_windows=1"]
    assert main([*given, *results, "method=nsn", "bits=4", "task.context=64", "task.stride=64"]) == 0  # another table's
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The presets of two methods, by which new records are labelled, are composed too, once in a process.
    for measured, labels, choices in ((JOBS + FULL_PRECISION, 2, 5), (0, 0, 0)):
        composing._plain.cache_clear()
        composing._compose_choices.cache_clear()
        counts.clear()
        assert main([*given, *SWEEP]) == 0
        assert JOBS + FULL_PRECISION <= counts["composition"] <= JOBS + FULL_PRECISION + labels
        # Hydra's own: its mode and settings, those of the sweep; then each set of choices, until the cache has it.
        assert counts["load_configuration"] <= 2 + choices
        assert counts["canonical"] == counts["run_key"] == JOBS + FULL_PRECISION
        assert counts["_measure"] == measured
        # Of a table only its runs; what was read for a look-up is not read again.
        assert counts["parse_record"] <= JOBS + FULL_PRECISION


WAY = [
    ("kvq.cli", "main"),
    ("kvq.cli", "_job"),
    ("kvq.config.composing", "resolve"),
    ("kvq.runs", "run"),
    ("kvq.config.identity", "canonical"),
    ("kvq.results.store", "get"),
    ("kvq.methods.build", "method_of"),
    ("kvq.runs", "_measure"),
    ("kvq.tasks.ppl", "run_ppl"),
    ("kvq.results.statistics", "delta_nll_of_samples"),
    ("kvq.results.store", "put"),
    ("kvq.runs", "finish"),
]
"""The hops of a run, in the order in which each is first called."""


def test_a_run_takes_twelve_hops_in_this_order(tmp_path: Path) -> None:
    given = [*small_run(tmp_path), f"results_dir={tmp_path / 'results'}", "task.max_windows=1"]
    assert main([*given, "method=fp16"]) == 0
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            hop = str(frame.f_globals.get("__name__")), frame.f_code.co_name
            if hop in WAY:
                calls.append(hop)

    sys.setprofile(note)
    try:
        assert main([*given, "method=kivi/block", "bits=2"]) == 0
    finally:
        sys.setprofile(None)
    assert list(dict.fromkeys(calls)) == WAY
    assert len(WAY) <= 12
