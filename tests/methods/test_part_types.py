"""Every parameter of every part takes what its annotation says, and an override of another kind is one line."""

from __future__ import annotations

import enum
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from kvq.config.plugins import all_choices
from kvq.errors import ConfigError
from kvq.methods.build import _check_arguments, build_method

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


PARAMETERS = [
    (target, name) for target in parts() for name in inspect.signature(pkgutil.resolve_name(target)).parameters
]


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
    for value in wrong:
        with pytest.raises(
            ConfigError, match=rf"^method\.key\.{name}=.*: ({target} takes |a mapping whose _target_ is a )"
        ) as caught:
            _check_arguments("method.key", {"_target_": target, name: value})
        assert "\n" not in str(caught.value)


PARTS = [
    {"_target_": "kvq.methods.tiers.AdaptiveTiers"},
    [{"_target_": "kvq.codecs.Hadamard"}],
    {"a": {"_target_": "kvq.methods.tiers.AdaptiveTiers"}},
]


@pytest.mark.parametrize(("target", "name"), PARAMETERS, ids=lambda part: part.rpartition(".")[2])
def test_a_part_of_another_kind_is_refused(target: str, name: str) -> None:
    for part in PARTS:
        with pytest.raises(
            ConfigError, match=rf"^method\.key\.{name}=.*: ({target} takes |a mapping whose _target_ is a )"
        ):
            _check_arguments("method.key", {"_target_": target, name: part}, built=True)


@pytest.mark.parametrize(
    ("method", "override", "says"),
    [
        ("nsn", "key.quantizer.symmetric=[false]", r"symmetric=\[False\]: kvq.codecs.UniformQuantizer takes bool$"),
        ("nsn", "key.quantizer.symmetric={a: false}", r"symmetric=\{'a': False\}: .* takes bool$"),
        ("nsn", "key.quantizer.bits=[2]", r"bits=\[2\]: .* takes int$"),
        ("nsn", "key.quantizer.group_size=[64]", r"group_size=\[64\]: .* takes int \| None$"),
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
