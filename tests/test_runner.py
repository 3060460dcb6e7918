"""One run and one sweep, end to end, on a random model and a text file."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq import runs
from kvq.cli import main
from kvq.results import Record, Store
from kvq.results.files import Journal
from tests import sweeps
from tests.random_models import save_random_model
from tests.sweeps import small_run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def given(model: Path, tmp_path: Path) -> list[str]:
    return [*small_run(tmp_path, model), f"results_dir={tmp_path / 'results'}"]


def records(folder: Path) -> dict[str, Record]:
    return sweeps.records(folder / "results")


def numbers(folder: Path) -> dict[str, tuple[str, dict[str, float]]]:
    return sweeps.numbers(folder / "results")


def test_a_run_computes_fp32_products_in_fp32(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    plain = runs._changed_weights

    def watched(*inputs: Any) -> Any:
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return plain(*inputs)

    monkeypatch.setattr(runs, "_changed_weights", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # as notebooks and engines do for speed
    try:
        assert main([*given, "method=kivi/block", "bits=2"]) == 0
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("highest", False)] * 2


def test_a_run_leaves_its_record_and_its_baseline(given: list[str], tmp_path: Path) -> None:
    assert main([*given, "method=kivi/block", "bits=2"]) == 0
    found = records(tmp_path)
    assert set(found) == {"fp16", "kivi/block 2"}
    run, full = found["kivi/block 2"], found["fp16"]
    assert run.baseline_key == full.key
    assert run.metrics["windows"] == 12
    assert run.metrics["scored_tokens"] == 95 + 11 * 32
    assert run.metrics["bits_per_element"] == 3.0
    assert run.metrics["effective_bits"] == pytest.approx((64 * 3 + 31 * 32) / 95)
    assert run.metrics["delta_nll"] == pytest.approx(run.metrics["nll"] - full.metrics["nll"], abs=1e-9)
    assert run.metrics["delta_nll_se"] > 0
    assert run.metrics["kl_mean"] > 0
    assert run.provenance.dataset_source == ".txt file"
    samples = Store(tmp_path / "results").samples(run.key)
    assert sum(one["nll"] for one in samples) / sum(x["tokens"] for x in samples) == pytest.approx(run.metrics["nll"])


@pytest.mark.parametrize(
    ("windows", "scoring"),
    [
        ("sliding", "generation"),
        ("disjoint", "parallel"),
        *(
            pytest.param(*both, marks=pytest.mark.long)
            for both in (("sliding", "parallel"), ("disjoint", "generation"))
        ),
    ],
)
def test_the_canaries(given: list[str], tmp_path: Path, windows: str, scoring: str) -> None:
    protocol = [f"task.windows={windows}", f"task.scoring={scoring}", "residual.size=128"]
    assert main([*given, "-m", "method=identity,zero", *protocol]) == 0
    found = records(tmp_path)
    for name in ("nll", "perplexity"):
        assert found["identity"].metrics[name] == found["fp16"].metrics[name]
    assert found["identity"].metrics["kl_mean"] == found["identity"].metrics["kl_p99"] == 0.0
    assert found["identity"].metrics["top1_agreement"] == 1.0
    # Generation at this residual keeps every token of a window in full precision.
    assert (found["zero"].metrics["kl_mean"] > 0.01) == (scoring == "parallel")


def test_a_repeated_command_measures_nothing(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*given, "-m", "method=rtn,nsn", "bits=2,3"]) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results" / "runs").rglob("*.json")}
    assert len(before) == 5
    monkeypatch.setattr("kvq.models.inputs.load_model", None)
    monkeypatch.setattr("kvq.tasks.ppl.run_ppl", None)
    assert main([*given, "-m", "method=rtn,nsn", "bits=2,3"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results" / "runs").rglob("*.json")} == before


def edit_record(folder: Path, name: str, **fields: object) -> Path:
    path = Store(folder / "results").record_path(records(folder)[name].key)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields), encoding="utf-8")
    return path


def test_a_repeat_measures_the_run_alone_and_takes_nothing_away(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced, it measures anew, not its baseline; what a killed one left is cleaned; one that fails changes nothing."""
    words = [*given, "method=rtn", "bits=2"]
    assert main(words) == 0
    first = numbers(tmp_path)
    took = {name: record.provenance.wall_seconds for name, record in records(tmp_path).items()}
    assert main([*words, "force=true"]) == 0
    assert numbers(tmp_path) == first
    again = {name: record.provenance.wall_seconds for name, record in records(tmp_path).items()}
    assert [name for name in took if again[name] != took[name]] == ["rtn 2"]
    left = tmp_path / "results" / "partial" / f"{records(tmp_path)['rtn 2'].key}.jsonl"
    left.parent.mkdir(exist_ok=True)
    left.write_text('{"header": "code"}\n', encoding="utf-8")
    assert main(words) == 0
    assert not left.exists()
    monkeypatch.setattr("kvq.tasks.ppl.storage_metrics", None)
    assert main([*words, "force=true"]) == 1
    assert numbers(tmp_path) == first


