"""The schema, every choice of every group, and what a run's key is made of."""

import functools
import json

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from kvq.config import Config, ModelConfig, compose, conf_dir, full_precision, resolve
from kvq.config.explain import choices
from kvq.config.identity import canonical
from kvq.errors import ConfigError

GROUPS = {group: list(names) for group, names in choices().items()}
SHORT = ["task.context=1024", "task.stride=512"]  # GPT-2 reads no more
GIVEN = {"hf": ["model.path=somewhere"], "distilgpt2": SHORT, "gpt2_medium": SHORT}
GIVEN["task=lm_eval"] = ["task.tasks=[gsm8k]"]


@functools.cache
def key(*overrides):
    return canonical(resolve(compose(overrides)), "weights", "text")


CHOICES = [(group, name) for group, names in GROUPS.items() if group != "experiment" for name in names]


def test_every_choice_is_described():
    about = choices()
    assert all(about[group][name] for group, name in CHOICES)


@pytest.mark.parametrize(
    "choice",
    [
        # The golden of each method is of its composed run.
        pytest.param(f"{group}={name}", marks=[pytest.mark.long] * (group == "method" and "/" in name))
        for group, name in CHOICES
    ],
)
def test_every_choice_composes(choice):
    name = choice.partition("=")[2]
    config = resolve(compose([choice, *GIVEN.get(choice, GIVEN.get(name, []))]))
    assert isinstance(config, Config)
    assert json.dumps(canonical(config, "", ""))


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", GROUPS["experiment"])
def test_every_experiment_composes(name):
    resolve(compose([f"+experiment={name}"]))


def test_every_group_is_known():
    assert set(GROUPS) == {"method", "model", "residual", "dataset", "task", "logger", "experiment"}
    assert all((conf_dir() / group).is_dir() for group in GROUPS)


def test_the_defaults():
    config = resolve(compose([]))
    assert (config.model.name, config.dataset.name, config.task.name) == ("tiny", "pydocs", "ppl")
    assert (config.task.windows, config.task.context, config.task.stride, config.task.scoring) == (
        "sliding",
        2048,
        512,
        "generation",
    )
    assert config.residual.policy is None


@pytest.mark.parametrize("bits", ["2", "k3v2", "{key: 3, value: 2}"])
def test_bits_reach_the_codecs(bits):
    config = resolve(compose(["method=kivi", f"bits={bits}"]))
    found = (config.method.key["quantizer"]["bits"], config.method.value["quantizer"]["bits"])
    assert found == ((2, 2) if bits == "2" else (3, 2))
    assert config.parsed_bits.label == ("2" if bits == "2" else "k3v2")


