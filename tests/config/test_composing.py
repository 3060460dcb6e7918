"""What is put together from kept compositions is what Hydra composes: every value, type and flag."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.base import Node

from kvq.cli import main
from kvq.config import compose, composing, conf_dir, plugins, resolve
from kvq.config.choices import choices_in, find
from kvq.config.composing import CONFIG_NAME, Composition, compose_quickly, compose_with_hydra, register
from kvq.config.explain import choices
from kvq.config.identity import canonical
from kvq.config.method import RENAMED, earlier_names, with_current_names, with_names
from kvq.errors import ConfigError
from kvq.methods.build import method_of
from kvq.results.record import versions_of

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


@pytest.mark.parametrize(
    "choice",
    [pytest.param(one, marks=pytest.mark.thin(3) if one in FEW else pytest.mark.long) for one in SINGLE],
)
def test_a_choice_with_another_and_with_values_is_what_hydra_composes(choice: str) -> None:
    beside = "method=kivi" if choice.startswith("dataset=") else "dataset=wikitext2"
    _assert_equal([choice, beside, *MORE])


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
    given = ["method=kivi", "bits=2", "dataset.data_files=[a.txt]"]
    first = compose(given)
    first.method.key.quantizer.axis = first.dataset.name = "changed"
    first.dataset.data_files.append("b.txt")
    second = compose(given)
    assert second.method.key.quantizer.axis == "per_channel"
    assert (second.dataset.name, second.dataset.data_files) == ("pydocs", ["a.txt"])


def test_hydra_composes_a_choice_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process and, for further processes, in the cache folder; a file that is broken is made anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = ["method=kivi", "task=ppl", "bits=2"]
    composing._compose_choices.cache_clear()
    found = compose(given)
    (kept,) = (tmp_path / "kvq" / "compositions").iterdir()
    content = kept.read_bytes()
    for broken in (content[:-9], b""):
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


TABLE = """
defaults: [/method/kivi@_here_, _self_]
rows:
  wide:
    about: Groups of 64.
    label: KIVI (wide)
    both: {quantizer: {group_size: 64, bits: "${kvbits:side}"}}
  wide_sink:
    about: Groups of 64 and a sink.
    defaults: [/method/mine/wide@_here_, _self_]
    label: KIVI (wide, sink)
    sink_tokens: 1
"""


def written(folder: Path, table: str = TABLE) -> Path:
    """A copy of `conf/` with a table of presets `mine`."""
    shutil.copytree(conf_dir(), folder)
    (folder / "method" / "mine").mkdir()
    (folder / "method" / "mine" / "_presets.yaml").write_text(table, encoding="utf-8")
    return folder


def composed(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Composition, Composition]:
    """A method of a folder that stands in for `conf/`, as Hydra composes it and from kept parts."""
    monkeypatch.setattr(plugins, "conf_dirs", lambda config_dir=None: [folder])
    composing.register()
    quick = compose_quickly(register(), [f"method={name}"])
    assert quick is not None
    return compose_with_hydra([folder], [f"method={name}"]), quick


def test_a_row_is_a_choice(tmp_path: Path) -> None:
    folder = written(tmp_path / "conf")
    found = {choice.name: choice for choice in choices_in(folder) if choice.group == "method"}
    assert found["mine/wide"].about == "Groups of 64."
    assert found["mine/wide"].read() == find("method", "mine/wide", folder).read()  # type: ignore[union-attr]
    assert find("method", "mine/none", folder) is None
    assert "_presets" not in "".join(found)


@pytest.mark.parametrize("name", ["mine/wide", "mine/wide_sink"])
def test_a_row_composes_as_a_file_would(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Hydra and from kept parts: the base's settings, the row's on top, those of `both` on each side."""
    whole, quick = composed(written(tmp_path / "conf"), name, monkeypatch)
    assert quick.config == whole.config
    method = OmegaConf.to_container(whole.config.method, resolve=False)
    assert isinstance(method, dict)
    assert method["name"] == name
    assert method["sink_tokens"] == (name == "mine/wide_sink")
    for side in ("key", "value"):
        assert method[side]["quantizer"]["group_size"] == 64
        assert method[side]["quantizer"]["bits"] == f"${{kvbits:{side}}}"
    assert whole.choices["method"] == name


def test_an_edited_row_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "conf")
    assert composed(folder, "mine/wide", monkeypatch)[0].config.method.key.quantizer.group_size == 64
    table = folder / "method" / "mine" / "_presets.yaml"
    table.write_text(TABLE.replace("group_size: 64", "group_size: 128"), encoding="utf-8")
    for found in composed(folder, "mine/wide", monkeypatch):
        assert found.config.method.key.quantizer.group_size == 128


def test_a_table_of_a_further_folder(tmp_path: Path) -> None:
    """--config-dir may hold tables too."""
    further = tmp_path / "own"
    (further / "method" / "mine").mkdir(parents=True)
    (further / "method" / "mine" / "_presets.yaml").write_text(TABLE, encoding="utf-8")
    assert compose(["method=mine/wide"], further).method.label == "KIVI (wide)"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("rows: {a: {label: A}}", "a: a row has about"),
        ("rows: {a: 3}", "a: a row has about"),
        ("rows: [a]", "rows by name"),
        ("row: {}\nrows: {}", r"not \['row'\]"),
        ("rows: {a: {about: A, both: {}, key: {}}}", "both and key"),
    ],
)
def test_a_table_that_is_not_one(tmp_path: Path, table: str, said: str) -> None:
    folder = written(tmp_path / "conf", table)
    with pytest.raises(ConfigError, match=said):
        list(choices_in(folder))


