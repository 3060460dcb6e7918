"""Presets in the form of a record's settings, and the settings in which a run differs from its own, as short words."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from kvq.config import Config, MethodConfig, Scoring, compose, compose_part, conf_dir, outside
from kvq.config.explain import COMPOSE_ERRORS, choices
from kvq.config.identity import by_names
from kvq.results.record import Record, canonical


class Presets(NamedTuple):
    """Presets by group and name, each composed once; `own`: the further folder of configurations."""

    own: Path | None

    def method(self, name: str, bits: str, scoring: str | None) -> Settings | None:
        """`method` and `residual` of a preset as a run's key has them; None where there is no preset.

        Args:
            name: the method's, such as `oscar/cr_only`.
            bits: as a record labels them; empty: a fixed rate.
            scoring: of the task, which may quantize at once.
        """
        return _canonical(self.own, name, bits, scoring)

    def settings(self, group: str, name: str) -> Settings | None:
        """A preset of a task, model or dataset; None where there is none or a value is missing."""
        return _settings(self.own, group, name)

    def model_path(self, name: str) -> str:
        """The `path` of a model that a record names; empty where there is no such preset."""
        return str((self.settings("model", name) or {}).get("path", ""))


def presets() -> Presets:
    """The presets of the folders that this process composes from."""
    return Presets(outside.folder_of())


@functools.cache
def _composed(own: Path | None, group: str, name: str) -> Any:
    """A configuration with a preset in it; None where the name has no file or it does not compose."""
    chosen = [f"{group}={name}"]
    if _file(own, group, name) is not None:
        with contextlib.suppress(*COMPOSE_ERRORS):
            return compose_part(group, chosen) or compose(chosen)
    return None


@functools.cache
def _settings(own: Path | None, group: str, name: str) -> Settings | None:
    whole = _composed(own, group, name)
    found = None if whole is None else whole[group]
    if found is None or OmegaConf.missing_keys(found):
        return None
    plain: Settings = canonical(OmegaConf.to_container(found, enum_to_str=True))
    return plain


_choices = functools.cache(choices)


def _file(own: Path | None, group: str, name: str) -> Path | None:
    """The file of a preset; None where the name (taken from a record) is of no preset."""
    folders = [conf_dir(), *([own] if own else [])]
    found = (folder / group / f"{name}.yaml" for folder in folders if name in _choices(own)[group])
    return next((path for path in found if path.is_file()), None)


@functools.cache
def _canonical(own: Path | None, name: str, bits: str, scoring: str | None) -> Settings | None:
    """A preset of a method as `kvq.config.identity` writes it; None where it does not compose at these bits."""
    if (whole := _composed(own, "method", name)) is None:
        return None
    try:
        whole.bits = bits or 3
        method = OmegaConf.to_object(whole.method)
        assert isinstance(method, MethodConfig)
        task: Any = SimpleNamespace(scoring=Scoring(scoring) if scoring else Scoring.generation)
        found = canonical(by_names(Config(bits=bits or 3, method=method, task=task)))
    except COMPOSE_ERRORS:
        return None
    return {name: part for name, part in found.items() if name in ("method", "residual")}


SIDES = ("key", "value")
Settings = Mapping[str, Any]
# Parts of a codec's settings that are compared one by one, and settings that decide no number.
_CODEC = ("stages", "order", "quantizer")
_SILENT = ("fingerprint",)
_WORDS = {"calibration.dataset": "calibrated on", "sink_tokens": "sink tokens", "attention": "attention"}


def departures(found: Settings, preset: Settings) -> list[str]:
    """The settings that differ between a run and its preset, stages first: `− key.hadamard`, `residual 64`.

    Args:
        found: `method`, `residual` and where there are some `window_layers`, `latent` and `attention` of a record's
            settings.
        preset: the same settings of the preset at the run's bits.
    """
    ours, theirs = _part(found, "method"), _part(preset, "method")
    sides = {side: _codec(ours.get(side), theirs.get(side)) for side in SIDES}
    parts = [*_both({side: part[0] for side, part in sides.items()}, "{sign} {side}.{name}", "{sign} {name}")]
    parts += _both({side: part[1] for side, part in sides.items()}, "{side} {name}", "{name}")
    parts += _residual(_part(found, "residual"), _part(preset, "residual"))
    rest = [{name: part for name, part in method.items() if name not in SIDES} for method in (ours, theirs)]
    parts += _others(*rest)
    if found.get("window_layers") is not None:
        parts.append("window layers in full precision")
    if found.get("latent") is not None:
        parts.append(f"{found['latent']} keys and values")
    if found.get("attention") is not None:
        parts.append(f"{found['attention']} attention")
    return parts


def joined(name: str, words: Sequence[str]) -> str:
    """A name followed by the words of `departures`: `oscar − key.hadamard, residual 64`."""
    changes = [word for word in words if word[:2] in ("− ", "+ ")]
    others = [word for word in words if word not in changes]
    return ", ".join([" ".join([name, *changes]), *others])


def said(setting: str, value: str) -> str:
    """A dotted setting and its value as words: `residual.key.size`, `64` is `key residual 64`; hashes by 8 digits."""
    if setting.endswith(".fingerprint"):
        value = value[:8]
    if setting in _WORDS:
        return f"{_WORDS[setting]} {_text(value)}"
    parts = [part for part in setting.split(".") if part not in ("method", "quantizer", "stages", "_target_")]
    side = next((part for part in parts if part in SIDES), None)
    parts = [part for part in parts if part != side]
    if parts and parts[-1] in ("size", "policy") and len(parts) > 1:
        parts = parts[:-1]
    words = " ".join([*([side] if side else []), *parts]).replace("_", " ").strip()
    return f"{words} {_text(value)}".strip()


def _part(settings: Settings, name: str) -> Settings:
    part = settings.get(name)
    return part if isinstance(part, Mapping) else {}


def _text(value: Any) -> str:
    """A value as text: `none`, `on`, `a, b`; of a class its name."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value.rpartition(".")[2] if re.fullmatch(r"[\w.]+\.\w+", value) else value
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(_ranges(value) if all(type(one) is int for one in value) else map(_text, value)) or "none"
    return str(value)


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Numbers as text, with three and more that follow each other as one range: `0–14`, `16`."""
    out: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        out += [f"{found[0]}–{found[-1]}"] if len(found) > 2 else map(str, found)
    return out


def _both(sides: Mapping[str, Sequence[tuple[str, str]]], one: str, both: str) -> list[str]:
    """Words of each side; those that keys and values share appear once, without a side."""
    shared = [word for word in sides["key"] if word in sides["value"]]
    out = [both.format(sign=sign, name=name) for sign, name in shared]
    for side in SIDES:
        own = [word for word in sides[side] if word not in shared]
        out += [one.format(sign=sign, name=name, side=side) for sign, name in own]
    return out


def _codec(ours: Any, theirs: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Stages that were removed or added, as (sign, name), and other changed settings, as ("", words)."""
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        if ours is None and theirs is None:
            return [], []
        return [], [("", "in full precision" if ours is None else "quantized" if theirs is None else "codec")]
    stages = _part(ours, "stages"), _part(theirs, "stages")
    changes = [("−", name) for name in stages[1] if name not in stages[0]]
    changes += [("+", name) for name in stages[0] if name not in stages[1]]
    words: list[str] = []
    kept = [name for name in stages[0] if name in stages[1]]
    for name in kept:
        words += _differing(stages[0][name], stages[1][name], f"{name}.")
    orders = [[name for name in codec.get("order") or () if name in kept] for codec in (ours, theirs)]
    if orders[0] != orders[1]:
        words.append(f"order {', '.join(orders[0])}")
    words += _differing(_part(ours, "quantizer"), _part(theirs, "quantizer"), "")
    rest = [{name: part for name, part in codec.items() if name not in _CODEC} for codec in (ours, theirs)]
    words += _differing(rest[0], rest[1], "")
    return changes, [("", word) for word in words]


