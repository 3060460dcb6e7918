"""Every method in conf/method says what it is, builds, and is the recipe its paper gives."""

import functools

import pytest

from kvq.config import compose, resolve
from kvq.config.choices import find
from kvq.config.identity import canonical
from kvq.config.plugins import conf_dirs
from tests.presets import ABOUT, NAMES


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
