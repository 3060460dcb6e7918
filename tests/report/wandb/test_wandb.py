"""`logger=wandb`: offline runs read back from their files, and measuring that goes on whatever happens."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvq.cli import main as run
from kvq.config.run import WandbLogger, WandbMode
from kvq.report import wandb as tracking
from kvq.report.wandb import VIEW, CannotTrack, Tracker, workspace_of
from kvq.report.wandb import main as sync
from kvq.results import Record, Store
from tests.report import sweeps
from tests.report.wandb.wandb_files import OfflineRun, offline_runs
from tests.results import made
from tests.sweeps import small_run

wandb = pytest.importorskip("wandb", reason="needs wandb (pip install -e '.[wandb]')")
OFFLINE = WandbLogger(mode=WandbMode.offline)
# What the client leaves to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, no key, and a server that is not there."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking, "_given_up", set())
    monkeypatch.setattr(tracking, "_sent", set())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@pytest.fixture
def runs(store: Store) -> dict[str, Record]:
    full = sweeps.put_run(store, "fp16", "", sweeps.losses(0.0, 0.0, 0), None, 32.0)
    command = made.provenance(command="run.py -m method=good bits=2,3")
    good = sweeps.put_run(store, "good", "2", sweeps.losses(0.2, 0.01, 12), full, 2.1, provenance=command)
    return {"fp16": full, "good": good}


@pytest.mark.slow
def test_an_offline_run_holds_the_whole_record(store: Store, runs: dict[str, Record]) -> None:
    record = runs["good"]
    Tracker(OFFLINE, store).push(record)
    (found,) = offline_runs(store.root).values()
    head = found.run
    assert (head.run_id, head.project, head.run_group, head.job_type) == (
        record.key[:32],
        "kvq",
        "method=good bits=2,3",
        "ppl",
    )
    assert head.display_name == "good 2 · tiny · pydocs · ppl (32-bit cache)"
    assert set(head.tags) == {"good", "tiny", "pydocs", "done"}
    assert found.config["settings"] == record.config
    assert found.config["key"] == record.key
    assert found.config["provenance"] == record.provenance.model_dump(mode="json")
    assert {name: found.summary[name] for name in record.metrics} == record.metrics
    assert found.exit_code == 0
    _holds_samples(found, record, store)
    assert socket.gethostname() not in (head.host, found.config.get("host"))


def _holds_samples(found: OfflineRun, record: Record, store: Store) -> None:
    table = json.loads(found.media("samples").read_text())
    rows = store.samples(record.key)
    assert [dict(zip(table["columns"], line, strict=True)) for line in table["data"]] == rows


@pytest.mark.slow
def test_sync_sends_what_is_missing(store: Store, runs: dict[str, Record], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--results", str(store.root), "--offline"]
    failed = made.record("bad", "2", settings=made.config("bad", "2"), status="failed", reason="no")
    store.put(failed)
    (store.runs / f"{'0' * 64}.json").write_text("{", encoding="utf-8")
    assert sync(command) == 0
    out, err = capsys.readouterr()
    assert "2 sent, 0 there already, 1 failed and left out" in out
    assert "not valid JSON" in err
    assert offline_runs(store.root).keys() == {record.key[:32] for record in runs.values()}
    assert sync(command) == 0
    assert "0 sent, 2 there already" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_logs_its_runs_and_their_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*small_run(tmp_path), f"results_dir={tmp_path / 'results'}", "logger=wandb", "logger.mode=offline"]
    assert run(["-m", *given, "method=kivi", "bits=2,4", "logger.group=mine"]) == 0
    assert "warning" not in capsys.readouterr().err
    records = Store(tmp_path / "results").scan()[0]
    found = offline_runs(tmp_path / "results")
    assert len(records) == 3
    assert found.keys() == {record.key[:32] for record in records}
    assert {one.run.run_group for one in found.values()} == {"mine"}


@pytest.mark.parametrize(
    ("named", "given", "mode"),
    [
        ("offline", None, "offline"),
        ("disabled", None, "disabled"),
        ("", None, "online"),
        ("offline", WandbMode.online, "online"),
    ],
)
def test_the_mode_of_the_environment(named: str, given: WandbMode, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", named)
    assert WandbLogger(mode=given).mode == mode


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_missing_package_is_one_line(
    store: Store, runs: dict[str, Record], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for _ in range(2):
        tracking.track(OFFLINE, store, runs["good"])
    (line,) = said(capsys)
    assert line.startswith("warning: logger=wandb: wandb is not installed (pip install -e '.[wandb]')")
    assert sync(["--results", str(store.root), "--offline"]) == 1
    assert said(capsys) == ["error: wandb is not installed (pip install -e '.[wandb]')"]


@pytest.mark.parametrize("error", [ValueError("torn\nin two"), OSError(28, "No space left on device"), SystemError()])
def test_whatever_the_client_raises_is_one_line(
    error: Exception,
    store: Store,
    runs: dict[str, Record],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(**given: Any) -> None:
        raise error

    monkeypatch.setattr(wandb, "init", refuse)
    for _ in range(2):
        tracking.track(OFFLINE, store, runs["good"])
    (line,) = said(capsys)
    assert line.startswith(f"warning: logger=wandb: {type(error).__name__}: ")


def test_no_login_is_one_line(
    store: Store, runs: dict[str, Record], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb, "login", lambda **given: False)
    for _ in range(2):
        tracking.track(WandbLogger(), store, runs["good"])
    (line,) = said(capsys)
    assert "not logged in to Weights & Biases (wandb login, or WANDB_API_KEY" in line
    monkeypatch.setattr(wandb, "login", lambda **given: {}["gone"])
    assert sync(["--results", str(store.root)]) == 1
    assert said(capsys)[0].startswith("error: cannot log in to Weights & Biases: ")


def test_a_run_that_is_only_partly_there_is_still_ended(
    store: Store, runs: dict[str, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def refuse(media: Any) -> None:
        raise ValueError("too large")

    fake = SimpleNamespace(summary={}, log=refuse, finish=lambda exit_code: ended.append(exit_code))
    monkeypatch.setattr(wandb, "init", lambda **given: fake)
    tracker = Tracker(OFFLINE, store)
    with pytest.raises(CannotTrack, match="ValueError: too large"):
        tracker.push(runs["good"])
    assert ended == [1]  # so that a sync sends it again


def test_sync_without_records_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sync(["--results", str(tmp_path / "none")]) == 1
    assert said(capsys)[0].startswith("error: no records under ")
    assert sync(["--results", str(tmp_path / "none"), "--project", "a/b"]) == 1
    assert said(capsys) == ["error: logger.project=a/b: 1 to 128 characters, none of / \\ # ? % :"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own
def test_the_workspace_has_a_section_for_each_paper_and_task() -> None:
    """By the JSON that would be sent."""
    pytest.importorskip("wandb_workspaces", reason="needs wandb-workspaces (pip install -e '.[wandb]')")
    subsets = {"score": 0.4, "score[subset=qasper]": 0.3, "score[subset=trec]": 0.5, "score_se[subset=trec]": 0.1}
    metrics = {
        "ppl": {"perplexity": 8.0, "delta_nll": 0.1, "delta_nll_se": 0.01},
        "tni": {"key_cv": 0.3, "query_cv": 0.2},
        "latency": {"decode_b1_t1024": 0.1, "decode_over_dynamic_b1_t1024": 1.5},
        "memory": {"compression_4096": 5.0, "total_bytes_4096": 1e6},
        "longbench": subsets,
    }
    units = dict.fromkeys((name for group in metrics.values() for name in group), "1")
    records = [
        made.record(method, "2", task=task, metrics=numbers, units={name: units[name] for name in numbers})
        for method in (*VIEW["papers"], "nsnquant/no_norm1", "kivi")
        for task, numbers in metrics.items()
    ]
    view = workspace_of(WandbLogger(), "me", records)._to_model().model_dump(mode="json", by_alias=True)
    sections = {part["name"]: part["panels"] for part in view["spec"]["section"]["panelBankConfig"]["sections"]}
    wanted = {f"{paper}: {title}" for paper in VIEW["papers"].values() for title, _ in VIEW["tasks"].values()}
    assert wanted <= sections.keys()
    assert len(sections) == len(wanted) + 3
    shown = {name: [panel["config"]["metrics"] for panel in sections[name]] for name in wanted}
    assert shown["OScaR: LongBench subsets"] == [["score[subset=qasper]"], ["score[subset=trec]"]]
    assert shown["KVQuant++: perplexity"] == [["perplexity"], ["delta_nll"]]
    titles = [panel["config"]["chartTitle"] for panel in sections["nsn: memory"]]
    assert titles == ["Smaller than 16 bits (x), at 4,096 tokens", "Cache (GiB), at 4,096 tokens"]
