"""Composing a configuration without paying Hydra's price each time: a choice of a group is composed once.

Hydra takes 0.1 to 0.2 s to compose. Its result consists of the defaults, what the chosen files put in place of them,
and single values on top. So the defaults are composed by Hydra and kept. A file that is made from its own settings and
other files of its group is merged over the schema with OmegaConf, as Hydra does; any other is composed by Hydra once.
Values are merged into a copy. Whatever this module does not know how to merge (added or deleted keys, packages,
settings of Hydra itself), and whatever fails, is left to Hydra, which words the error. `tests/config/test_merging.py`
compares both.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.base import Node

VERSION_BASE = "1.3"
CONFIG_NAME = "config"
_WIDER = re.compile(r"@package|^\s*- *override ", re.MULTILINE)  # a file that writes outside its own group
_KEPT = 256  # compositions, of some 100 kB each


@dataclass(frozen=True)
class Files:
    """A folder of configuration groups, perhaps a further one, and a hash of the state of both.

    What was kept of files that have been edited since is never used.
    """

    folder: Path
    further: Path | None
    state: int

    @classmethod
    def of(cls, folder: Path, further: Path | None = None) -> Files:
        """These folders as they are now."""
        return cls(folder, further, hash(tuple(_state(root) for root in (folder, further) if root is not None)))


@dataclass(frozen=True)
class Composed:
    """A configuration without its `hydra` node, and the choice of each group by name."""

    config: DictConfig
    choices: dict[str, str | None]


def _state(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Path, time of change and bytes of every file in a folder; `os.scandir` has them three times as fast as `Path`."""
    found: set[tuple[str, int, int]] = set()
    for entry in os.scandir(folder):
        if entry.is_dir():
            found |= _state(Path(entry.path))
        else:
            found.add((entry.path, entry.stat().st_mtime_ns, entry.stat().st_size))
    return frozenset(found)


def by_hydra(files: Files, overrides: Sequence[str]) -> Composed:
    """What Hydra composes; also works while a Hydra application runs.

    Raises:
        HydraException, OmegaConfBaseException: overrides that do not compose.
    """
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    search = [] if files.further is None else [f"hydra.searchpath=['file://{files.further.resolve()}']"]
    try:
        with hydra.initialize_config_dir(str(files.folder), version_base=VERSION_BASE):
            config = hydra.compose(CONFIG_NAME, overrides=[*overrides, *search], return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = running
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    assert isinstance(choices, dict)
    with open_dict(config):
        del config["hydra"]
    return Composed(config, {str(group): name for group, name in choices.items()})


def merged(files: Files, overrides: Sequence[str]) -> Composed | None:
    """The same from what is kept, the caller's own to change; None for what only Hydra knows how to compose."""
    choices: list[str] = []
    values: list[Override] = []
    try:
        groups = _groups(files)
        for given in map(_parsed, overrides):
            key = given.key_or_group
            if given.is_hydra_override() or given.is_sweep_override() or given.package is not None or "/" in key:
                return None
            if key in groups and not given.is_delete():
                choices.append(str(given.input_line))
            elif not given.is_delete() and not given.is_add() and not given.is_force_add():
                values.append(given)
            else:
                return None
        kept = _assembled(files, tuple(choices))
        config = copy.deepcopy(kept.config)
        for given in values:
            OmegaConf.update(config, given.key_or_group, copy.deepcopy(given.value()), merge=True)
    except Exception:  # whatever is wrong, Hydra says it
        return None
    return Composed(config, dict(kept.choices))


@functools.lru_cache(maxsize=4096)
def _parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


@functools.lru_cache(maxsize=8)
def _groups(files: Files) -> frozenset[str]:
    """Names of the folders that hold choices."""
    roots = [root for root in (files.folder, files.further) if root is not None]
    return frozenset(entry.name for root in roots for entry in root.iterdir() if entry.is_dir())


@functools.lru_cache(maxsize=_KEPT)
def _composed_once(files: Files, choices: tuple[str, ...]) -> Composed:
    return by_hydra(files, choices)


@functools.lru_cache(maxsize=_KEPT)
def _assembled(files: Files, choices: tuple[str, ...]) -> Composed:
    """The defaults with each choice in its place, where every choice is of its own group alone; else Hydra's answer.

    Settings of all groups (`+experiment=`) are merged last, as Hydra does.
    """
    given = [_parsed(choice) for choice in choices]
    added = [each for each in given if each.is_add()]
    nodes = {each.key_or_group: _node(files, each) for each in given if not each.is_add()}
    everywhere = [_layers(files, each.key_or_group, str(each.value())) for each in added]
    if len(nodes) + len(added) < len(given) or len(added) > 1 or None in nodes.values() or None in everywhere:
        return _composed_once(files, choices)
    base = _composed_once(files, ())
    config = copy.deepcopy(base.config)
    for group, node in nodes.items():
        config[group] = node
    with open_dict(config):
        for layer in (layer for layers in everywhere for layer in layers or ()):
            config.merge_with({name: layer._get_node(name) for name in layer if name != "hydra"})
    return Composed(config, base.choices | {each.key_or_group: str(each.value()) for each in given})


def _node(files: Files, given: Override) -> Node | None:
    """What a choice puts in its group's place; None where it changes more than that."""
    group, name = given.key_or_group, given.value()
    if type(name) is not str or files.further is not None:
        return None
    layers = _layers(files, group, name)
    if layers is not None:
        root = ConfigStore.instance().load("config_schema.yaml").node
        for layer in layers:
            root.merge_with({group: layer})
        return root._get_node(group)
    if _WIDER.search((files.folder / group / f"{name}.yaml").read_text(encoding="utf-8")):
        return None
    base, own = _composed_once(files, ()), _composed_once(files, (str(given.input_line),))
    alone = _apart_from(base.config, group) == _apart_from(own.config, group)
    return own.config._get_node(group) if alone and own.choices == base.choices | {group: name} else None


@functools.lru_cache(maxsize=4096)
def _layers(files: Files, group: str, name: str) -> list[DictConfig] | None:
    """Settings of a file and of the files of its group that it is made from, the last of which win.

    None for a file that is made from anything else: a schema, another package, an override of another choice. All
    settings of an experiment belong to no group.
    """
    header, here = ("# @package _global_\n", "") if group == "experiment" else ("", "@_here_")
    path = files.folder / group / f"{name}.yaml"
    if files.further is not None or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    if not text.startswith(header) or _WIDER.search(text.removeprefix(header)):
        return None
    own = OmegaConf.load(path)
    assert isinstance(own, DictConfig)
    found: list[DictConfig] = []
    for entry in own.pop("defaults", ["_self_"]):
        other = re.fullmatch(rf"/{group}/([\w/]+){here}", str(entry))
        layers = [own] if entry == "_self_" else _layers(files, group, other[1]) if other else None
        if layers is None:
            return None
        found += layers
    return found


def _apart_from(config: DictConfig, group: str) -> dict[str, object]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items() if name != group}
