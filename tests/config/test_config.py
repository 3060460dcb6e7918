"""The schema, every choice of every group, and what a run's key is made of."""

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvq.config import Config, compose, conf_dir, full_precision, resolve
from kvq.config.explain import choices
from kvq.config.identity import canonical
from kvq.config.method import Policy, PrefillBlock, ResidualConfig, ResidualSideConfig, effective_residual
from kvq.errors import ConfigError

GROUPS = {group: list(names) for group, names in choices().items()}
SHORT = ["task.context=1024", "task.stride=512"]  # GPT-2 reads no more
GIVEN = {"hf": ["model.path=somewhere"], "distilgpt2": SHORT, "gpt2_medium": SHORT}
GIVEN["task=lm_eval"] = ["task.tasks=[gsm8k]"]


@functools.cache
def key(*overrides):
    return canonical(resolve(compose(overrides)), "weights", "text")


CHOICES = [(group, name) for group, names in GROUPS.items() if group != "experiment" for name in names]


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
    assert all(all(about.values()) for about in choices().values())  # each is described


def test_the_defaults():
    config = resolve(compose([]))
    assert (config.model.name, config.dataset.name, config.task.name) == ("tiny", "pydocs", "ppl")
    task = config.task
    assert (task.windows, task.context, task.stride, task.scoring) == ("sliding", 2048, 512, "generation")
    assert config.residual.policy is None


@pytest.mark.parametrize("bits", ["2", "k3v2", "{key: 3, value: 2}"])
def test_bits_reach_the_codecs(bits):
    config = resolve(compose(["method=kivi", f"bits={bits}"]))
    found = (config.method.key["quantizer"]["bits"], config.method.value["quantizer"]["bits"])
    assert found == ((2, 2) if bits == "2" else (3, 2))
    assert config.parsed_bits.label == ("2" if bits == "2" else "k3v2")


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


@pytest.mark.parametrize(("overrides", "same"), [(o, True) for o in SAME] + [(o, False) for o in OTHER], ids=str)
def test_what_a_key_leaves_out_and_holds(overrides, same):
    assert (key("method=nsn", *overrides) == key("method=nsn")) is same


def test_fingerprints_are_in_the_key():
    config = resolve(compose([]))
    keys = [json.dumps(canonical(config, model, text)) for model, text in (("a", "b"), ("x", "b"), ("a", "x"))]
    assert len(set(keys)) == 3


WHOLE, C4, KEYS_FULL = "method=nsn residual=none", "dataset=c4 dataset.path=a.txt", "method=rtn method.key=null"
SAME_RUN = [
    *((f"method={name} bits=2", f"method={name} bits=4") for name in ("fp16", "identity", "zero")),
    *(("method=fp16", f"method={full}") for full in ("fp16 residual=none", "fp16 residual.size=7")),
    ("method=fp16", "method=rtn method.key=null method.value=null"),
    ("task.windows=disjoint", "task.windows=disjoint task.stride=7"),
    (WHOLE, f"{WHOLE} residual.size=7"),
    (KEYS_FULL, f"{KEYS_FULL} residual.key.size=7"),
]
OTHER_RUN = [
    (f"{WHOLE} residual.prefill_block=size", f"{WHOLE} residual.prefill_block=size residual.size=7"),
    (C4, f"{C4} dataset.loader=text"),  # crops, and joined rows
    (KEYS_FULL, f"{KEYS_FULL} residual.value.size=7"),
    ("task=latency", "task=latency cache.keep_decoded=true"),
]


@pytest.mark.parametrize(("one", "other", "same"), [(*p, True) for p in SAME_RUN] + [(*p, False) for p in OTHER_RUN])
def test_settings_without_effect_are_left_out_of_the_key(one, other, same):
    assert (key(*one.split()) == key(*other.split())) is same


def test_the_baseline_of_a_run_is_fp16_in_the_same_setting():
    config = resolve(compose(["method=nsn", "task.stride=256", "residual=none", "bits=2"]))
    baseline = full_precision(config)
    assert baseline.method.is_full_precision
    assert config.method.name == "nsn"
    assert canonical(baseline, "weights", "text") == key("method=fp16", "task.stride=256")


DEFAULT = ResidualConfig(policy=Policy.block, size=128, prefill_block=PrefillBlock.whole)
POLICIES, SIZES = st.sampled_from([None, *Policy]), st.sampled_from([None, 1, 64])
SIDES = st.builds(ResidualSideConfig, policy=POLICIES, size=SIZES)
CONFIGS = st.builds(ResidualConfig, policy=POLICIES, size=SIZES, key=SIDES, value=SIDES)


@given(CONFIGS)
def test_the_nearest_setting_wins(override):
    residual = effective_residual(DEFAULT, override)
    for side in ("key", "value"):
        own, effective = getattr(override, side), getattr(residual, side)
        assert effective.policy == (own.policy or override.policy or DEFAULT.policy)
        assert effective.size == (own.size or override.size or DEFAULT.size)
        assert effective.prefill_block == PrefillBlock.whole


def test_a_side_of_the_default_wins_over_its_common_setting_but_not_over_an_override():
    default = ResidualConfig(policy=Policy.block, size=128, value=ResidualSideConfig(size=32))
    assert effective_residual(default, ResidualConfig()).value.size == 32
    assert effective_residual(default, ResidualConfig()).key.size == 128
    assert effective_residual(default, ResidualConfig(size=64)).value.size == 64


@pytest.mark.parametrize(
    ("default", "override", "setting"),
    [
        (ResidualConfig(size=4), ResidualConfig(), "residual.policy"),
        (ResidualConfig(policy=Policy.none), ResidualConfig(), "residual.size=null"),
        (DEFAULT, ResidualConfig(policy=Policy.none, size=0), "residual.size=0"),
        (DEFAULT, ResidualConfig(size=-1), "residual.size=-1"),
        (DEFAULT, ResidualConfig(value=ResidualSideConfig(size=-3)), r"residual.size=-3 \(values\)"),
    ],
)
def test_what_is_missing_or_out_of_range(default, override, setting):
    with pytest.raises(ConfigError, match=setting):
        effective_residual(default, override)


def test_nothing_is_kept_under_sliding_of_size_0() -> None:
    residual = effective_residual(DEFAULT, ResidualConfig(policy=Policy.sliding, size=0))
    assert residual.key.keeps_nothing
    assert residual.for_parallel_scoring() == residual
    assert not effective_residual(DEFAULT, ResidualConfig(size=0)).key.keeps_nothing


def test_at_once_keeps_the_blocks() -> None:
    residual = effective_residual(DEFAULT, ResidualConfig(value=ResidualSideConfig(size=32))).for_parallel_scoring()
    assert {residual.key.policy, residual.value.policy} == {Policy.none}
    assert (residual.key.size, residual.value.size) == (128, 32)
    assert residual.key.prefill_block is PrefillBlock.whole