def _differing(ours: Any, theirs: Any, prefix: str) -> list[str]:
    """Settings of a part that differ from the preset's; settings that the record lacks are left out."""
    mine, preset = dict(flatten(ours)), dict(flatten(theirs))
    changed = [(name, value) for name, value in mine.items() if preset.get(name) != value]
    return [said(prefix + ("codec" if name == "_target_" else name), value) for name, value in changed]


def _residual(ours: Settings, theirs: Settings) -> list[str]:
    """`residual 64`, `key residual sliding`; nothing for a side that is not quantized."""
    words: dict[str, list[tuple[str, str]]] = {side: [] for side in SIDES}
    for side in SIDES:
        mine, preset = ours.get(side), theirs.get(side)
        if not isinstance(mine, Mapping) or not isinstance(preset, Mapping):
            continue
        policy, size = mine.get("policy"), mine.get("size")
        changed = [policy] if policy != preset.get("policy") else []
        changed += [size] if size is not None and size != preset.get("size") else []
        if changed:
            words[side].append(("", f"residual {' '.join(map(str, changed))}"))
        if mine.get("prefill_block") != preset.get("prefill_block"):
            blocks = "one block" if mine.get("prefill_block") == "whole" else "blocks"
            words[side].append(("", f"prefill in {blocks}"))
    return _both(words, "{side} {name}", "{name}")


def _others(ours: Settings, theirs: Settings) -> list[str]:
    """Changed settings other than codecs and residual; a part that was removed is `− part`."""
    out = []
    for name in dict.fromkeys([*theirs, *ours]):
        mine, preset = ours.get(name), theirs.get(name)
        if name == "calibration" and mine is None:
            continue  # a task that reads no weights calibrates nothing
        if mine is None:
            out.append(f"− {name.replace('_', ' ')}" if isinstance(preset, Mapping) else said(name, "none"))
            continue
        leaves = dict(flatten(preset, name)) if preset is not None else {}
        changed = {path: value for path, value in flatten(mine, name) if leaves.get(path) != value}
        if set(changed) == {f"{name}.{side}" for side in SIDES} and len(set(changed.values())) == 1:
            changed = {name: next(iter(changed.values()))}
        out += [said(path, value) for path, value in changed.items() if path.rpartition(".")[2] not in _SILENT]
    return out


# Settings that are equal for all runs of a table.
PROTOCOL = ("task", "model", "dataset", "seed")


def settings_of(record: Record) -> dict[str, str]:
    """Settings of a run outside its protocol, flat; a setting that keys and values share is named once."""
    flat = dict(flatten({name: value for name, value in record.config.items() if name not in PROTOCOL}))
    merged: dict[str, str] = {}
    for name, value in flat.items():
        other = re.sub(r"(^|\.)(key|value)\.", lambda m: f"{m[1]}{'value' if m[2] == 'key' else 'key'}.", name, count=1)
        shared = re.sub(r"(^|\.)(key|value)\.", r"\1", name, count=1)
        merged[shared if flat.get(other) == value else name] = value
    return merged


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of nested settings as (dotted name, JSON text), in the order of the mapping."""
    if isinstance(value, Mapping):
        return [leaf for name, item in value.items() for leaf in flatten(item, f"{prefix}.{name}" if prefix else name)]
    # A record's mappings are sorted by name, a preset's are not, and a list may hold some.
    plain = isinstance(value, str) and value.strip() == value != ""
    return [(prefix, value if plain else json.dumps(value, sort_keys=True))]