def test_papers_protocols():
    tasks = {name: resolve(compose([f"task={name}"])) for name in GROUPS["task"] if name.startswith("ppl")}
    shapes = {name: (c.task.windows.value, c.task.context, c.task.scoring.value) for name, c in tasks.items()}
    assert shapes["ppl/nsn"] == ("sliding", 2048, "parallel")
    assert shapes["ppl/nsnquant_table2"] == ("disjoint", 4096, "parallel")
    assert shapes["ppl/kvquant"] == ("disjoint", 2048, "parallel")
    assert shapes["ppl/nsnquant_table15"] == ("disjoint", 4096, "generation")
    assert tasks["ppl/nsnquant_table15"].effective_residual.key.size == 64
    assert resolve(compose(["task=ppl/nsnquant_table15", "residual.size=32"])).effective_residual.key.size == 32
    assert shapes["ppl/kvquant_plus_plus"] == ("disjoint", 192, "continuation")
    assert {c.task.name for c in tasks.values()} == {"ppl"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["task.stride=4096"], r"task.stride=4096: 1 to task.context \(2048\)"),
        (["task.context=1"], "task.context=1: at least 2"),
        (["task.max_windows=0"], "task.max_windows=0: at least 1"),
        (["task.bootstrap.block=0"], "task.bootstrap.block=0: at least 1"),
        (["model=hf"], "model.path has no value: give model.path="),
        (["model=tiny_outliers", "model.outliers.key_scale=3"], "key_scale=3.0: a power of two"),
        (["bits=k2"], "bits=k2: whole numbers"),
        (["threads=0"], "threads=0: at least 1"),
        (["task=latency", "cpu_linear=onednn"], "cpu_linear=onednn: "),
        (["method.bits_range=[3]"], r"method.bits_range=\[3\]"),
        (["+nonsense=1"], "nonsense: unknown setting"),
        (["+task.contxt=1"], "task.contxt: unknown setting. Did you mean 'context'"),
        (["+method.keys=1"], "method.keys: unknown setting. Did you mean 'key'"),
    ],
    ids=str,
)
def test_values_are_checked_when_a_run_enters(overrides, says):
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(compose(overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [[], ["++seed=0"]], ids=["composed here", "composed by Hydra"])
@pytest.mark.parametrize("word", ["2024_11_26", "1.10", "12e4567", "007", "0x10", "true", "1e5", "inf", "a1"])
def test_words_of_texts_stay_as_typed(words, word):
    texts = ["results_dir", "model.revision", "dataset.path"]
    given = ["model=hf", "model.path=a/b", "dataset=wikitext2", *(f"{name}={word}" for name in texts)]
    config = compose([*given, *words])
    assert [OmegaConf.select(config, name) for name in texts] == [word] * 3


def test_numbers_in_a_list_of_texts_are_quoted():
    given = ["task=lm_eval", "task.prefill=whole"]
    assert list(compose([*given, "task.tasks=[1,a,'1.10']"]).task.tasks) == ["1", "a", "1.10"]
    with pytest.raises(ConfigError, match="tasks holds texts; quote what looks like a number"):
        compose([*given, "task.tasks=[a,1.10]"])


def test_an_order_that_is_not_given_is_that_of_the_stages(tmp_path):
    (tmp_path / "method").mkdir()
    stages = "{hadamard: {_target_: kvq.codecs.Hadamard}, norm: {_target_: kvq.codecs.TokenNorm}}"
    own = f"defaults: [/method/kivi@_here_, _self_]\nname: own\nkey: {{stages: {stages}}}\n"
    (tmp_path / "method" / "own.yaml").write_text(own)
    assert resolve(compose(["method=own"], tmp_path)).method.key["order"] == ["hadamard", "norm"]
    assert resolve(compose(["method=kivi"])).method.key["order"] == []


SAME = [
    ["device=cpu"],
    ["threads=1"],
    ["cpu_linear=onednn"],
    ["results_dir=elsewhere"],
    ["plan=true"],
    ["force=true"],
    ["cache.keep_decoded=true"],
    ["method.label=other"],
    ["method.note=other"],
    ["method.name=other"],
    ["method.bits_range=[1,16]"],
    ["residual.policy=block"],
    ["residual.size=128"],
    ["bits=k3v3"],
    ["model.name=other"],
    ["model.revision=abc"],  # the fingerprint holds the commit
    ["model.outliers.key_scale=4"],  # of no channels
    ["dataset.name=other"],
    ["task.batch_size=4"],
]
OTHER = [
    ["bits=2"],
    ["bits=k3v2"],
    ["seed=1"],
    ["residual=none"],
    ["residual.value.size=64"],
    ["residual.prefill_block=size"],
    ["task.stride=256"],
    ["task.bootstrap.seed=1"],
    ["model=tiny_outliers"],
    ["model.dtype=float64"],
    ["dataset.max_tokens=4096"],
    ["method.key.quantizer.clip=0.9"],
    ["method.value.stages.norm=null"],
]


@pytest.mark.parametrize("overrides", SAME, ids=str)
def test_what_a_key_leaves_out(overrides):
    assert key("method=nsn", *overrides) == key("method=nsn")


@pytest.mark.parametrize("overrides", OTHER, ids=str)
def test_what_a_key_holds(overrides):
    assert key("method=nsn", *overrides) != key("method=nsn")


def test_fingerprints_are_in_the_key():
    config = resolve(compose([]))
    keys = [json.dumps(canonical(config, model, text)) for model, text in (("a", "b"), ("x", "b"), ("a", "x"))]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("name", ["fp16", "identity", "zero"])
def test_a_fixed_rate_is_one_run_whatever_bits_say(name):
    assert key(f"method={name}", "bits=2") == key(f"method={name}", "bits=4")


def test_full_precision_is_one_run_whatever_the_residual():
    assert key("method=fp16") == key("method=fp16", "residual=none") == key("method=fp16", "residual.size=7")
    assert key("method=fp16") == key("method=rtn", "method.key=null", "method.value=null")


def test_settings_that_cannot_matter_are_left_out():
    assert key("task.windows=disjoint") == key("task.windows=disjoint", "task.stride=7")
    whole = ["method=nsn", "residual=none"]
    assert key(*whole) == key(*whole, "residual.size=7")
    assert key(*whole, "residual.prefill_block=size") != key(*whole, "residual.prefill_block=size", "residual.size=7")


def test_joined_rows_and_crops_of_one_file_are_two_runs():
    given = ["dataset=c4", "dataset.path=a.txt"]
    assert key(*given) != key(*given, "dataset.loader=text")


def test_the_residual_of_a_side_in_full_precision_is_left_out():
    assert key("method=rtn", "method.key=null", "residual.key.size=7") == key("method=rtn", "method.key=null")
    assert key("method=rtn", "method.key=null", "residual.value.size=7") != key("method=rtn", "method.key=null")


def test_the_baseline_of_a_run_is_fp16_in_the_same_setting():
    config = resolve(compose(["method=nsn", "task.stride=256", "residual=none", "bits=2"]))
    baseline = full_precision(config)
    assert baseline.method.is_full_precision
    assert config.method.name == "nsn"
    assert canonical(baseline, "weights", "text") == key("method=fp16", "task.stride=256")


def test_composing_leaves_a_running_hydra_alone():
    marker = object()
    GlobalHydra.instance().hydra = marker
    try:
        assert OmegaConf.is_config(compose(["method=kivi"]))
        assert GlobalHydra.instance().hydra is marker
    finally:
        GlobalHydra.instance().clear()


def test_schema_refuses_a_model_context_without_a_window():
    with pytest.raises(ConfigError, match=r"model.context=1"):
        ModelConfig(name="x", path="y", context=1)