@pytest.mark.every_plugin
def test_no_name_is_twice_and_every_table_has_rows() -> None:
    names = [(choice.group, choice.name) for choice in plugins.all_choices()]
    assert len(set(names)) == len(names) > 450
    for path in (path for folder in plugins.conf_dirs() for path in folder.rglob("_*.yaml")):
        if not path.parent.name.startswith("_"):
            assert len(yaml.safe_load(path.read_text(encoding="utf-8"))["rows"]) > 0, path
    assert (conf_dir() / f"{CONFIG_NAME}.yaml").is_file()


@pytest.mark.parametrize(("name", "value"), [("rounding", "up"), ("min_scale", 0.5), ("scale_dtype", "float32")])
def test_a_setting_by_its_earlier_name_is_the_same_run(name: str, value: Any) -> None:
    """On the command line, in a file and as a Python call; keys and records keep the earlier name."""
    earlier = earlier_names()[name]
    word = f"++method.key.quantizer.{{}}={value}"
    ours, theirs = (resolve(compose(["method=kivi", "bits=2", word.format(one)])) for one in (name, earlier))
    assert canonical(ours, "", "") == canonical(theirs, "", "")
    assert canonical(ours, "", "")["method"]["key"]["quantizer"][earlier] == value
    method = replace(ours.method, key=with_names(ours.method.key, earlier_names()))
    assert method.key == ours.method.key
    assert getattr(method_of(ours, 128).key.quantizer, name) is not None  # type: ignore[union-attr]


def test_a_token_policy_by_its_earlier_name_is_the_same_run() -> None:
    given = ["method=zipcache", "bits=k4v2", "{}.recent=0.1", "{}._target_=kvq.methods.{}.Saliency"]
    names = (
        ("method.token_policy", "method.token_policy", "mixed_precision"),
        ("method.plan", "++method.plan", "plan"),
    )
    ours, theirs = (
        resolve(compose([*given[:2], given[2].format(one), given[3].format(two, three)])) for one, two, three in names
    )
    found = canonical(ours, "", "")
    assert found == canonical(theirs, "", "")
    assert found["method"]["plan"]["_target_"] == "kvq.methods.plan.Saliency"
    assert found["method"]["plan"]["recent"] == 0.1
    assert "Saliency" in versions_of(found)
    assert resolve(compose(["method=ott", "method.plan=null"])).method.token_policy is None


def test_a_value_is_no_earlier_name() -> None:
    """`halves` is a value of `order`, and the earlier name of another setting."""
    part = {"_target_": "kvq.codecs.Hadamard", "order": "halves", "halves": ["plan", {"plan": "latent"}]}
    now = {"_target_": "kvq.codecs.Hadamard", "order": "halves", "rounding": ["plan", {"token_policy": "latent"}]}
    assert with_names(part, RENAMED) == now
    assert with_names(now, earlier_names()) == part


@pytest.mark.every_plugin
def test_earlier_names_on_a_command_line() -> None:
    kept = ["halves=3", "plan=true", "task.plan=1", "method.planned=1"]
    given = ["method.value.quantizer.halves=up", *kept, "+method.plan=null"]
    assert with_current_names(given) == ["method.value.quantizer.rounding=up", *kept, "+method.token_policy=null"]


@pytest.mark.parametrize(
    ("keys", "values", "bits"), [("kivi", "nsnquant", 2), ("nsn", "waterfill", 2), ("rtn", "fp16", 3)]
)
def test_values_of_another_method(keys: str, values: str, bits: int) -> None:
    """Codec, residual and calibration of values are the other method's; what is composed is another's run by key."""
    ours = resolve(compose([f"method={keys}", f"method.values_of={values}", f"bits=k{bits + 1}v{bits}"]))
    first, second = (resolve(compose([f"method={of}", f"bits={n}"])) for of, n in ((keys, bits + 1), (values, bits)))
    assert ours.method.key == first.method.key
    assert ours.method.value == second.method.value
    assert ours.effective_residual.value == second.effective_residual.value
    assert ours.method.calibration == (second if second.method.calibration.dataset else first).method.calibration
    assert ours.method.name == f"{keys}+{values}"


@pytest.mark.every_plugin
def test_a_pair_that_has_a_preset_is_the_same_run() -> None:
    ours = resolve(compose(["method=engine/llamacpp_q8_0", "method.values_of=engine/llamacpp_q4_0"]))
    assert canonical(ours, "", "") == canonical(resolve(compose(["method=engine/llamacpp_q8_0_q4_0"])), "", "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method.values_of=nope"], "values_of=nope: .*Could not find 'method/nope'"),
        (["method.values_of=ott"], "values_of=ott: has policies; a method of codecs alone"),
        (["method.values_of=kvquant_plus_plus/gqa"], "values_of=kvquant_plus_plus/gqa: has policies"),
        (["method=turboquant_plus", "method.values_of=kivi"], "values_of=kivi: has policies"),
        (["method.calibration.seed=7", "method.values_of=kvquant"], "is calibrated otherwise than kivi"),
        (["method.values_of=nsn", "method.value.quantizer.bits=4"], "beside it have no effect"),
        (
            ["method=kvquant", "method.calibration.samples=4", "method.values_of=cq"],
            "is calibrated otherwise than kvquant",
        ),
    ],
)
def test_values_that_cannot_be_taken(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(compose(["method=kivi", *words]))