def test_a_run_that_is_done_needs_no_folder_that_can_be_written(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*given, "method=rtn", "bits=2"]) == 0
    before = records(tmp_path)

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    capsys.readouterr()
    assert main([*given, "method=rtn", "bits=2"]) == 0
    assert main([*given, "-m", "method=rtn", "bits=2"]) == 0
    assert capsys.readouterr().err.count("error") == 0
    for more in (["bits=3"], ["bits=2", "force=true"]):
        assert main([*given, "method=rtn", *more]) == 1
        assert "cannot write under" in capsys.readouterr().err
    assert records(tmp_path) == before


def test_what_is_stale_broken_or_lost_is_said_and_measured_again(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*given, "method=rtn", "bits=2"]
    assert main(words) == 0
    edit_record(tmp_path, "rtn 2", versions={"ppl": 0})
    capsys.readouterr()
    assert main([*words, "plan=true"]) == 0
    out = capsys.readouterr().out
    assert "stale        rtn bits=2" in out
    assert "done         fp16" in out
    assert main(words) == 0
    assert records(tmp_path)["rtn 2"].versions["ppl"] == 1
    path = edit_record(tmp_path, "rtn 2")
    path.write_text(path.read_text()[:200], encoding="utf-8")
    assert main(words) == 0
    assert path.name in capsys.readouterr().err
    assert records(tmp_path)["rtn 2"].status == "done"
    Store(tmp_path / "results").samples_path(records(tmp_path)["fp16"].key).unlink()
    assert main([*given, "method=rtn", "bits=3"]) == 0
    assert "measuring again" in capsys.readouterr().err
    assert records(tmp_path)["rtn 3"].metrics["delta_nll_se"] > 0


def test_what_is_refused_runs_no_baseline(given: list[str], tmp_path: Path) -> None:
    for several in ([], ["-m"]):
        assert main([*given, *several, "method=nsn", "bits=1"]) == 1
        assert not records(tmp_path)


def test_bytes_are_of_one_sequence(given: list[str], tmp_path: Path) -> None:
    for size in (1, 4):
        folder = [f"results_dir={tmp_path / str(size) / 'results'}", "task.windows=disjoint", f"task.batch_size={size}"]
        assert main([*given, *folder, "method=rtn", "bits=2"]) == 0
    alone, together = (records(tmp_path / size)["rtn 2"] for size in ("1", "4"))
    assert alone.key == together.key
    for name in ("packed_bytes", "total_bytes", "bits_per_element", "scored_tokens"):
        assert alone.metrics[name] == together.metrics[name]
    assert alone.metrics["nll"] == pytest.approx(together.metrics["nll"], rel=1e-6)


def test_unsupported_is_an_answer(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    together = [*given, "bits=2", "residual.policy=sliding", "residual.size=0"]
    assert main([*together, "-m", "method=nsn,q8_0"]) == 0
    assert "tokens of nsn share statistics" in capsys.readouterr().out
    assert {name: record.status for name, record in records(tmp_path).items()} == {
        "fp16": "done",
        "nsn 2": "unsupported",
        "q8_0": "done",
    }
    assert main([*together, "method=nsn"]) != 0


def test_a_plan_says_what_an_interrupted_run_has_scored(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, plan = [*given, "method=rtn", "bits=2"], [*given, "method=rtn", "bits=2", "plan=true"]
    add = Journal.add

    def interrupted(journal: Journal, rows: Any) -> None:
        add(journal, rows)
        if journal.path is not None:  # else it is full precision's reference, in memory
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(whole)
    capsys.readouterr()
    [journal] = (tmp_path / "results" / "partial").glob("*.jsonl")
    scored = len(journal.read_text().splitlines()) - 1  # the first line says what made them
    assert scored > 0
    assert main(plan) == 0
    said = capsys.readouterr().out
    assert f"{scored} scored before it was interrupted" in said
    assert "1 partly done" in said
    header, rest = journal.read_text().split("\n", 1)
    journal.write_text(json.dumps({"header": "another version"}) + "\n" + rest)
    assert main(plan) == 0
    assert "partly" not in capsys.readouterr().out
    journal.write_text(f"{header}\n{rest}")
    assert main([*plan, "force=true"]) == 0
    assert "partly" not in capsys.readouterr().out
    assert main(whole) == 0
    assert main(plan) == 0
    assert "plan: 2 done" in capsys.readouterr().out


def test_plan_starts_nothing(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "-m", "method=nsn,rtn", "bits=1,2", "plan=true"]) == 0
    out = capsys.readouterr().out
    assert out.count("pending") == 4 + 1  # three methods and their baseline, and the totals
    assert "unsupported  nsn bits=1" in out
    assert "4 pending, 1 unsupported" in out
    assert not list((tmp_path / "results").rglob("*.json"))
