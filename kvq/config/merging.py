"""Fast composition: each choice of a group is composed once, and configurations are merged from kept compositions.

Hydra takes 0.1 to 0.2 s to compose. Its result is the defaults, the chosen files in place of default ones, and single
values on top. Here the defaults are composed by Hydra and kept. A file that consists of its own settings and other
files of its group is merged over the schema with OmegaConf, as Hydra does; any other is composed by Hydra once. Values
are merged into a copy. Whatever this module cannot merge (added or deleted keys, packages, settings of Hydra itself),
and every failure, is left to Hydra, which raises the error. `tests/config/test_merging.py` compares both.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.base import Node

from kvq.config.choices import CONFIG_NAME, Choice, find, register_rows

VERSION_BASE = "1.3"
_WIDER = re.compile(r"@package|^\s*- *override ", re.MULTILINE)  # a file that writes outside its own group
_EXPERIMENT = "experiment"  # a group whose files set every part
_KEPT = 256  # compositions, of some 100 kB each


_still: ContextVar[dict[tuple[Path, Path | None], Files] | None] = ContextVar("_still", default=None)


@contextmanager
def unchanging() -> Iterator[None]:
    """Configuration files are taken to stay as they are: one look at their state serves every composition."""
    token = _still.set({})
    try:
        yield
    finally:
        _still.reset(token)


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
        """These folders as they are now, or were when `unchanging` began."""
        if (still := _still.get()) is not None:
            if (folder, further) not in still:
                still[folder, further] = cls._now(folder, further)
            return still[folder, further]
        return cls._now(folder, further)

    @classmethod
    def _now(cls, folder: Path, further: Path | None) -> Files:
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
    for folder in filter(None, (files.folder, files.further)):
        register_rows(folder)
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
    try:
        given = _given(files, overrides)
        if given is None:
            return None
        kept = _assembled(files, tuple(str(choice.input_line) for choice in given.choices))
        return Composed(_updated(kept.pickled, given.values), dict(kept.choices))
    except Exception:  # whatever is wrong, Hydra says it
        return None


def merged_part(files: Files, part: str, overrides: Sequence[str]) -> DictConfig | None:
    """`bits` and one top-level setting (`method`, `layout`) of what `merged` gives, in a fifth of its time.

    None where the overrides name anything else, a file writes beside its group, or Hydra has to compose.
    """
    try:
        given = _given(files, overrides)
        if given is None or any(choice.key_or_group not in (part, _EXPERIMENT) for choice in given.choices):
            return None
        if any(value.key_or_group.partition(".")[0] not in (part, "bits") for value in given.values):
            return None
        kept = _assembled_part(files, part, tuple(str(choice.input_line) for choice in given.choices))
        return None if kept is None else _updated(kept, given.values)
    except Exception:  # whatever is wrong, Hydra says it
        return None


class _Given(NamedTuple):
    """Overrides by kind: a choice of a group, the value of a setting."""

    choices: list[Override]
    values: list[Override]


def _given(files: Files, overrides: Sequence[str]) -> _Given | None:
    """The overrides parsed; None where one of them is of another kind."""
    found = _Given([], [])
    groups = _groups(files)
    for given in map(_parsed, overrides):
        key = given.key_or_group
        if given.is_hydra_override() or given.is_sweep_override() or given.package is not None or "/" in key:
            return None
        if key in groups and not given.is_delete():
            found.choices.append(given)
        elif not given.is_delete() and not given.is_add() and not given.is_force_add():
            found.values.append(given)
        else:
            return None
    return found


class _Kept(NamedTuple):
    """A configuration pickled, because `copy.deepcopy` takes four times as long to make a copy, and its choices."""

    pickled: bytes
    choices: Mapping[str, str | None]


def _updated(pickled: bytes, values: Sequence[Override]) -> DictConfig:
    """A copy of a kept configuration with these values."""
    config: DictConfig = pickle.loads(pickled)
    for given in values:
        OmegaConf.update(config, given.key_or_group, copy.deepcopy(given.value()), merge=True)
    return config


@functools.lru_cache(maxsize=4096)
def _parsed(override: str) -> Override:
    """An override as Hydra parses it; of a plain name, such as `method=kivi/sink`, without its parser's millisecond."""
    if (plain := _PLAIN.fullmatch(override)) and plain["value"].lower() not in _NO_NAMES:
        kind = OverrideType.ADD if plain["sign"] else OverrideType.CHANGE
        return Override(kind, plain["key"], ValueType.ELEMENT, plain["value"], input_line=override)
    return _parser().parse_override(override)


_parser = functools.cache(OverridesParser.create)
_PLAIN = re.compile(r"(?P<sign>\+?)(?P<key>[a-z_]+(?:\.[a-z_]+)*)=(?P<value>[A-Za-z_]\w*(?:/[A-Za-z_]\w*)*)", re.ASCII)
_NO_NAMES = ("true", "false", "null", "inf", "nan")


@functools.lru_cache(maxsize=8)
def _groups(files: Files) -> frozenset[str]:
    """Names of the folders that hold choices."""
    roots = [root for root in (files.folder, files.further) if root is not None]
    return frozenset(entry.name for root in roots for entry in root.iterdir() if entry.is_dir())


@functools.lru_cache(maxsize=_KEPT)
def _composed_once(files: Files, choices: tuple[str, ...]) -> Composed:
    return by_hydra(files, choices)


