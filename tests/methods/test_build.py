"""`build_method`: overrides, and one clear line for what cannot be built."""

from __future__ import annotations

import enum
import functools
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import kvq
from kvq.config import compose, resolve
from kvq.config.bits import Bits
from kvq.config.choices import find
from kvq.config.identity import canonical
from kvq.config.plugins import all_choices, conf_dirs
from kvq.errors import ConfigError, KvqError, Unsupported
from kvq.methods.build import _build_object, build_method, instantiate_method, method_of
from tests.presets import ABOUT, NAMES


def test_overrides_of_the_method_the_residual_and_bits():
    method = build_method(
        "nsn", overrides=["key.quantizer.group_size=64", "residual=none", "residual.size=32", "bits=2"]
    )
    assert method.key.quantizer.group_size == 64
    assert method.value.quantizer.group_size is None
    assert (method.residual.key.policy, method.residual.key.size) == ("none", 32)
    assert method.bits == Bits(2, 2)


def test_a_null_stage_drops_out_of_the_order():
    method = build_method("oscar", overrides=["key.stages.norm=null"])
    assert [name for name, _ in method.key.stages] == ["hadamard"]
    assert build_method("nsn", overrides=["key.stages.norm=null"]).key.stages == []


def test_keys_or_values_alone():
    method = build_method("kivi", overrides=["value=null"])
    assert method.value is None
    assert not method.is_full_precision


@pytest.mark.parametrize("bits", ["k4v2", (4, 2), {"key": 4, "value": 2}, Bits(4, 2)], ids=str)
def test_bits_of_each_side(bits):
    method = kvq.build_method("kivi", bits=bits)
    assert (method.key.quantizer.bits, method.value.quantizer.bits) == (4, 2)
    assert method.bits.label == "k4v2"


def test_composing_is_cached_but_methods_are_not_shared():
    first, second = build_method("nsn", bits=2), build_method("nsn", bits=2)
    assert first.key is not second.key


def test_a_fixed_rate_ignores_bits():
    assert build_method("identity", bits=16).bits is None


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("nns",), ConfigError, "method=nns: unknown method.*Did you mean 'nsn'"),
        (("oscar/relesed",), ConfigError, "Did you mean 'oscar/released'"),
        (("nsn", 1), Unsupported, "bits=1: nsn does 2 to 8 bits$"),
        (("nsn", "k3v9"), Unsupported, "bits=k3v9: nsn does 2 to 8 bits for values"),
        (("nsn", 99), ConfigError, "bits=99: whole numbers 1-16"),
        (("quarot", 3, 72), Unsupported, "method.key of quarot: head_dim=72"),
        (("rtn", 1, 128, ["key.quantizer.symmetric=true"]), Unsupported, "symmetric.* 2 to 16"),
        (("nsn", 3, 128, ["key.quantizer.group_siz=3"]), ConfigError, "unknown setting.*Did you mean 'group_size'"),
        (("nsn", 3, 128, ["+key.quantizer.klip=1"]), ConfigError, "klip: not an argument of kvq.codecs.Uni.*'clip'"),
        (
            ("nsn", 3, 128, ["key.quantizer.axis=per_chanel"]),
            ConfigError,
            "axis=per_chanel.*Did you mean 'per_channel'",
        ),
        (("nsn", 3, 128, ["key.quantizer.clip=abc"]), ConfigError, "clip=abc: kvq.codecs.UniformQuantizer takes float"),
        (("nsn", 3, 128, ["key.quantizer.clip=null"]), ConfigError, "clip=null: .*takes float"),
        (("nsn", 3, 128, ["key.quantizer.clip=2.0"]), ConfigError, "method.key of nsn: clip=2.0"),
        (("nsn", 3, 128, ["key.quantizer.group_size=0"]), ConfigError, "group_size=0"),
        (("nsn", 3, 128, ["key.quantizer._target_=kvq.codecs.Uniform"]), ConfigError, "_target_=.*cannot be imported"),
        (("nsn", 3, 128, ["key.quantizer._target_=nowhere.Uniform"]), ConfigError, "_target_=.*cannot be imported"),
        (("nsn", 3, 128, ["key._target_=kvq.codecs.Zero"]), ConfigError, "stages: not an argument of kvq.codecs.Zero"),
        (("oscar", 3, 128, ["key.order=[norm]"]), ConfigError, "leaves out stage 'hadamard'"),
        (("oscar", 3, 128, ["key.order=[norm,hadamrd]"]), ConfigError, "unknown stage 'hadamrd'. Did you mean"),
        (("nsn", 3, 128, ["residual=nune"]), ConfigError, "residual=nune: unknown residual; one of block, "),
        (("nsn", 3, 128, ["residual.policy=blok"]), ConfigError, "Did you mean 'block'"),
        (("nsn", 3, 128, ["residual.size=-1"]), ConfigError, r"residual.size=-1 \(keys\)"),
        (("nsn", 3, 128, ["key=3"]), ConfigError, "method.key=3: a codec"),
        (("nsn", 3, 128, ["key"]), ConfigError, "cannot be read as setting=value"),
        (("3",), ConfigError, "method=3: unknown method"),
    ],
    ids=str,
)
def test_one_line_for_what_cannot_be_built(arguments, error, says):
    with pytest.raises(KvqError, match=says) as caught:
        build_method(*arguments)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


