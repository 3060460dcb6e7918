"""What is put together from kept compositions is what Hydra composes: every value, type and flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig
from omegaconf.base import Node

from kvq.cli import main
from kvq.config import compose, composing
from kvq.config.composing import Composition, compose_quickly, compose_with_hydra, register
from kvq.config.explain import choices
from kvq.errors import KvqError

GROUPS = choices()
MORE = ["bits=k3v2", "seed=7", "residual.size=64", "dataset.data_files=[a.txt,b.txt]"]
SINGLE = [f"{'+' * (group == 'experiment')}{group}={name}" for group, names in GROUPS.items() for name in names]
# Every eleventh; the long ones compose all by Hydra, 0.15 s each.
FEW = SINGLE[::11]
TOGETHER = [
    [],
    ["method=kivi", "model=tiny_outliers", "dataset=pysource", "task=ppl/nsn", "residual=none"],
    ["method=oscar", "method.key.stages.hadamard=null", "method.key.quantizer.group_size=64"],
    ["task=ppl/nsnquant_table15", "method=nsnquant", "model=llama_2_7b", "dataset=wikitext2"],
    ["task=longbench", "method=kivi", "model=llama_2_7b_chat"],
    ["task=distribution", "method=nsn"],
    ["logger=wandb", "logger.project=mine", "method=gear"],
    ["+experiment=nsnquant/table5", "model=tiny", "bits=2"],
    ["method=nsn", "bits={key: 3, value: 2}", "dataset.path='a, b.txt'"],
    ["method=kivi", "method=nsn"],
]


def _plain(node: Node, place: str = "") -> list[tuple]:
    """Every node below this one: its place, kind, declared type, flags and value."""
    meta = node._metadata
    found = [(place, type(node), meta.ref_type, meta.object_type, meta.optional, meta.flags)]
    content = node.__dict__["_content"] if isinstance(node, DictConfig | ListConfig) else node._value()
    if isinstance(node, DictConfig | ListConfig) and isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for name, item in items:
            assert item._get_parent() is node
            found += _plain(item, f"{place}.{name}")
    else:
        found[-1] += (type(content), content)
    return found


def _assert_equal(overrides: list[str]) -> None:
    files = register()
    whole, quick = compose_with_hydra(files.folders, overrides), compose_quickly(files, overrides)
    assert quick is not None
    assert quick.choices == whole.choices
    assert _plain(quick.config) == _plain(whole.config)


@pytest.mark.thin(3)
@pytest.mark.parametrize("choice", FEW)
def test_a_choice_with_another_and_with_values_is_what_hydra_composes(choice: str) -> None:
    _assert_equal([choice, *_beside(choice), *MORE])


@pytest.mark.long
@pytest.mark.parametrize("choice", [choice for choice in SINGLE if choice not in FEW])
def test_every_choice_with_another_and_with_values_is_what_hydra_composes(choice: str) -> None:
    _assert_equal([choice, *_beside(choice), *MORE])


def _beside(choice: str) -> list[str]:
    return ["method=kivi" if choice.startswith("dataset=") else "dataset=wikitext2"]


@pytest.mark.parametrize("overrides", TOGETHER, ids=" ".join)
def test_several_choices_are_what_hydra_composes(overrides: list[str]) -> None:
    _assert_equal(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+method.more=1"],
        ["~seed"],
        ["++seed=3"],
        ["hydra.verbose=true"],
        ["method@model=kivi"],
        ["seed=1,2"],
        ["method=nothing_like_it"],
        ["method.nothing_like_it=1"],
        ["seed=one"],
        ["method=null"],
        ["=3"],
    ],
    ids=" ".join,
)
def test_what_is_not_known_to_merge_is_left_to_hydra(overrides: list[str]) -> None:
    assert compose_quickly(register(), overrides) is None


def test_a_composition_is_the_callers_own() -> None:
    first = compose(["method=kivi", "bits=2"])
    first.method.key.quantizer.axis = "changed"
    first.dataset.name = "changed"
    second = compose(["method=kivi", "bits=2"])
    assert second.method.key.quantizer.axis == "per_channel"
    assert second.dataset.name == "pydocs"


def test_values_given_as_lists_are_not_shared() -> None:
    given = ["dataset.data_files=[a.txt]"]
    compose(given).dataset.data_files.append("b.txt")
    assert list(compose(given).dataset.data_files) == ["a.txt"]


def test_hydra_composes_a_choice_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process and, for further processes, in the cache folder; a file that is broken or of other settings is
    made anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = ["method=kivi", "task=ppl", "bits=2"]
    composing._compose_choices.cache_clear()
    found = compose(given)
    (kept,) = (tmp_path / "kvq" / "compositions").iterdir()
    content = kept.read_bytes()
    for broken in (content[:-9], b"", content.replace(b"kivi", b"kivj"), b"0" * 64 + content[64:]):
        kept.write_bytes(broken)
        composing._compose_choices.cache_clear()
        assert compose(given) == found
        assert kept.read_bytes() != broken
    monkeypatch.setattr(composing, "compose_with_hydra", None)
    for bits in (1, 2, 3, 4):
        composing._compose_choices.cache_clear()
        assert compose(["method=kivi", "task=ppl", f"bits={bits}"]).bits == bits


SWEEPS = [
    ["method=nsn,kivi", "bits=2,3"],
    pytest.param(["method=kivi,oscar", "bits=2", "residual.size=32,64", "task=ppl/nsn"], marks=pytest.mark.long),
    ["method=oscar", "bits=2", "method.key.stages.hadamard=null", "++method.calibration.seed=1,2"],
    ["+experiment=nsnquant/table5", "model=tiny"],
]


@pytest.mark.parametrize("sweep", SWEEPS, ids=" ".join)
def test_the_jobs_of_a_sweep_are_those_that_hydra_composes(sweep: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[DictConfig, list[str], dict[str, str], int]] = []

    def measure(config: DictConfig, sweep: bool) -> None:
        shown = HydraConfig.get()
        measured.append((config, list(shown.overrides.task), dict(shown.runtime.choices), shown.job.num))

    monkeypatch.setattr("kvq.cli._measure", measure)
    before = HydraConfig.instance().cfg
    assert main(["-m", *sweep]) == 0
    assert len(measured) >= 2
    assert [number for *_, number in measured] == list(range(len(measured)))
    for config, words, made, _ in measured[:2]:
        whole = compose_with_hydra(register().folders, words)
        assert config == whole.config
        assert {group: name for group, name in made.items() if not group.startswith("hydra/")} == {
            group: name for group, name in whole.choices.items() if not group.startswith("hydra/")
        }
    assert HydraConfig.instance().cfg is before


@pytest.mark.parametrize("sweep", [["method=nsn,kivi", "bits=2,3"]], ids=" ".join)
def test_each_job_of_a_sweep_is_composed_once(sweep: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[str] = []
    composition = composing.composition

    def counted(words: list[str], config_dir: Path | None = None) -> Composition:
        composed.append(" ".join(words))
        return composition(words, config_dir)

    monkeypatch.setattr(composing, "composition", counted)
    monkeypatch.setattr("kvq.cli._measure", lambda config, sweep: None)
    assert main(["-m", *sweep]) == 0
    assert len(composed) == len(set(composed)) == 4


class Counted(Callback):
    """A user's callback, for which Hydra composes every job whole."""

    seen: ClassVar[list[str]] = []

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the method and the number of a job."""
        self.seen.append(f"{config.hydra.job.num} {config.method.name}")


def test_callbacks_of_a_user_are_called_for_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq.cli._measure", lambda config, sweep: None)
    mine = f"+hydra.callbacks.mine._target_={__name__}.Counted"
    Counted.seen.clear()
    assert main(["-m", "method=nsn,kivi", mine]) == 0
    assert Counted.seen == ["0 nsn", "1 kivi"]


def test_a_job_that_raises_counts_as_failed_and_the_next_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measured(config: DictConfig, sweep: bool) -> None:
        seen.append(config.method.name)
        if config.method.name == "nsn":
            raise KvqError("no luck")

    monkeypatch.setattr("kvq.cli._measure", measured)
    assert main(["-m", "method=nsn,kivi"]) == 1
    assert seen == ["nsn", "kivi"]
