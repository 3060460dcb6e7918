"""Composing a run's configuration from `conf/` and the command line.

Hydra takes 0.1 s to compose. Within a process it composes the defaults once; a choice whose file consists of settings
and other files of its own group is merged over its schema and put in the place of the default one, and values are
merged into a copy (3 ms). Everything else (added and deleted keys, packages, choices that make others, Hydra's own
settings, whatever fails) is composed by Hydra, which words the error; `tests/config/test_composing.py` compares both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf, StringNode, open_dict

from kvq.config import plugins
from kvq.config.bits import Bits, first_width, parse_bits
from kvq.config.choices import CONFIG_NAME, find, register_rows
from kvq.config.method import with_current_names
from kvq.config.run import LOGGERS, Config
from kvq.config.tasks import SCHEMAS
from kvq.errors import ConfigError

VERSION_BASE = "1.3"
_EXPERIMENT = "experiment"  # a group whose files set every part
_KEPT = 512  # parts of some kB


class Files(NamedTuple):
    """The folders of choices, kvq's own first, and a hash of the path, time and size of every file in them."""

    folders: tuple[Path, ...]
    stamp: int


def register(config_dir: str | Path | None = None) -> Files:
    """Put schemas and rows of tables, those of plugins too, where Hydra finds them; return the folders."""
    files = files_of(config_dir)
    _register(files, plugins.folder_in_use(config_dir))
    return files


@functools.lru_cache(maxsize=1)
def _register(files: Files, folder: Path | None) -> None:
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for name, schema in SCHEMAS.items():
        store.store(group="task", name=f"{name}_schema", node=schema)
    for name, logger in LOGGERS.items():
        store.store(group="logger", name=f"{name}_schema", node=logger)
    plugins.register_tasks(folder)
    for root in files.folders:
        register_rows(root)


def _kvbits(side: str, *, _root_: DictConfig) -> float | int:
    bits, method = bits_of(_root_), _root_.get("method")
    own = OmegaConf.select(method, f"bits_by_layer.{side}") if OmegaConf.is_config(method) else None
    if own:  # the settings of the method are those of its first layer
        return first_width(own[0])
    return {"key": bits.key, "value": bits.value}[side]


def bits_of(root: DictConfig) -> Bits:
    """The checked `bits` of a composed configuration."""
    given = root.bits if "bits" in list(root) else None  # `~bits` takes it away
    method = root.get("method")
    real = bool(OmegaConf.is_config(method) and method.get("real_bits"))
    return parse_bits(OmegaConf.to_container(given) if OmegaConf.is_config(given) else given, real)


@dataclass(frozen=True)
class Composition:
    """A configuration without its `hydra` node, and the choice of each group by name."""

    config: DictConfig
    choices: Mapping[str, str | None]


def compose(overrides: Sequence[str], config_dir: str | Path | None = None) -> DictConfig:
    """Compose the run's configuration from Hydra overrides; also works while a Hydra application runs.

    Args:
        overrides: as on the command line, such as `["method=nsn", "bits=2"]`.
        config_dir: a further folder of configuration groups and modules, as `--config-dir` gives on the command line
            (None: the one that the process uses, if any).
    """
    return composition(overrides, config_dir).config


def composition(overrides: Sequence[str], config_dir: str | Path | None = None) -> Composition:
    """As `compose`, with the choices that were made."""
    files, words = register(config_dir), with_current_names(overrides)
    return compose_quickly(files, words) or compose_with_hydra(files.folders, words)


def compose_part(part: str, overrides: Sequence[str], config_dir: str | Path | None = None) -> DictConfig | None:
    """`bits` and one part of what `compose` gives, in a fifth of its time.

    None where the overrides decide other parts too, or only `compose` knows what is wrong with them.

    Args:
        part: a top-level setting, such as `method`.
        overrides, config_dir: as in `compose`.
    """
    files = register(config_dir)
    try:
        parsed = _parse(files, with_current_names(overrides))
        if parsed is None or len(parsed.choices) > 1 or any(name not in (part, "bits") for name in parsed.parts):
            return None
        group, name = next(iter(parsed.choices.items()), (_EXPERIMENT, ""))
        if group not in (part, _EXPERIMENT):
            return None
        kept = _part(files, group, name, part)
        return None if kept is None else _with_values(kept, parsed.values)
    except Exception:  # whatever is wrong, Hydra says it
        return None


