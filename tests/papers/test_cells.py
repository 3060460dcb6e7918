"""Cells of a layout and the runs behind them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvq.config import compose, resolve
from kvq.config.identity import by_names, canonical
from kvq.config.run import LayoutConfig
from kvq.errors import ConfigError
from kvq.papers import __main__ as papers
from kvq.papers import expected
from kvq.papers.sweep import cells_of, command, jobs_of, missing_choices, override_run
from kvq.report import __main__ as report
from kvq.report.tables.experiments import address
from kvq.results import Store
from tests.results import made


def layout(**changes: object) -> LayoutConfig:
    known: dict = {
        "paper": "p",
        "title": "T",
        "common": "model=big dataset=text task=ppl/long",
        "axes": {"method": ["A", "B"], "dataset": ["one", "two"]},
        "names": {"A": "method=a bits=2", "B": "method=b", "one": "", "two": "dataset=other dataset.split=x"},
    }
    return LayoutConfig(**(known | changes))


def test_a_cell_for_every_combination_and_a_run_once() -> None:
    cells = cells_of(layout())
    assert [tuple(cell.labels.values()) for cell in cells] == [("A", "one"), ("A", "two"), ("B", "one"), ("B", "two")]
    assert cells[1].runs == (("model=big", "dataset=other", "task=ppl/long", "method=a", "bits=2", "dataset.split=x"),)
    assert len(jobs_of([*cells, *cells], (), {})) == 4
    assert command(cells[0].runs[0]) == "python run.py model=big dataset=text task=ppl/long method=a bits=2"


def test_axes_that_are_only_read_share_a_run() -> None:
    read = layout(axes={"method": ["A"]}, metric="score[{dataset}]", metrics={"dataset": {"one": "x", "two": "y"}})
    cells = cells_of(read)
    assert [cell.metric for cell in cells] == ["score[x]", "score[y]"]
    assert len(jobs_of(cells, (), {})) == 1


def test_pooled_cells_have_several_runs_and_a_nameless_one_none() -> None:
    names = {"A": ["method=a bits=2", "method=a bits=3"], "B": None, "one": ""}
    cells = cells_of(layout(axes={"method": ["A", "B"], "dataset": ["one"]}, names=names, reasons={"B": "not said"}))
    assert [run[-1] for run in cells[0].runs] == ["bits=2", "bits=3"]
    assert (cells[1].runs, cells[1].reason) == ((), "not said")


def test_the_command_line_wins_and_takes_settings_of_its_choice_along() -> None:
    run = cells_of(layout())[1].runs[0]
    small = {"task=ppl/long": "task=ppl/long task.context=64"}
    assert override_run(run, ["model=tiny"], small) == (
        "dataset=other",
        "task=ppl/long",
        "task.context=64",
        "method=a",
        "bits=2",
        "dataset.split=x",
        "model=tiny",
    )
    assert "dataset.split=x" not in override_run(run, ["dataset=mine"], {})
    assert not any(word.startswith("task.context") for word in override_run(run, ["task=niah"], small))
    assert len(jobs_of(cells_of(layout()), ["method=c", "dataset=mine"], {})) == 2  # bits=2 stays with A


def test_choices_that_are_not_there_are_named() -> None:
    run = ("+experiment=x", "method=new", "bits=2", "model=tiny", "task.context=4")
    assert list(missing_choices(run, {"method": {"nsn"}, "model": {"tiny"}})) == ["method=new"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axes": {"methods": ["A"]}}, "layout.axes=methods: one of model, method"),
        ({"axes": {"method": ["C"]}}, "layout.axes=C: one of A, B, one, two."),
        ({"names": {"A": None, "B": "", "one": "", "two": ""}}, "layout.names with a reason for null=A: one of"),
        ({"rows": ["model"]}, "layout.rows=model: one of method, dataset"),
        ({"metric": "kl_{setting}"}, "layout.metric=setting: one of"),
        ({"own": ["ona"]}, "layout.own=ona: one of A, B, one, two. Did you mean 'one'?"),
        ({"pool": "max"}, "layout.pool=max: one of mean, sum"),
        ({"title": None}, "layout.title"),
    ],
)
def test_a_wrong_layout_is_one_line(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(**changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_tables_at_once_are_those_of_both_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvq.papers.expected.names", lambda: ["nsnquant/table7"])
    ways = {"apart": [(report.main, "--print"), (papers.main,)], "at once": [(papers.main, "--all")]}
    folders = []
    for way, commands in ways.items():
        results = tmp_path / way / "results"
        Store(results).put(made.record("kivi", "2", metrics={"ppl": 5.0}))
        for main, *more in commands:
            assert main(["--results", str(results), *more]) == 0
        paths = [path for path in sorted((results / "tables").rglob("*")) if path.is_file()]
        written = {str(path.relative_to(results)): path.read_bytes() for path in paths}
        folders.append((written, capsys.readouterr().out.replace(str(results), "results")))
    assert folders[0] == folders[1]
    assert {"ppl", "experiments"} <= {Path(name).parts[1].partition("-")[0] for name in folders[0][0]}


# A score of a calibrated method, times on packed codes and in several regimes, methods with parts of their own.
RUNS = {
    "calibrated": ("model=llama_2_7b", "dataset=c4", "task=ppl/nsnquant_table2", "method=kvquant/sink", "bits=2",
                   "method.calibration.dataset=wikitext2"),
    "kept keys": ("model=llama_3_8b", "dataset=wikitext2", "task=ppl/nsnquant_table2", "method=cq/kept_comma"),
    "packed": ("model=qwen3_8b", "task=latency", "method=oscar", "bits=2", "cache.attention=packed"),
    "regimes": ("model=qwen2_7b", "task=latency/nsn_dequantization", "method=nsn", "bits=3"),
    "items": ("model=tiny_outliers", "task=lm_eval/aime24", "method=ott", "bits=2", "residual.size=64"),
    "evicted": ("model=tiny", "task=niah", "method=snapkv/kivi", "bits=4"),
    "bits by layer": ("model=tiny", "method=kivi", "method.bits_by_layer.key=[8,4,4,2]"),
    "another library": ("model=tiny", "method=hqq", "bits=2"),
}  # fmt: skip
TEXTS = {("model", "fingerprint"), ("dataset", "fingerprint"), ("method", "calibration", "fingerprint")}
"""Weights and texts, for which their names stand; names are in the signature beside the key."""


def key_of(run: tuple[str, ...]) -> dict[str, Any]:
    config = resolve(compose(list(run)))
    calibrates = "calibration" in by_names(config)["method"]
    return canonical(config, "weights", "text or machine", "calibration text" if calibrates else None)


def leaves(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values that hold no others; an empty list or mapping is one."""
    inner = list(part.items()) if isinstance(part, dict) else list(enumerate(part)) if isinstance(part, list) else []
    if not inner:
        yield path
    for name, item in inner:
        yield from leaves(item, (*path, name))


