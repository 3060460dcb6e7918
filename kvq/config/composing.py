"""Composing a run's configuration from `conf/` and the command line, and checking it: the typed `Config` of a run.

Hydra takes 0.1 s to compose. It composes each set of choices of groups once; the result is kept in the process and in
kvq's cache folder, and values are merged into a copy. Everything else (added and deleted keys, packages, Hydra's own
settings, whatever fails) is composed by Hydra, which words the error; `tests/config/test_composing.py` compares both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import hydra
import omegaconf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, StringNode, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvq.config import plugins
from kvq.config.bits import Bits, BitsByLayerConfig, first_width, parse_bits
from kvq.config.choices import CONFIG_NAME, register_rows
from kvq.config.diagnostics import TaskConfig
from kvq.config.limits import cache_folder
from kvq.config.method import with_current_names
from kvq.config.run import LOGGERS, Config
from kvq.config.tasks import SCHEMAS
from kvq.errors import ConfigError, did_you_mean

VERSION_BASE = "1.3"
_unchanged: dict[tuple[Path, ...], Files] | None = None


class Files(NamedTuple):
    """The folders of choices, kvq's own first, and a hash (hex) of what decides what their choices compose to."""

    folders: tuple[Path, ...]
    stamp: str


def register(config_dir: str | Path | None = None) -> Files:
    """Put schemas and rows of tables, those of plugins too, where Hydra finds them; return the folders."""
    folders = tuple(plugins.conf_dirs(config_dir))
    files = (_unchanged or {}).get(folders)
    if files is None:
        state = _schemas(), [entry for folder in folders for entry in _stamps(folder)]
        files = Files(folders, hashlib.sha256(repr(state).encode()).hexdigest())
        if _unchanged is not None:
            _unchanged[folders] = files
    _register(files, plugins.folder_in_use(config_dir))
    return files


@functools.lru_cache(maxsize=1)
def _register(files: Files, folder: Path | None) -> None:
    """Store schemas and table rows in Hydra's ConfigStore, again only where the files or the folder have changed."""
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
    """The resolver `${kvbits:key}` or `${kvbits:value}`: bits of that side; with `bits_by_layer`, of layer 0."""
    bits, method = bits_of(_root_), _root_.get("method")
    own = OmegaConf.select(method, f"bits_by_layer.{side}") if OmegaConf.is_config(method) else None
    # The settings of the method are those of its first layer.
    return first_width(own[0]) if own else {"key": bits.key, "value": bits.value}[side]


def bits_of(root: DictConfig) -> Bits:
    """The checked `bits` of a composed configuration."""
    given = root.bits if "bits" in list(root) else None  # `~bits` takes it away
    method = root.get("method")
    real = bool(OmegaConf.is_config(method) and (method.get("real_bits") or method.get("bits_range") is None))
    return parse_bits(OmegaConf.to_container(given) if OmegaConf.is_config(given) else given, real)


@dataclass(frozen=True)
class Composition:
    """A configuration without its `hydra` node, and the choice of each group by name."""

    config: DictConfig
    choices: Mapping[str, str | None]


def compose(overrides: Sequence[str], config_dir: str | Path | None = None) -> DictConfig:
    """Compose the run's configuration from Hydra overrides; also works while a Hydra application runs.

    `config_dir`: a further folder of choices and modules, as `--config-dir` (None: the one in use, if any).
    """
    return composition(overrides, config_dir).config


def composition(overrides: Sequence[str], config_dir: str | Path | None = None) -> Composition:
    """As `compose`, with the choices that were made."""
    files, words = register(config_dir), with_current_names(overrides)
    return compose_quickly(files, words) or compose_with_hydra(files.folders, words)


@functools.cache
def _schemas() -> Any:
    """The files that may hold schemas, as the process has imported them, and the versions of libraries."""
    packages = [Path(__file__).parent, *(plugin.folder for plugin in plugins.installed().values() if plugin.tasks)]
    entries = [entry for package in packages for entry in _stamps(package)]
    return hydra.__version__, omegaconf.__version__, sys.version, entries