OWN = """
name: mine
bits_range: [1, 8]
key:
  _target_: kvq.codecs.Codec
  stages: {flip: {_target_: kvq_test_methods.Flip}}
  order: [flip]
  quantizer: {_target_: kvq.codecs.UniformQuantizer, bits: "${kvbits:key}", axis: per_token}
value: null
residual: {policy: block, size: 16}
"""
FLIP = """
from kvq.codecs import Stage

class Flip(Stage):
    def forward(self, x):
        return x.flip(-1), {}

    def inverse(self, y, side):
        return y.flip(-1)
"""


def test_a_method_kept_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "my conf" / "method").mkdir(parents=True)
    (tmp_path / "my conf" / "method" / "mine.yaml").write_text(OWN)
    (tmp_path / "kvq_test_methods.py").write_text(FLIP)
    monkeypatch.syspath_prepend(tmp_path)
    method = build_method("mine", bits=8, config_dir=tmp_path / "my conf")
    x = torch.randn(1, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(method.key.decode(method.key.encode(x)), x, rtol=0, atol=0.02)
    assert method.residual.key.size == 16
    with pytest.raises(ConfigError, match=r"method=mime: unknown method.*Did you mean 'mine'"):
        build_method("mime", config_dir=tmp_path / "my conf")


def test_a_resolved_run_builds_the_same_method():
    config = resolve(compose(["method=oscar", "bits=2", "residual.key.size=64"]))
    method = method_of(config, 128)
    assert method.residual == config.effective_residual
    assert method.residual.key.size == 64
    assert method.residual.value.size == 128
    assert method.bits == instantiate_method(config.method, config.residual, "2", 128).bits == config.parsed_bits


@functools.cache
def config(name, *overrides):
    return resolve(compose([f"method={name}", *overrides]))


def key(name, *overrides):
    return canonical(config(name, *overrides), "model", "data")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_by_its_path_and_described(name):
    found = find("method", name, *conf_dirs())
    first, given = f"# {ABOUT[name]}", found.read()
    assert given["name"] == name
    assert given["label"]
    assert given["note"]
    assert first.startswith("# ")
    assert len(first) <= 140


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("nsn/arm_a", "nsn/nonorm_per_token_sym"),
        ("nsn/arm_b", "nsn/nonorm_per_channel_asym"),
        ("nsn/arm_c", "nsn/norm_per_channel_sym"),
        ("nsn/arm_d", "nsn"),
        ("nsn/norm_per_channel_asym", "nsn"),
    ],
)
def test_an_alias_is_the_same_run(alias, name):
    assert key(alias) == key(name)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("oscar/token_scope", ["method.key.stages.norm.scope=token"]),
        ("oscar/cr_only", ["method.key.stages.norm=null"]),
        ("oscar/ots_only", ["method.key.stages.hadamard=null", "method.value.stages.hadamard=null"]),
        ("oscar/swapped_order", ["method.key.order=[norm,hadamard]"]),
        ("oscar/values_without_hadamard", ["method.value.stages.hadamard=null"]),
    ],
)
def test_an_ablation_can_be_given_on_the_command_line(name, overrides):
    assert key("oscar", *overrides) == key(name)
    assert key("oscar") != key(name)


