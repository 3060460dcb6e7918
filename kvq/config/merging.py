"""Fast composition: each choice of a group is composed once, and configurations are merged from kept compositions.

Hydra takes 0.1 to 0.2 s to compose. Its result is the defaults, the chosen files in place of default ones, and single
values on top. Here the defaults are composed by Hydra and kept. A file that consists of its own settings and other
files of its group, perhaps with choices of other groups, is merged over the schema with OmegaConf, as Hydra does; any
other is composed by Hydra once. Values are merged into a copy. Whatever this module cannot merge (added or deleted
keys, packages, settings of Hydra itself), and every failure, is left to Hydra, which raises the error.
`tests/config/test_merging.py` compares both.
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

from kvq.config.choices import CONFIG_NAME, find, register_rows

VERSION_BASE = "1.3"
_GLOBAL = "# @package _global_\n"
_EXPERIMENT = "experiment"  # a group whose files set every part
_KEPT = 256  # compositions, of some 100 kB each


_still: ContextVar[dict[tuple[Path, Path | None], Files] | None] = ContextVar("_still", default=None)


@contextmanager
def unchanging() -> Iterator[None]:
    """Within the context, configuration files count as unchanged: their state is read once for all compositions."""
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

    None where the overrides name anything else, a file writes outside its group, or Hydra has to compose.
    """
    try:
        given = _given(files, overrides)
        if given is None or any(choice.key_or_group not in (part, _EXPERIMENT) for choice in given.choices):
            return None
        if any(value.key_or_group.partition(".")[0] not in (part, "bits") for value in given.values):
            return None
        kept = _assembled_part(files, part, given.choices)
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
    """An override as Hydra parses it; of a plain name (`method=kivi/sink`) or number, in no time."""
    if (plain := _PLAIN.fullmatch(override)) and plain["value"].lower() not in _NO_NAMES:
        kind = OverrideType.ADD if plain["sign"] else OverrideType.CHANGE
        value = int(plain["value"]) if plain["value"].isdigit() else plain["value"]
        return Override(kind, plain["key"], ValueType.ELEMENT, value, input_line=override)
    return _parser().parse_override(override)


_parser = functools.cache(OverridesParser.create)
_PLAIN = re.compile(
    r"(?P<sign>\+?)(?P<key>[a-z_]+(?:\.[a-z_]+)*)=(?P<value>[A-Za-z_]\w*(?:/[A-Za-z_]\w*)*|0|[1-9]\d{0,8})", re.ASCII
)
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
    """The default configuration with these choices, and those that they make of other groups; else what Hydra composes.

    Settings of all groups (`+experiment=`) are merged last, as Hydra does.
    """
    given = [_parsed(choice) for choice in choices]
    added = [each for each in given if each.is_add()]
    chosen = {each.key_or_group: name for each in given if not each.is_add() and isinstance(name := each.value(), str)}
    places = _with_others(files, chosen) if len(chosen) + len(added) == len(given) and len(added) < 2 else None
    everywhere = [_layers(files, each.key_or_group, str(each.value())) for each in added]
    if places is None or None in everywhere:
        whole = _composed_once(files, choices)
        return _Kept(pickle.dumps(whole.config), whole.choices)
    base = _composed_once(files, ())
    config = copy.deepcopy(base.config)
    for group, (_, layers) in places.items():
        config[group] = pickle.loads(_stacked(files, group, group, layers.names))._get_node(group)
    with open_dict(config):
        for layer in (_settings(files, _EXPERIMENT, name) for each in everywhere if each for name in each.names):
            config.merge_with({name: layer._get_node(name) for name in layer if name != "hydra"})
    names = {group: name for group, (name, _) in places.items()}
    return _Kept(pickle.dumps(config), base.choices | names | {each.key_or_group: str(each.value()) for each in added})


def _assembled_part(files: Files, part: str, choices: Sequence[Override]) -> bytes | None:
    """`bits` and one part under at most one choice, pickled; None where that changes more, or is only added."""
    if not choices:
        return _stacked(files, _EXPERIMENT, part, ())
    group, layers = choices[0].key_or_group, _layers(files, choices[0].key_or_group, str(choices[0].value()))
    if len(choices) > 1 or choices[0].is_add() != (group == _EXPERIMENT) or layers is None or layers.others:
        return None
    return _stacked(files, group, part, layers.names)


def _with_others(files: Files, chosen: Mapping[str, str]) -> dict[str, tuple[str, _Layers]] | None:
    """The choices by group with their layers, and those that they make of other groups; None: only Hydra can tell."""
    found: dict[str, tuple[str, _Layers]] = {}
    for group, name in chosen.items():
        if (layers := _layers(files, group, name)) is None:
            return None
        found[group] = name, layers
        for other, choice in layers.others.items():
            below = _layers(files, other, choice)
            if other not in chosen and (below is None or below.others or found.get(other, (choice,))[0] != choice):
                return None
            if other not in chosen and below is not None:
                found[other] = choice, below
    return found