@contextlib.contextmanager
def assume_unchanged_files() -> Iterator[None]:
    """A context in which folders of choices are scanned once, not at every composition: no file may change."""
    global _unchanged
    before, _unchanged = _unchanged, {}
    try:
        yield
    finally:
        _unchanged = before


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Path, time of change and bytes of every file of settings or code in a folder."""
    files = (path for path in folder.rglob("*") if path.suffix in (".yaml", ".py"))
    return sorted((str(path), (state := path.stat()).st_mtime_ns, state.st_size) for path in files)


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
        _restore_texts(config, map(_parse_override, overrides))
    return Composition(config, choices)


def compose_quickly(files: Files, overrides: Sequence[str]) -> Composition | None:
    """The same from what is kept of the choices; None for what only Hydra composes."""
    try:
        if (parsed := _parse(files, overrides)) is None:
            return None
        choices, values = parsed
        found: Composition = pickle.loads(_compose_choices(files, choices))
        for override in values:
            OmegaConf.update(found.config, override.key_or_group, copy.deepcopy(override.value()), merge=True)
        _restore_texts(found.config, values)
        return found
    except Exception:  # whatever is wrong, Hydra says it
        return None


def _parse(files: Files, overrides: Sequence[str]) -> tuple[tuple[str, ...], list[Override]] | None:
    """Choices of groups, the last of each, and values of settings; None where an override is of another kind."""
    chosen, values = dict[str, str](), list[Override]()
    groups = {folder.name for root in files.folders for folder in root.iterdir() if folder.is_dir()}
    for override in map(_parse_override, overrides):
        key, added = override.key_or_group, override.is_add() or override.is_force_add()
        if override.is_hydra_override() or override.is_sweep_override() or override.package is not None or "/" in key:
            return None
        if override.is_delete() or added != (key == "experiment"):
            return None
        if key in groups:
            chosen[key] = f"{'+' * added}{key}={override.value()}"
        else:
            values.append(override)
    return tuple(sorted(chosen.values())), values


@functools.lru_cache(maxsize=4096)
def _parse_override(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


@functools.lru_cache(maxsize=512)  # of 20 kB each
def _compose_choices(files: Files, choices: tuple[str, ...]) -> bytes:
    """The pickled `Composition` of these choices and the defaults of other groups: as kept on disk, else by Hydra.

    Unpickling takes a quarter of the time of `copy.deepcopy`.
    """
    name = hashlib.sha256(repr((files.folders, choices)).encode()).hexdigest()
    path = cache_folder() / "compositions" / f"{name[:32]}.pickle"
    with contextlib.suppress(Exception):  # not kept, or no file of ours
        stamp, kept = pickle.loads(path.read_bytes())
        if stamp == files.stamp:  # else of other settings
            return bytes(kept)
    kept = pickle.dumps(compose_with_hydra(files.folders, choices))
    with contextlib.suppress(OSError):  # a folder that cannot be written costs time only
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(pickle.dumps((files.stamp, kept)))
        temporary.replace(path)
    return kept


def _restore_texts(config: DictConfig, overrides: Iterable[Override]) -> None:
    """Set text settings to the words as typed, in place, because Hydra reads 1.10 and 2024_11_26 as numbers.

    `ConfigError` for a list of texts with an unquoted number that was changed.
    """
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


def resolve_part(cfg: DictConfig, part: str) -> Any:
    """Check one part's values and return it typed, as `resolve` has it."""
    if not OmegaConf.is_config(cfg[part]):
        return cfg[part]
    _check_keys(cfg[part], f"{part}.")
    bits_of(cfg)
    try:
        return _of_a_task(OmegaConf.to_object(cfg[part])) if part == "task" else OmegaConf.to_object(cfg[part])
    except OmegaConfBaseException as error:
        raise _one_line(error) from error


def take_values(cfg: DictConfig) -> DictConfig:
    """A copy whose method has the values' codec and residual of `method.values_of`, as `METHOD+OTHER`.

    The other's calibration comes with them. Where `values_of` is null, cfg itself. `ConfigError` for a method that is
    more than codecs, for two calibrations that differ and for settings of values beside it.
    """
    method = cfg.get("method")
    if not OmegaConf.is_config(method) or (name := method.get("values_of")) is None:
        return cfg
    setting = f"method.values_of={name}"
    try:
        own, other = (compose([f"method={one}"]).method for one in (method.name, name))
    except HydraException as error:
        raise ConfigError(f"{setting}: {str(error).splitlines()[0]}") from error
    layers = method.full_precision_layers.value
    whole = (layers and layers == own.full_precision_layers.value) or other.full_precision_layers.value
    if whole or any(other[part] for part in ("policies", "eviction", "token_policy", "gqa_compensation")):
        raise ConfigError(f"{setting}: has policies; a method of codecs alone")
    if any(_raw(method, part) != _raw(own, part) for part in ("value", "residual.value")):
        raise ConfigError(f"{setting}: settings of method.value and method.residual.value beside it have no effect")
    cfg = copy.deepcopy(cfg)
    method = cfg.method
    if other.calibration.dataset is not None:
        given = method.calibration.dataset is not None or method.calibration != own.calibration
        if given and method.calibration != other.calibration:
            raise ConfigError(f"{setting}: is calibrated otherwise than {method.name}")
        method.calibration = other.calibration
    common, side = other.residual, other.residual.value
    residual = {part: common[part] if side[part] is None else side[part] for part in side}
    OmegaConf.update(method, "residual.value", residual)
    method.value, method.bits_range = other.value, method.bits_range or other.bits_range
    method.name = method.name if name == method.name else f"{method.name}+{name}"
    method.label, method.serve, method.values_of = None, None, None
    return cfg