def files_of(config_dir: str | Path | None = None) -> Files:
    """The folders of choices as they are now."""
    folders = tuple(plugins.conf_dirs(config_dir))
    if _unchanged is None:
        return _stamped(folders)
    return _unchanged.get(folders) or _unchanged.setdefault(folders, _stamped(folders))


def _stamped(folders: tuple[Path, ...]) -> Files:
    return Files(folders, hash(tuple(entry for folder in folders for entry in sorted(_stamps(folder)))))


_unchanged: dict[tuple[Path, ...], Files] | None = None


@contextlib.contextmanager
def unchanged_files() -> Iterator[None]:
    """Look at the folders of choices once within the block, which changes none: composing looks each time otherwise."""
    global _unchanged
    before, _unchanged = _unchanged, {}
    try:
        yield
    finally:
        _unchanged = before


def _stamps(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Path, time of change and bytes of every file in a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _stamps(Path(entry.path))
        else:
            yield entry.path, entry.stat().st_mtime_ns, entry.stat().st_size


def compose_with_hydra(folders: Sequence[Path], overrides: Sequence[str]) -> Composition:
    """What Hydra composes from these folders of choices, of which the first has the defaults."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    search = ",".join(f"'file://{folder}'" for folder in folders[1:])
    try:
        with hydra.initialize_config_dir(str(folders[0]), version_base=VERSION_BASE):
            words = [*overrides, f"hydra.searchpath=[{search}]"]
            config = hydra.compose(CONFIG_NAME, overrides=words, return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = running
    choices = {str(group): name for group, name in config.hydra.runtime.choices.items()}
    with open_dict(config):
        del config["hydra"]
        _with_texts(config, map(_parsed, overrides))
    return Composition(config, choices)


def compose_quickly(files: Files, overrides: Sequence[str]) -> Composition | None:
    """The same from what is kept; None for what only Hydra composes."""
    try:
        parsed = _parse(files, overrides)
        if parsed is None or _EXPERIMENT in parsed.choices:
            return None
        parts = {group: _part(files, group, name, group) for group, name in parsed.choices.items()}
        if None in parts.values():  # a choice that makes others
            whole = _chosen(files, tuple(f"{group}={name}" for group, name in parsed.choices.items()))
            return Composition(_with_values(whole.pickled, parsed.values), whole.choices)
        defaults = _chosen(files)
        config: DictConfig = pickle.loads(defaults.pickled)
        for group, kept in parts.items():
            config[group] = pickle.loads(kept or b"")._get_node(group)
        return Composition(_updated(config, parsed.values), {**defaults.choices, **parsed.choices})
    except Exception:  # whatever is wrong, Hydra says it
        return None


class _Parsed(NamedTuple):
    """Overrides by kind: the choice of a group, the value of a setting."""

    choices: dict[str, str]
    values: list[Override]

    @property
    def parts(self) -> set[str]:
        """Top-level settings that are given values."""
        return {value.key_or_group.partition(".")[0] for value in self.values}


def _parse(files: Files, overrides: Sequence[str]) -> _Parsed | None:
    """The overrides parsed; None where one of them is of another kind."""
    found, groups = _Parsed({}, []), _groups(files)
    for override in map(_parsed, overrides):
        key, added = override.key_or_group, override.is_add() or override.is_force_add()
        if override.is_hydra_override() or override.is_sweep_override() or override.package is not None or "/" in key:
            return None
        if override.is_delete() or added != (key == _EXPERIMENT):
            return None
        if key in groups:
            found.choices[key] = str(override.value())
        else:
            found.values.append(override)
    return found


@functools.lru_cache(maxsize=4096)
def _parsed(override: str) -> Override:
    return _parser().parse_override(override)


_parser = functools.cache(OverridesParser.create)


@functools.lru_cache(maxsize=8)
def _groups(files: Files) -> frozenset[str]:
    """Names of the folders that hold choices."""
    return frozenset(entry.name for root in files.folders for entry in root.iterdir() if entry.is_dir())


class _Chosen(NamedTuple):
    """The defaults with some choices, pickled: unpickling takes a quarter of the time of `copy.deepcopy`."""

    pickled: bytes
    choices: Mapping[str, str | None]


@functools.lru_cache(maxsize=64)
def _chosen(files: Files, choices: tuple[str, ...] = ()) -> _Chosen:
    found = compose_with_hydra(files.folders, choices)
    return _Chosen(pickle.dumps(found.config), found.choices)


def _with_values(pickled: bytes, values: Sequence[Override]) -> DictConfig:
    config: DictConfig = pickle.loads(pickled)
    return _updated(config, values)


def _updated(config: DictConfig, values: Sequence[Override]) -> DictConfig:
    for override in values:
        OmegaConf.update(config, override.key_or_group, copy.deepcopy(override.value()), merge=True)
    return _with_texts(config, values)


def _with_texts(config: DictConfig, overrides: Iterable[Override]) -> DictConfig:
    """Words of settings that are texts as they were typed: Hydra reads 1.10 and 2024_11_26 as numbers."""
    for override in overrides:
        if override.is_delete() or override.is_sweep_override() or override.package is not None:
            continue
        parent, _, name = override.key_or_group.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        typed, value = (override.input_line or "").partition("=")[2].strip(), override.value()
        if not isinstance(node, DictConfig) or name not in node:
            continue
        setting = node._get_node(name)
        if isinstance(setting, StringNode) and isinstance(value, bool | int | float):
            node[name] = typed
        elif isinstance(setting, ListConfig) and setting._metadata.element_type is str and isinstance(value, list):
            words = set(re.split(r"[\s,\[\]]+", typed))
            changed = [one for one in value if isinstance(one, bool | int | float) and str(one) not in words]
            if changed:
                raise ConfigError(f"{typed}: {name} holds texts; quote what looks like a number ('\"1.10\"')")
    return config


@functools.lru_cache(maxsize=_KEPT)
def _part(files: Files, group: str, name: str, part: str) -> bytes | None:
    """`bits` and one part under a choice, pickled; None: only Hydra composes it.

    Args:
        name: empty for the default choice.
        part: the group itself, or a part that an experiment sets.
    """
    layers = _layers(files, group, name, part) if name else []
    if layers is None:
        return None
    root: DictConfig = pickle.loads(_without_choice(files, part, part == group))
    for layer in layers:
        node = root._get_node(part)
        with open_dict(root):
            typed = part == group and isinstance(node, DictConfig)
            # A group whose type a schema among the layers decides has no settings until then.
            OmegaConf.unsafe_merge(node if typed else root, layer if typed else {part: layer})
    return pickle.dumps(root)


@functools.lru_cache(maxsize=32)
def _without_choice(files: Files, part: str, by_schema: bool) -> bytes:
    """`bits` and one part, pickled: as its schema has it, or as the defaults do."""
    base: DictConfig = pickle.loads(_chosen(files).pickled)
    root: DictConfig = ConfigStore.instance().load("config_schema.yaml").node if by_schema else base
    root.bits = base.bits
    for other in root.keys() - {part, "bits"}:
        del root.__dict__["_content"][other]
    OmegaConf.set_struct(root, True)
    return pickle.dumps(root)


def _layers(files: Files, group: str, name: str, part: str) -> list[DictConfig] | None:
    """Settings and schemas that a choice is made from, the last of which win; None: not from its own group alone."""
    choice = find(group, name, *files.folders)
    if choice is None:
        return None
    settings, package = choice.read(), choice.read_package()
    entries = settings.pop("defaults", ["_self_"])
    if package is None or "_self_" not in entries or (package == "_group_") != (part == group):
        return None
    layer = settings if part == group else settings.get(part, {})
    found: list[DictConfig] = []
    for entry in entries:
        below = _below(files, group, name, part, entry, layer)
        if below is None:
            return None
        found += below
    return found


def _below(
    files: Files, group: str, name: str, part: str, entry: Any, own: Mapping[str, Any]
) -> list[DictConfig] | None:
    """The layers that an entry of a `defaults` list stands for."""
    if entry == "_self_":
        return [OmegaConf.create(dict(own))]
    if not isinstance(entry, str):
        return [] if part != group else None  # a choice of another group
    if entry.endswith("_schema") and f"{entry}.yaml" in ConfigStore.instance().list(group):
        return [ConfigStore.instance().load(f"{group}/{entry}.yaml").node]
    path, at, place = entry.partition("@")
    if entry.isidentifier() and "/" not in name and part == group:
        return _layers(files, group, entry, part)
    if path.startswith(f"/{group}/") and (place == "_here_" if part == group else not at):
        return _layers(files, group, path.removeprefix(f"/{group}/"), part)
    return None


OmegaConf.register_new_resolver("kvbits", _kvbits, replace=True)
