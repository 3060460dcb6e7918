"""A run that is done is found without importing torch, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvq import runner, sweep
from kvq.config import Config, compose, resolve
from kvq.results import Store, versions
from tests.sweeps import small_run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run that has been measured."""
    folder = tmp_path_factory.mktemp("lookup")
    words = [*small_run(folder), "method=rtn", "bits=2", f"results_dir={folder / 'results'}", "task.max_windows=2"]
    runner.run(of(words))
    return words


def of(words: list[str], *more: str) -> Config:
    return resolve(compose([*words, *more]))


def test_it_is_the_record_that_the_runner_finds(given: list[str]) -> None:
    for more in ([], ["method=fp16"]):
        config = of([word for word in given if not (more and word.startswith("method="))], *more)
        found = sweep.known(config)
        assert found is not None
        assert found == runner.run(config) == sweep.run(config)
        assert found.key == runner.Prepared(config).key


@pytest.mark.parametrize(
    "more",
    [
        ["bits=3"],
        ["force=true"],
        ["task.stride=48"],
        ["dataset.max_tokens=500"],
        ["model.path=someone/something"],
        ["dataset.path=gone.txt"],
        ["task=niah", "~task.max_windows", "~task.stride", "~task.context"],
    ],
    ids=" ".join,
)
def test_any_other_run_is_left_to_the_runner(given: list[str], more: list[str]) -> None:
    words = [word for word in given if not (word.startswith("task.") and "task=niah" in more)]
    assert sweep.known(of(words, *(word for word in more if not word.startswith("~")))) is None


def test_a_run_with_anything_left_to_do_is_left_to_the_runner(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store = of(given), Store(of(given).results_dir)
    found = sweep.known(config)
    assert found is not None
    assert found.baseline_key is not None
    for key in (found.key, found.baseline_key):
        paths = [store.record_path(key), store.samples_path(key)]
        for path in paths[:1] if key == found.key else paths:  # a run's own samples are read where they are shown
            whole = path.read_bytes()
            path.unlink()
            assert sweep.known(config) is None, path.name
            path.write_bytes(whole)
    journal = store.root / "partial" / f"{found.key}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    journal.touch()
    assert sweep.known(config) is None
    journal.unlink()
    assert sweep.known(config) == found
    raised = dict(versions.declared())
    raised["KVCache"] += 1
    monkeypatch.setattr(versions, "declared", lambda: raised)
    assert sweep.known(config) is None


def test_a_sweep_that_is_done_imports_no_torch(given: list[str]) -> None:
    code = (
        "import sys\n"
        "from kvq.cli import main\n"
        f"assert main(['-m', *{given!r}]) == 0\n"
        "slow = {'torch', 'transformers', 'datasets', 'scipy.stats', 'pandas'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rtn" in done.stdout