def changed(key: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    out = copy.deepcopy(key)
    place = out
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "something else"
    return out


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_whatever_the_key_has_is_in_the_signature(run: tuple[str, ...]) -> None:
    key = key_of(run)
    here = address(made.record("m", settings=key))
    paths = list(leaves(key))
    assert len(paths) > 15
    for path in paths:
        there = address(made.record("m", settings=changed(key, path)))
        assert (there == here) == (path in TEXTS), path
    assert address(made.record("m", settings=key, model="another")) != here
    assert address(made.record("m", settings=key, dataset="another")) != here


@pytest.mark.every_plugin
def test_what_a_cell_asks_for_is_what_a_record_of_it_says() -> None:
    for run in RUNS.values():
        config = resolve(compose(list(run)))
        record = made.record("m", settings=key_of(run), model=config.model.name, dataset=config.dataset.name)
        assert address(record).signature == expected._signature(run)
        assert address(record).machine == ("text or machine" if "task=latency" in " ".join(run) else "")


def test_runs_that_differ_do_not_fill_one_anothers_cells() -> None:
    packed = RUNS["packed"]
    calibrated = RUNS["calibrated"]
    for one, other in (
        (packed, packed[:-1]),
        (packed, (*packed[:-1], "cache.attention=dense")),
        (calibrated, (*calibrated[:-1], "method.calibration.dataset=c4")),
        (calibrated, (*calibrated, "method.calibration.samples=8")),
        (calibrated, (*calibrated, "model.dtype=bfloat16")),
    ):
        assert expected._signature(one) != expected._signature(other)
    assert expected._signature(packed[:-1]) == expected._signature((*packed[:-1], "cache.attention=dense"))