@functools.lru_cache(maxsize=_KEPT)
def _stacked(files: Files, group: str, part: str, layers: tuple[str, ...]) -> bytes:
    """`bits` and a part of the settings with a group's layers merged over it, pickled; many choices begin alike.

    Below the layers are the empty settings of the group, or the defaults where it is one that sets all parts.
    """
    if not layers:
        base = _composed_once(files, ()).config
        root = ConfigStore.instance().load("config_schema.yaml").node if part == group else copy.deepcopy(base)
        root.bits = base.bits
        for other in root.keys() - {part, "bits"}:
            del root.__dict__["_content"][other]
        OmegaConf.set_struct(root, True)
        return pickle.dumps(root)
    root = pickle.loads(_stacked(files, group, part, layers[:-1]))
    layer, node = _settings(files, group, layers[-1]), root._get_node(part)
    with open_dict(root):
        if part == group and isinstance(node, DictConfig):
            OmegaConf.unsafe_merge(node, layer)
        else:  # as a group of no type is until its schema is there
            OmegaConf.unsafe_merge(
                root, {part: layer} if part == group else {part: layer[part]} if part in layer else {}
            )
    return pickle.dumps(root)


class _Own(NamedTuple):
    """What a file says of its group itself, its `defaults`, and whether it names the group (`@package _global_`)."""

    settings: dict[str, Any]
    defaults: list[Any]
    names_group: bool


@functools.lru_cache(maxsize=4096)
def _own(files: Files, group: str, name: str) -> _Own | None:
    """What a choice says itself; None for a file that sets other groups too, such as an experiment (`+experiment=`)."""
    choice = None if files.further is not None else find(group, name, files.folder)
    if choice is None:
        return None
    settings = choice.read()
    defaults = settings.pop("defaults", ["_self_"])
    text = choice.file.read_text(encoding="utf-8") if choice.settings is None else ""
    package = "_global_" if text.startswith(_GLOBAL) else choice.package
    everywhere = package == "_global_"
    if "_self_" not in defaults or "@package" in text.removeprefix(_GLOBAL) or package not in (None, "_global_"):
        return None
    if group == _EXPERIMENT:
        return _Own(settings, defaults, False) if everywhere else None
    if everywhere and settings.keys() - {group}:
        return None
    return _Own(settings.get(group, {}) if everywhere else settings, defaults, everywhere)


class _Layers(NamedTuple):
    """Files and schemas that a file is made from, by name, the last of which win; its choices of other groups."""

    names: tuple[str, ...]
    others: Mapping[str, str]


@functools.lru_cache(maxsize=4096)
def _layers(files: Files, group: str, name: str) -> _Layers | None:
    """What a file is made from; None where that is anything but files of its group, schemas and choices of others."""
    if (own := _own(files, group, name)) is None:
        return None
    found: list[str] = []
    inherited: dict[str, str] = {}
    others: dict[str, str] = {}
    near = re.compile(r"\w+" if "/" not in name and group != _EXPERIMENT and not own.names_group else "(?!)")
    schema = rf"(\w+_schema)@{group}" if own.names_group else r"(\w+_schema)"
    for entry in own.defaults:
        if isinstance(entry, dict):
            ((key, choice),) = entry.items()
            other = re.fullmatch(r"override /(\w+)" + ("" if own.names_group else r"@_global_\.\1"), key)
            if other is None or group == _EXPERIMENT or not isinstance(choice, str):
                return None
            others[other[1]] = choice
        elif entry == "_self_":
            found.append(name)
        elif (other := re.fullmatch(schema, entry)) and _is_schema(group, other[1]):
            found.append(other[1])
        elif below := _below(files, group, own, f"/{group}/{entry}@_here_" if near.fullmatch(entry) else entry):
            found += below.names
            inherited |= below.others
        else:
            return None
    return _Layers(tuple(found), inherited | others)


def _below(files: Files, group: str, own: _Own, entry: str) -> _Layers | None:
    """Another file of the group that an entry of `defaults` puts where this file is."""
    other = re.fullmatch(rf"/{group}/([\w/]+)(@\w+)?", entry)
    theirs = None if other is None else _own(files, group, other[1])
    if other is None or theirs is None:
        return None
    same = None if group == _EXPERIMENT else "@_here_"
    placed = other[2] == same and theirs.names_group == own.names_group
    named = own.names_group and other[2] == f"@{group}" and not theirs.names_group
    return _layers(files, group, other[1]) if placed or named else None


def _settings(files: Files, group: str, layer: str) -> DictConfig:
    """The settings of a layer itself, the caller's own."""
    if _is_schema(group, layer):
        schema: DictConfig = ConfigStore.instance().load(f"{group}/{layer}.yaml").node
        return schema
    own = _own(files, group, layer)
    assert own is not None  # it is a layer
    return OmegaConf.create(own.settings)


def _is_schema(group: str, entry: str) -> bool:
    return entry.endswith("_schema") and f"{entry}.yaml" in ConfigStore.instance().list(group)
