"""Searches: hypervolumes against counted boxes, the same trials when asked again, winners judged on another text."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("optuna")

from kvq.cli import main
from kvq.errors import ConfigError
from kvq.results import Store
from kvq_lab.figures import read_searches, search_figure, search_table
from kvq_lab.search import Search, Settings, Space, Trial, dominated, hypervolume

POINTS = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=6)


@given(POINTS)
def test_hypervolumes_are_those_of_counted_boxes(points: list[list[int]]) -> None:
    worst = [4, 5, 3]
    corners = itertools.product(*(range(most) for most in worst))
    counted = sum(any(all(a <= b for a, b in zip(p, corner, strict=True)) for p in points) for corner in corners)
    assert hypervolume(points, worst) == pytest.approx(counted / (4 * 5 * 3))


@given(POINTS)
def test_what_is_not_beaten_dominates_all_that_is(points: list[list[int]]) -> None:
    free = [point for point, beaten in zip(points, dominated(points), strict=True) if not beaten]
    assert hypervolume(free, [6, 6, 6]) == pytest.approx(hypervolume(points, [6, 6, 6]))
    assert bool(free) == bool(points)


def space_of(*words: str) -> Space:
    return Space.from_overrides(OverridesParser.create().parse_overrides(list(words)))


def test_swept_values_are_axes() -> None:
    own = ("model=tiny", "residual.value.size=null", "~method.y")
    space = space_of(*own, "bits=2,3,4", "residual.size=range(32,96,32)", "method.x=interval(0.5,2)")
    assert space.fixed == own
    assert [axis.values for axis in space.axes] == [("2", "3", "4"), ("32", "64"), ()]
    assert space.axes[2].interval == (0.5, 2.0)
    assert space.size is None
    assert space_of("bits=2,3", "method=nsn,kivi").size == 4
    with pytest.raises(ConfigError, match="no setting has several values"):
        space_of("bits=2")
    for word in ("int(interval(16,64))", "tag(log,interval(0.1,1))", "shuffle(1,2)", "shuffle(range(1,5))"):
        with pytest.raises(ConfigError, match=r"residual\.size: a search takes values"):
            space_of(f"residual.size={word}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampler": "tp"}, "one of nsga2, tpe, random. Did you mean 'tpe'"),
        ({"trials": 0}, "trials"),
        ({"objectives": ["accuracy"]}, "accuracy is no metric of which less is better"),
        ({"objectives": ["perplexity"]}, "needs the worst perplexity"),
        ({"objectives": []}, "one metric or more"),
        ({"reference": [1.0]}, "a number for each of"),
    ],
)
def test_bad_settings_are_one_line(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings(**settings)  # type: ignore[arg-type]


class Made(Search):
    """A search whose runs have values by a formula: fewer bits cost more, and some runs are refused."""

    def _fill_from_record(self, job: Sequence[str], trial: Trial) -> None:
        bits, size = (int(word.partition("=")[2]) for word in job[-2:])
        trial.key = f"{bits}-{size}".ljust(64, "0")
        trial.values = None if (bits, size) == (3, 1) else [1 / bits + size / 100, bits + 1 / size]


def searched(folder: Path, seed: int = 0, sampler: str = "nsga2", trials: int = 30) -> Made:
    space = space_of(f"results_dir={folder}", "bits=1,2,3,4,5,6,7,8", "residual.size=1,2,3,4,5,6,7,8")
    search = Made(space, Settings(trials=trials, seed=seed, sampler=sampler), lambda jobs: None)
    search.run()
    return search


def test_the_command_line_has_the_same_defaults() -> None:
    from hydra_plugins.kvq_search import _SEARCH

    given = {name: value for name, value in _SEARCH.items() if name not in ("_target_", "max_batch_size", "params")}
    assert given == asdict(Settings())


def test_the_same_search_draws_the_same_trials(tmp_path: Path) -> None:
    first, again = searched(tmp_path), searched(tmp_path)
    assert [trial.words for trial in first.trials] == [trial.words for trial in again.trials]
    assert first.path == again.path != searched(tmp_path, seed=1).path
    kept = json.loads(first.path.read_text(encoding="utf-8"))
    assert kept["settings"]["seed"] == 0
    assert len(kept["trials"]) == len(kept["hypervolume"]) == 30
    assert kept["hypervolume"] == sorted(kept["hypervolume"])
    assert set(kept["winners"]) <= {trial["key"] for trial in kept["trials"]}
    assert str(tmp_path) not in json.dumps(kept)


def test_winners_are_not_beaten(tmp_path: Path) -> None:
    search = searched(tmp_path)
    best = [trial.values for trial in search.winners()]
    assert len(best) == len({tuple(values or ()) for values in best}) <= 5
    for trial in search.trials:
        assert not any(
            trial.values and values and all(a < b for a, b in zip(trial.values, values, strict=True)) for values in best
        )


def test_the_figure(tmp_path: Path) -> None:
    for sampler in ("nsga2", "random"):
        searched(tmp_path, sampler=sampler, trials=12)
    ((_, found),) = read_searches(Store(tmp_path)).items()
    table = search_table(found)
    assert len(table) == 24
    assert table["frontier"].dropna().astype(bool).any()
    assert len(search_figure(table, "a title").get_axes()) == 2
    failed = [{**search, "trials": [{**trial, "values": None} for trial in search["trials"]]} for search in found]
    assert search_table(failed)[search_table(found).columns].dropna().empty
    (tmp_path / "searches" / "torn.json").write_text("{")
    assert len(read_searches(Store(tmp_path))) == 1


@pytest.mark.long
@pytest.mark.slow
def test_a_search_of_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "hydra/sweeper=kvq_search", "hydra.sweeper.trials=5", "hydra.sweeper.winners=2"]
    words += ["hydra.sweeper.verdict=['dataset=pysource']", "model=tiny", "method=kivi,rtn", "bits=2,4"]
    words += ["task.context=96", "task.windows=disjoint", "task.max_windows=2", f"results_dir={tmp_path}", "threads=1"]
    assert main([*words, "plan=true"]) == 0
    assert "plan: 5 trials of 4 combinations" in capfd.readouterr().out
    assert not list(tmp_path.rglob("*.json"))
    assert main(words) == 0
    said = capfd.readouterr().out
    assert "search: 5 trials of 4 combinations" in said
    assert "; verdict: kl_mean" in said
    records = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    assert {record.dataset for record in Store(tmp_path).scan()[0]} == {"pydocs", "pysource"}
    (file,) = (tmp_path / "searches").glob("*.json")
    content = file.read_bytes()
    assert main(words) == 0
    assert records == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    assert file.read_bytes() == content
    assert main([word.replace("kivi,rtn", "kivi").replace("bits=2,4", "bits=2") for word in words]) != 0
    assert "no setting has several values" in capfd.readouterr().err


def test_without_optuna(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"needs optuna; pip install -e '\.\[search\]'"):
        searched(tmp_path)
