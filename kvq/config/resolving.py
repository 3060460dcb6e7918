"""Checking every value of a composed configuration, and the typed configuration that it becomes."""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvq.config.bits import Bits, BitsByLayerConfig, parse_bits
from kvq.config.composing import bits_of, compose
from kvq.config.method import MethodConfig
from kvq.config.run import Config
from kvq.config.task import TaskConfig
from kvq.config.tasks import SCHEMAS
from kvq.errors import ConfigError, did_you_mean


def resolve_part(cfg: DictConfig, part: str) -> Any:
    """Check one part's values and return it typed, as `resolve` has it."""
    if not OmegaConf.is_config(cfg[part]):
        return cfg[part]
    _check_keys(cfg[part], f"{part}.")
    bits_of(cfg)
    try:
        return _check_types(part, OmegaConf.to_object(cfg[part]))
    except OmegaConfBaseException as error:
        raise _one_line(error) from error


def _check_types(part: str, settings: Any) -> Any:
    """The settings; a task's are refused where no schema has checked them."""
    if part == "task" and not isinstance(settings, TaskConfig):
        raise _untyped(settings)
    return settings


def resolve(cfg: DictConfig) -> Config:
    """Check every value and return the typed configuration; codecs are plain dicts, without interpolations."""
    try:
        _check_keys(cfg)
        bits_of(cfg)
        config = OmegaConf.to_object(cfg)  # interpolations are resolved on the way
    except OmegaConfBaseException as error:
        raise _one_line(error) from error
    if not isinstance(config, Config):
        raise ConfigError(f"configuration of type {type(config).__name__}: its defaults must begin with config_schema")
    _check_types("task", config.task)
    _compose_layers(cfg, config)
    return config


def _compose_layers(cfg: DictConfig, config: Config) -> None:
    """Compose the method at the bits of its layers, where these have bits of their own."""
    by_layer = config.method.bits_by_layer
    if by_layer.at is not None:
        raise ConfigError("method.bits_by_layer.at: follows from key and value; set those")
    if by_layer:
        by_layer.at = {
            bits.label: _method_at(cfg, bits)
            for bits in by_layer.distinct_bits(parse_bits(config.bits, config.method.real_bits))
        }


def _method_at(cfg: DictConfig, bits: Bits) -> MethodConfig:
    """The method composed at `bits`, the same in all layers."""
    whole = copy.deepcopy(cfg)
    whole.bits = bits.label
    whole.method.bits_by_layer = BitsByLayerConfig()
    method = OmegaConf.to_object(whole.method)
    assert isinstance(method, MethodConfig)
    return method


@functools.cache
def _groups_of(kind: type) -> dict[str, tuple[type, ...]]:
    """Fields of a schema that hold another: the classes that each may have."""
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    found = {name: get_args(hint) or (hint,) for name, hint in hints.items() if get_origin(hint) not in (list, dict)}
    return {name: kinds for name, kinds in found.items() if any(map(is_dataclass, kinds))}


def _untyped(task: object) -> ConfigError:
    """Settings of a task that no schema checks."""
    name = task.get("name") if isinstance(task, dict) else None
    if not name:
        return ConfigError(f"task={task}: a choice of the group task; `python run.py ls task` lists all")
    if name in SCHEMAS:
        return ConfigError(f"task.name={name}: its YAML must begin with defaults: [{name}_schema, _self_]")
    return ConfigError(
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


@functools.cache
def _full_precision() -> Config:
    return resolve(compose(["method=fp16"]))


def full_precision(config: Config) -> Config:
    """The same run without quantization: its baseline."""
    found = _full_precision()
    return replace(config, method=found.method, bits=found.bits, residual=found.residual)