@functools.lru_cache(maxsize=_KEPT)
def _assembled(files: Files, choices: tuple[str, ...]) -> _Kept:
    """The defaults with each choice in its place, where every choice is of its own group alone; else Hydra's answer.

    Settings of all groups (`+experiment=`) are merged last, as Hydra does.
    """
    given = [_parsed(choice) for choice in choices]
    added = [each for each in given if each.is_add()]
    nodes = {each.key_or_group: _node(files, each) for each in given if not each.is_add()}
    everywhere = [_layers(files, each.key_or_group, str(each.value())) for each in added]
    if len(nodes) + len(added) < len(given) or len(added) > 1 or None in nodes.values() or None in everywhere:
        whole = _composed_once(files, choices)
        return _Kept(pickle.dumps(whole.config), whole.choices)
    base = _composed_once(files, ())
    config = copy.deepcopy(base.config)
    for group, node in nodes.items():
        config[group] = node
    with open_dict(config):
        for layer in (layer for layers in everywhere for layer in layers or ()):
            config.merge_with({name: layer._get_node(name) for name in layer if name != "hydra"})
    return _Kept(pickle.dumps(config), base.choices | {each.key_or_group: str(each.value()) for each in given})


@functools.lru_cache(maxsize=_KEPT)
def _assembled_part(files: Files, part: str, choices: tuple[str, ...]) -> bytes | None:
    """`bits` and one part under at most one choice, pickled; None where that changes more, or is only added."""
    base = _composed_once(files, ()).config
    given = _parsed(choices[0]) if choices else None
    node: Any
    if given is None:
        node = copy.deepcopy(base._get_node(part))
    elif len(choices) > 1 or given.is_add() != (given.key_or_group == _EXPERIMENT):
        return None
    elif not given.is_add():
        node = _node(files, given)
    elif (layers := _layers(files, _EXPERIMENT, str(given.value()))) is not None:
        node = copy.deepcopy(base._get_node(part))
        with open_dict(node):
            node.merge_with(*(layer[part] for layer in layers if part in layer))
    else:
        node = None
    if node is None:
        return None
    config = OmegaConf.create({"bits": base.bits})
    config.__dict__["_content"][part] = node  # typed as it is, which setting it would not keep
    node._set_parent(config)
    OmegaConf.set_struct(config, True)
    return pickle.dumps(config)


def _node(files: Files, given: Override) -> Node | None:
    """What a choice puts in its group's place, the caller's own; None where it changes more than that."""
    group, name = given.key_or_group, given.value()
    if type(name) is not str or files.further is not None:
        return None
    layers = _layers(files, group, name)
    if layers is not None:
        root = pickle.loads(_schema(group))
        for layer in layers:
            node = root._get_node(group)
            if isinstance(node, DictConfig):
                node.merge_with(layer)
            else:  # of no type until its schema is there
                root.merge_with({group: layer})
        return root._get_node(group)
    choice = find(group, name, files.folder)
    if choice is None or _is_wider(choice):
        return None
    base, own = _composed_once(files, ()), _composed_once(files, (str(given.input_line),))
    alone = _apart_from(base.config, group) == _apart_from(own.config, group)
    return copy.deepcopy(own.config._get_node(group)) if alone and own.choices == base.choices | {group: name} else None


@functools.cache
def _schema(group: str) -> bytes:
    """The empty settings of a group, with their types, without those of other groups, pickled."""
    root: DictConfig = ConfigStore.instance().load("config_schema.yaml").node
    content = root.__dict__["_content"]
    for other in content.keys() - {group}:
        del content[other]
    return pickle.dumps(root)


@functools.lru_cache(maxsize=4096)
def _layers(files: Files, group: str, name: str) -> list[DictConfig] | None:
    """Settings of a file and of the files of its group that it is made from, the last of which win.

    None for a file that is made from anything else: another package, an override of another choice. All settings of an
    experiment belong to no group.
    """
    here = "" if group == _EXPERIMENT else "@_here_"
    choice = None if files.further is not None else find(group, name, files.folder)
    if choice is None or _is_wider(choice):
        return None
    own = OmegaConf.create(choice.read())
    found: list[DictConfig] = []
    for entry in own.pop("defaults", ["_self_"]):
        layers = [own] if entry == "_self_" else _inherited(files, group, str(entry), here)
        if layers is None:
            return None
        found += layers
    return found


def _is_wider(choice: Choice) -> bool:
    """Whether a choice writes outside its own group; an experiment does not where it sets all groups."""
    if choice.settings is not None:
        return choice.package != ("_global_" if choice.group == _EXPERIMENT else None)
    header = "# @package _global_\n" if choice.group == _EXPERIMENT else ""
    text = choice.file.read_text(encoding="utf-8")
    return not text.startswith(header) or _WIDER.search(text.removeprefix(header)) is not None


def _inherited(files: Files, group: str, entry: str, here: str) -> list[DictConfig] | None:
    """Settings that an entry of a file's `defaults` stands for: a registered schema, or another file of the group."""
    if re.fullmatch(r"\w+_schema", entry) and f"{entry}.yaml" in ConfigStore.instance().list(group):
        return [ConfigStore.instance().load(f"{group}/{entry}.yaml").node]
    other = re.fullmatch(rf"/{group}/([\w/]+){here}", entry)
    return _layers(files, group, other[1]) if other else None


def _apart_from(config: DictConfig, group: str) -> dict[str, object]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items() if name != group}