WRONG: dict[type, list[Any]] = {
    bool: [[False], {"a": True}, 1, "no", None, [], {}],
    int: [[3], {"a": 3}, True, 2.5, "3", [], {}],
    float: [[0.5], {"a": 0.5}, True, "0.5", [], {}],
    str: [["a"], {"a": "b"}, 3, True, [], {}],
    type(None): [],
    list: [3, True, "abc", {"a": 1}, [[1]], [None], [{"a": 1}]],
    dict: [3, True, "abc", [1], ["a"]],
    object: [3, True, "abc", [1], {"a": 1}, [], {}],
}
"""What is not of a kind: a scalar, a list, a mapping of names to parts (dict), a part (object)."""
TIERS, TURN = ({"_target_": f"kvq.{name}"} for name in ("methods.tiers.AdaptiveTiers", "codecs.Hadamard"))
PARTS: list[Any] = [TIERS, [TURN], {"a": TIERS}]
"""Of another kind than any parameter."""


def parts() -> Iterator[str]:
    """The `_target_` of every part of every method."""

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, dict) and "_target_" in value:
            yield value["_target_"]
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from inside(one)

    methods = (choice for choice in all_choices() if choice.group == "method")
    found = {name for choice in methods for name in inside(choice.read())}
    yield from sorted(found)


def kinds(hint: Any) -> set[type]:
    """The kinds of `WRONG` that an annotation takes."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return {kind for one in typing.get_args(hint) for kind in kinds(one)}
    if origin is typing.Literal or (inspect.isclass(hint) and issubclass(hint, enum.Enum)):
        return {str}
    if origin is not None and issubclass(origin, Mapping):
        return {dict}
    if origin is not None and issubclass(origin, Sequence):
        return {list}
    return {hint if hint in (bool, int, float, str, type(None)) else object}


def accepts(kind: type, value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float)
    if kind is list:
        return value == []
    return type(value) is kind if kind not in (dict, object) else kind is dict and value == {}


PARAMETERS = [(part, name) for part in parts() for name in inspect.signature(pkgutil.resolve_name(part)).parameters]


def test_there_are_parts_and_each_says_what_it_takes() -> None:
    assert len(PARAMETERS) > 100
    for target, name in PARAMETERS:
        hints = typing.get_type_hints(pkgutil.resolve_name(target).__init__)
        assert hints[name] is not Any, (target, name)


@pytest.mark.parametrize(("target", "name"), PARAMETERS, ids=lambda part: part.rpartition(".")[2])
def test_what_a_parameter_does_not_take_is_refused(target: str, name: str) -> None:
    taken = kinds(typing.get_type_hints(pkgutil.resolve_name(target).__init__)[name])
    wrong = [value for kind in taken for value in WRONG[kind] if not any(accepts(other, value) for other in taken)]
    assert wrong
    says = rf"^method\.key\.{name}(\.a)?=.*: ({target} takes |a mapping whose _target_ is a )"
    for value in [*wrong, *PARTS]:
        with pytest.raises(ConfigError, match=says) as caught:
            _build_object("a method", "method.key", {"_target_": target, name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "override", "says"),
    [
        ("nsn", "key.quantizer.symmetric=[false]", r"symmetric=\[False\]: kvq.codecs.UniformQuantizer takes bool$"),
        ("nsn", "key.quantizer.axis=[per_token]", r"axis=.*: .* takes .*Literal\['per_channel', 'per_token'\]"),
        ("nsn", "key.quantizer.symmetric={_target_: kvq.codecs.Zero}", "symmetric=.*: .* takes bool$"),
        ("nsn", "+key.quantizer._args_=[3]", "_args_: not an argument of kvq.codecs.UniformQuantizer"),
        ("nsn", "+key.quantizer._partial_=true", "_partial_: not an argument of kvq.codecs.UniformQuantizer"),
        ("h2o", "eviction.least=[3]", r"least=\[3\]: .*HeavyHitters takes int$"),
        ("ott", "token_policy.pool={a: 3}", r"pool=\{'a': 3\}: .*OutlierTokens takes int$"),
    ],
)
def test_overrides_of_parts(method: str, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        build_method(method, overrides=[override])
    assert "\n" not in str(caught.value)
