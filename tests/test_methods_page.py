"""docs/methods.md has a row for every method and a place for every preset, and says what the configuration says."""

import itertools
import re

import pytest

from kvq.config.method import BITS
from kvq.methods.build import build_method
from kvq.methods.transformers_caches import is_installed
from tests.methods_page import PAGE, PRESETS, ROWS, config
from tests.presets import METHODS


def built(name):
    """The method at 2 bits."""
    if name in BITS and not is_installed(name):
        pytest.skip(f"needs the extra [{name}]")
    return build_method(name, bits=2)


def expanded(text):
    """All names that `a/x`, `y` and `a/{x,y}_z` stand for; a name without a slash takes the folder before it."""
    folder, names = "", set()
    for name in re.findall(r"`([\w/{},]+)`", text):
        parts = [part.split(",") for part in re.split(r"[{}]", name)]
        folder = name.rpartition("/")[0] or folder
        names |= {full if "/" in full else f"{folder}/{full}" for full in map("".join, itertools.product(*parts))}
    return names


@pytest.mark.every_plugin
def test_every_method_has_a_row():
    assert set(ROWS) == set(METHODS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_place(name):
    lines = [line for line in PAGE.splitlines() if not line.startswith("| method")]
    assert any(name in expanded(line) for line in lines)


@pytest.mark.every_plugin
def test_no_preset_is_made_up():
    table = PAGE.split("## Ablations and variants")[1]
    named = set().union(*(expanded(line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")))
    assert {name.lstrip("/") for name in named} <= set(PRESETS) | set(METHODS) | {"nsnquant/nsnquant"}


@pytest.mark.parametrize("name", METHODS)
def test_bits_and_paper_are_those_of_the_configuration(name):
    method, (bits_range, arxiv) = config(name).method, (ROWS[name][3], ROWS[name][7])
    assert bits_range == ("–" if method.bits_range is None else "-".join(map(str, method.bits_range)))
    assert arxiv == (method.arxiv or "–")


@pytest.mark.parametrize("name", METHODS)
def test_rotations_and_rope_are_those_of_the_chain(name):
    method, (_, _, _, _, _, rotation, keys, _) = built(name), ROWS[name]
    if method.key is None:
        return
    stages = {type(stage).__name__ for _, stage in method.key.stages}
    wanted = {"Hadamard": "Hadamard", "Haar": "RandomRotation", "signs, Hadamard": "RandomizedHadamard"}
    assert stages & set(wanted.values()) == ({wanted[rotation]} if rotation in wanted else set())
    assert method.key.uses_rope == ("before RoPE" in keys)
