"""What policies of methods exclude and need: tables of data, and the one function that words refusals."""

import itertools
import re
from typing import Any

import pytest

from kvq.codecs import Codec, StoredWithKeys
from kvq.config import compose, resolve
from kvq.config.identity import canonical
from kvq.errors import KvqError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.policies import NEEDED, Policy
from kvq.results.record import versions_of_method

CHOSEN = "codecs_alone own_tokens packed_attention"
EVICTS = f"{CHOSEN} two_codecs all_at_once latent sides_apart"
TABLES = "uncalibrated two_codecs"

LACKS = {
    "rtn": "",
    "kivi": "sides_alike",
    "fp16": "",
    "rtn sink_tokens=4": "all_tokens own_tokens",
    "rtn full_precision_layers.key=[0]": "all_layers",
    "rtn bits_by_layer.key=[2,3]": "one_width two_codecs",
    "rtn residual=none": "no_prompt chunked_prompt",
    "rtn residual.key.size=48": "sides_alike",
    "rtn kept_keys.texts=[a]": CHOSEN,
    "qjl": "sides_alike same_stages two_codecs packed_attention",
    "kvquant_plus_plus/gqa": "codecs_alone fixed_bits",
    "oscar merge_rotation=true": "codecs_alone sides_apart",
    "h2o": f"{EVICTS} several_tokens",
    "triattention": f"{EVICTS} several_tokens",
    "snapkv": f"{EVICTS} no_prompt chunked_prompt",
    "streamingllm/kivi": f"sides_alike {EVICTS} no_prompt chunked_prompt",
    "ott": f"{EVICTS} own_window prompt_at_once",
    "zipcache": f"{EVICTS} own_window prompt_at_once",
    "kvquant_plus_plus/tiers": f"{EVICTS} own_window prompt_at_once",
    "nsnquant": "any_position",
    "kvquant_plus_plus/product": "all_at_once",
    "spinquant": TABLES,
    "waterfill_kv": f"{TABLES} any_position codecs_alone all_tokens own_tokens sides_apart",
    "kvtc/all_layers": f"{TABLES} any_position codecs_alone all_tokens own_tokens packed_attention all_at_once "
    "decoded_at_once own_window sides_apart",
}


@pytest.mark.parametrize("given", LACKS)
def test_what_a_method_lacks(given: str) -> None:
    name, *overrides = given.split()
    method = build_method(name, 2, 64, overrides)
    lacking = set()
    for capability in NEEDED:
        try:
            method.check_needs("somebody", capability)
        except Unsupported as error:
            lacking.add(capability)
            told = str(error)
    if lacking:
        assert re.fullmatch(rf"somebody: [a-z_= ]+ of {name} [^;]+; needs .+", told)
        assert any(told.endswith(NEEDED[capability]) for capability in lacking)
    assert lacking == set(LACKS[given].split())


def test_policies_name_capabilities() -> None:
    kinds = [Policy]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert {*kind.needs, *kind.excludes} <= set(NEEDED), kind


H2O = "eviction={_target_: kvq_zoo.eviction.HeavyHitters}"
OTT = "token_policy={_target_: kvq.methods.mixed_precision.OutlierTokens}"
FIRST = "+policies.first_layers={_target_: kvq_zoo.qjl.FirstLayers, count: 1}"
CHOOSERS = {"sink_tokens": "sink_tokens=3", "kept_keys": "kept_keys.texts=[a]", "eviction": H2O, "token_policy": OTT}
TOGETHER = [
    *(("rtn", pair) for pair in itertools.combinations(CHOOSERS.values(), 2)),
    *(("kvtc/all_layers", (one,)) for one in ("full_precision_layers.value=[0]", "bits_by_layer.key=[2,3]", H2O)),
    *(("waterfill_kv", (one,)) for one in ("full_precision_layers.value=[0]", "bits_by_layer.key=[2,3]")),
    *(("waterfill_kv", (one,)) for one in ("residual.key.size=48", FIRST)),
    ("waterfill_kv", ("sink_tokens=0", "kept_keys.texts=[a]")),
    ("kvquant_plus_plus/gqa", (FIRST,)),
    ("nsnquant", (H2O,)),
    ("nsnquant", (OTT,)),
]


@pytest.mark.parametrize(("name", "overrides"), TOGETHER)
def test_what_does_not_go_together(name: str, overrides: tuple[str, ...]) -> None:
    with pytest.raises(KvqError, match=rf"^method={name} \(.*\): [^\n]* of {name} [^\n]*; needs [^\n]*$"):
        build_method(name, 2, 64, overrides)


def test_waterfill_kv_takes_one_width() -> None:
    with pytest.raises(Unsupported, match="needs keys and values of the same bits and residual"):
        build_method("waterfill_kv", "k3v2", 64)
    assert isinstance(build_method("waterfill_kv", 2, 64).value, StoredWithKeys)


class EveryOther(Policy):
    """A policy outside the package: only every other layer is quantized."""

    setting = "every_other"
    does = "quantizes every other layer"
    excludes = frozenset({"all_layers"})

    def codec(self, codec: Codec | None, side: str, layer: int) -> Codec | None:
        return codec if layer % 2 else None


def test_a_policy_of_a_plugin_is_one_class_and_a_setting() -> None:
    given = f"policies.every_other={{_target_: {EveryOther.__module__}.EveryOther}}"
    method = build_method("rtn", 2, 64, [f"+{given}"])
    assert [method.codec("key", layer, 4) is None for layer in range(4)] == [True, False, True, False]
    with pytest.raises(Unsupported, match=r"^task=x: every_other of rtn quantizes every other layer; needs all layers"):
        method.check_needs("task=x", "all_layers")
    with pytest.raises(KvqError, match=r"method\.policies\.odd of rtn: .* expected a kvq\.methods\.policies\.Policy"):
        build_method("rtn", 2, 64, ["+policies.odd={_target_: kvq.codecs.Hadamard}"])

    def settings(*words: str) -> Any:
        return canonical(resolve(compose(["method=rtn", *words])), "", "")["method"]

    own = settings(f"+method.{given}")
    assert {name: item for name, item in own.items() if name != "every_other"} == settings()
    assert any(name.endswith(".EveryOther") for name in versions_of_method(own))
    assert "every_other" not in settings(f"+method.{given}", "method.policies.every_other=null")
    assert "every_other" not in settings(f"+method.{given}", "method.key=null", "method.value=null")