def _raw(config: DictConfig, part: str) -> Any:
    """Part of a configuration as it was written, with its interpolations."""
    found = OmegaConf.select(config, part)
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def resolve(cfg: DictConfig) -> Config:
    """Check every value and return the typed configuration; codecs are plain dicts, without interpolations."""
    cfg = take_values(cfg)
    try:
        _check_keys(cfg)
        bits_of(cfg)
        config = OmegaConf.to_object(cfg)  # interpolations are resolved on the way
    except OmegaConfBaseException as error:
        raise _one_line(error) from error
    if not isinstance(config, Config):
        raise ConfigError(f"configuration of type {type(config).__name__}: its defaults must begin with config_schema")
    _of_a_task(config.task)
    by_layer = config.method.bits_by_layer
    if by_layer.at is not None:
        raise ConfigError("method.bits_by_layer.at: follows from key and value; set those")
    if by_layer:  # the method is composed at the bits of each layer
        by_layer.at, whole = {}, copy.deepcopy(cfg)
        whole.method.bits_by_layer = BitsByLayerConfig()
        for bits in by_layer.distinct_bits(parse_bits(config.bits, config.method.real_bits)):
            whole.bits = bits.label
            by_layer.at[bits.label] = OmegaConf.to_object(whole.method)
    return config


@functools.cache
def _groups_of(kind: type) -> dict[str, tuple[type, ...]]:
    """Fields of a schema that hold another: the classes that each may have."""
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    found = {name: get_args(hint) or (hint,) for name, hint in hints.items() if get_origin(hint) not in (list, dict)}
    return {name: kinds for name, kinds in found.items() if any(map(is_dataclass, kinds))}


def _of_a_task(task: Any) -> Any:
    """The settings of a task; `ConfigError` where no schema has checked them."""
    if isinstance(task, TaskConfig):
        return task
    if not (name := task.get("name") if isinstance(task, dict) else None):
        raise ConfigError(f"task={task}: a choice of the group task; `python run.py ls task` lists all")
    raise ConfigError(
        f"task.name={name}: nothing checks its settings; its YAML must begin with defaults: [{name}_schema, _self_], "
        f"of the class that {name}.py beside it gives to TASK"
    )


def _check_keys(cfg: DictConfig, prefix: str = "") -> None:
    """Refuse mandatory keys without a value, keys added with `+` that the schema lacks, and values for groups.

    Hydra lets the second pass, and they would be silently ignored; OmegaConf lets interpolations of any kind pass.
    """
    kind: Any = OmegaConf.get_type(cfg)
    groups = _groups_of(kind)
    known = [entry.name for entry in fields(kind)] if is_dataclass(kind) else None
    key: Any
    for key, node in cfg.__dict__["_content"].items():
        name = str(key)  # a number where it names a device
        setting = f"{prefix}{name}"
        if known is not None and name not in known:
            raise ConfigError(f"{setting}: unknown setting.{did_you_mean(name, known)}")
        interpolated = node._is_interpolation()
        if OmegaConf.is_missing(cfg, key) if interpolated else node._is_missing():
            raise ConfigError(f"{setting} has no value: give {setting}=...")
        if interpolated:
            if (kinds := groups.get(name)) and OmegaConf.get_type(cfg[key]) not in kinds:
                raise ConfigError(f"{setting}={cfg[key]}: a group of settings, not a value")
        elif isinstance(node, DictConfig) and not node._is_none():
            _check_keys(node, f"{setting}.")


def _one_line(error: OmegaConfBaseException) -> ConfigError:
    """OmegaConf's error as a `ConfigError` with the setting and the first line of the message."""
    setting = f"{error.full_key}: " if error.full_key else ""
    return ConfigError(f"{setting}{str(error.msg or error).splitlines()[0]}")


_plain = functools.cache(lambda: resolve(compose(["method=fp16"])))


def full_precision(config: Config) -> Config:
    """The same run without quantization: its baseline."""
    return replace(config, method=_plain().method, bits=_plain().bits, residual=_plain().residual)


OmegaConf.register_new_resolver("kvbits", _kvbits, replace=True)
