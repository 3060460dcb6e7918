"""Presets in the form of a record's settings, and how a run's settings depart from its presets, in words.

The words are found when a run is measured, with the presets as they are then, and its record keeps them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from kvq.config import Config, MethodConfig, Scoring, compose, plugins
from kvq.config.bits import Bits, first_width
from kvq.config.choices import SIDES
from kvq.config.composing import take_values
from kvq.config.diagnostics import DiagnosticConfig
from kvq.config.explain import COMPOSE_ERRORS, choices
from kvq.config.identity import by_names
from kvq.config.method import RENAMED
from kvq.config.tasks import SCHEMAS
from kvq.errors import ConfigError
from kvq.results.record import FromPresets, Record, canonical

Kept = TypeVar("Kept")
Settings = Mapping[str, Any]
_WORDS = {"calibration.dataset": "calibrated on", "sink_tokens": "sink tokens", "attention": "attention"}
# Settings that are equal for all runs of a table.
PROTOCOL = ("task", "model", "dataset", "seed")
# Settings of model and data set that are compared with their presets: those of a run's key, without fingerprints.
_COMPARED = {
    "model": ("dtype", "outliers", "trust_remote_code", "round_weights", "attn_implementation"),
    "dataset": ("loader", "documents", "max_tokens"),
}
_UNCOMPARED = ("name", "fingerprint", "version", "batch_size", "bootstrap", "bos")
_CACHES = {"bfloat16": "bfloat16 cache"} | {f"float{bits}": f"{bits}-bit cache" for bits in (16, 32, 64)}


def cache_by_folder(function: Callable[..., Kept]) -> Callable[..., Kept]:
    """`functools.cache` of a function of configurations: what it gives is kept for each folder of `--config-dir`."""

    @functools.cache
    def kept(_: object, *given: Any) -> Kept:
        return function(*given)

    return functools.wraps(function)(lambda *given: kept(plugins.folder_in_use(), *given))


def model_path(name: str) -> str:
    """The `path` of a model that a record names; empty where there is no such preset."""
    return str((preset("model", name) or {}).get("path", ""))


choices_in_use = cache_by_folder(choices)


def method_overrides(name: str, bits: str = "") -> list[str]:
    """Overrides of a method as a record names it; a pair `kivi+nsnquant` is kivi with the values of nsnquant."""
    keys, _, values = name.partition("+")
    given = {"method": keys, "method.values_of": values, "bits": bits}
    return [f"{setting}={value}" for setting, value in given.items() if value]


@cache_by_folder
def _compose_preset(group: str, name: str) -> Any:
    """A configuration with a preset in it; None where the name has no file or it does not compose."""
    if name.partition("+")[0] in choices_in_use()[group]:  # the name may be a record's, of no preset
        with contextlib.suppress(*COMPOSE_ERRORS):
            return take_values(compose(method_overrides(name) if group == "method" else [f"{group}={name}"]))
    return None


@cache_by_folder
def preset(group: str, name: str) -> Settings | None:
    """Canonical settings of a preset of a task, model or dataset; None where there is none or a value is missing."""
    whole = _compose_preset(group, name)
    with contextlib.suppress(MissingMandatoryValue):
        if whole is not None and whole[group] is not None:
            return dict(canonical(OmegaConf.to_container(whole[group], enum_to_str=True, throw_on_missing=True)))
    return None


@cache_by_folder
def _canonical_method(name: str, bits: str, scoring: str | None) -> Settings | None:
    """`method` and `residual` of a preset as `kvq.config.identity` writes them; None where it does not compose.

    `bits`: as a record labels them; empty: a fixed rate. `scoring`: of the task, which may quantize at once.
    """
    if (whole := _compose_preset("method", name)) is None:
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


def departures(found: Settings, preset: Settings) -> list[str]:
    """The settings that differ between a run and its preset, stages first: `− key.hadamard`, `residual 64`.

    `found`: a record's settings; `preset`: `method` and `residual` of the preset at the run's bits.
    """
    ours, theirs = part_of(found, "method"), part_of(preset, "method")
    residuals = part_of(found, "residual"), part_of(preset, "residual")
    sides = {side: _codec_departures(ours.get(side), theirs.get(side)) for side in SIDES}
    parts = _join_sides({side: stages for side, (stages, _) in sides.items()}, ".")
    parts += _join_sides({side: words for side, (_, words) in sides.items()}, " ")
    parts += _join_sides({side: _residual_departures(*(one.get(side) for one in residuals)) for side in SIDES}, " ")
    rest = [{name: part for name, part in method.items() if name not in SIDES} for method in (ours, theirs)]
    parts += _other_departures(*rest)
    return [*parts, *([f"{found['attention']} attention"] if found.get("attention") else [])]


def label_with(name: str, words: Sequence[str]) -> str:
    """A name followed by the words of `departures`: `oscar − key.hadamard, residual 64`."""
    changes = [word for word in words if word[:2] in ("− ", "+ ")]
    others = [word for word in words if word not in changes]
    return ", ".join([" ".join([name, *changes]), *others])


def in_words(setting: str, value: str) -> str:
    """A dotted setting and its value as words: `residual.key.size`, `64` is `key residual 64`; hashes by 8 digits."""
    if setting.endswith(".fingerprint"):
        value = value[:8]
    if setting in _WORDS:
        return f"{_WORDS[setting]} {_text(value)}"
    names = setting.split(".")
    side = next((part for part in names if part in SIDES), None)
    left_out = ("method", "quantizer", "stages", "_target_", side)
    parts = [RENAMED.get(part, part) for part in names if part not in left_out]
    if parts and parts[-1] in ("size", "policy") and len(parts) > 1:
        parts = parts[:-1]
    words = " ".join([*([side] if side else []), *parts]).replace("_", " ").strip()
    shown = _text(value)
    if "bits_by_layer" in setting and value.startswith("["):  # by layer, those of a layer's heads joined by slashes
        layers = (own if isinstance(own, list) else [own] for own in json.loads(value))
        shown = " ".join("/".join(map(str, own)) for own in layers)
    return f"{words} {shown}".strip()


def part_of(settings: Settings, name: str) -> Settings:
    """A part of nested settings; empty where there is none of that name."""
    part = settings.get(name)
    return part if isinstance(part, Mapping) else {}


def _text(value: Any) -> str:
    """A value as text: `none`, `on`, `a, b`; of a class its name."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value.rpartition(".")[2] if re.fullmatch(r"[\w.]+\.\w+", value) else value
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
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


def _join_sides(words: Mapping[str, Sequence[str]], after: str) -> list[str]:
    """Words for keys and for values as one list: those of both once, the others with `key` or `value` in place of `@`.

    `after`: what follows the name of the side.
    """
    shared = [word for word in words["key"] if word in words["value"]]
    own = [word.replace("@", side + after, 1) for side in SIDES for word in words[side] if word not in shared]
    return [*(word.replace("@", "", 1) for word in shared), *own]


def _codec_departures(ours: Any, theirs: Any) -> tuple[list[str], list[str]]:
    """Stages of a codec that were removed (`− @norm`) or added, and its other changed settings, for `_join_sides`."""
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        word = "@in full precision" if ours is None else "@quantized" if theirs is None else "@codec"
        return [], [word] if ours is not theirs else []
    mine, preset = part_of(ours, "stages"), part_of(theirs, "stages")
    changes = [f"− @{name}" for name in preset if name not in mine]
    changes += [f"+ @{name}" for name in mine if name not in preset]
    kept = [name for name in mine if name in preset]
    words = [word for name in kept for word in _changed_settings(mine[name], preset[name], f"{name}.")]
    pairs = ((ours, mine), (theirs, preset))
    order, usual = ([name for name in codec.get("order") or names if name in kept] for codec, names in pairs)
    words += [f"order {', '.join(order)}"] if order != usual else []
    words += _changed_settings(part_of(ours, "quantizer"), part_of(theirs, "quantizer"))
    rest, usual_rest = (
        {k: part for k, part in codec.items() if k not in ("stages", "order", "quantizer")} for codec in (ours, theirs)
    )
    words += _changed_settings(rest, usual_rest)
    return changes, [f"@{word}" for word in words]


def _changed_settings(ours: Any, theirs: Any, prefix: str = "") -> list[str]:
    """Words for the settings of a part that differ from the preset's."""
    return [in_words(prefix + ("codec" if at == "_target_" else at), own) for at, own in _changes(ours, theirs).items()]


def _changes(ours: Any, theirs: Any, prefix: str = "") -> dict[str, str]:
    """Settings of a part, flat, whose value is not the preset's; one that was removed is `null`."""
    own, usual = (dict(flatten(part, prefix)) if part is not None else {} for part in (ours, theirs))
    return {at: own.get(at, "null") for at in {**own, **usual} if own.get(at, "null") != usual.get(at, "null")}


def _residual_departures(ours: Any, theirs: Any) -> list[str]:
    """Words for a side's residual other than the preset's (`@residual sliding`); none unless both quantize the side."""
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return []
    policy, size = ours.get("policy"), ours.get("size")
    changed = [policy] if policy != theirs.get("policy") else []
    changed += [size] if size is not None and size != theirs.get("size") else []
    words = [f"@residual {' '.join(map(str, changed))}"] if changed else []
    if ours.get("prefill_block") != theirs.get("prefill_block"):
        words.append(f"@prefill in {'one block' if ours.get('prefill_block') == 'whole' else 'blocks'}")
    return words


def _other_departures(ours: Settings, theirs: Settings) -> list[str]:
    """Words for changed settings other than codecs and residual; `− part` for a part that was removed."""
    out = []
    for name in dict.fromkeys([*theirs, *ours]):
        mine, preset = ours.get(name), theirs.get(name)
        if name == "calibration" and mine is None:
            continue  # a task that reads no weights calibrates nothing
        if mine is None:
            out.append(f"− {in_words(name, '')}" if isinstance(preset, Mapping) else in_words(name, "none"))
            continue
        changed = _changes(mine, preset, name)
        if changed.keys() == {f"{name}.{side}" for side in SIDES} and len({*changed.values()}) == 1:
            changed = {name: changed[f"{name}.key"]}
        out += [in_words(path, value) for path, value in changed.items() if path.rpartition(".")[2] != "fingerprint"]
    return out


def protocol_parts(record: Record) -> dict[str, Any]:
    """The settings that runs of one table share: those of task, model and data set (else their names), and the seed."""
    return {name: record.config.get(name, getattr(record, name, None)) for name in PROTOCOL}


def settings_of(record: Record) -> dict[str, str]:
    """Settings of a run outside its protocol, flat; a setting that keys and values share is named once."""
    flat = dict(flatten({name: value for name, value in record.config.items() if name not in PROTOCOL}))
    merged: dict[str, str] = {}
    for name, value in flat.items():
        other, shared = _without_side(name)
        merged[shared if flat.get(other) == value else name] = value
    return merged


@functools.cache
def _without_side(name: str) -> tuple[str, str]:
    """The dotted name of a setting of keys or values, for the other side and without a side."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts[:-1]) if part in SIDES), None)
    if place is None:
        return name, name
    other = [*parts[:place], "value" if parts[place] == "key" else "key", *parts[place + 1 :]]
    return ".".join(other), ".".join([*parts[:place], *parts[place + 1 :]])


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of nested settings as (dotted name, JSON text), in the order of the mapping."""
    if isinstance(value, Mapping):
        return [leaf for name, item in value.items() for leaf in flatten(item, f"{prefix}.{name}" if prefix else name)]
    # A record's mappings are sorted by name, a preset's are not, and a list may hold some.
    plain = isinstance(value, str) and value.strip() == value != ""
    return [(prefix, value if plain else json.dumps(value, sort_keys=True))]


def departures_of(record: Record) -> FromPresets:
    """The departures that a record was stored with; of one without, those found with the presets of today."""
    return find_departures(record) if record.from_presets is None else record.from_presets


def with_departures(record: Record) -> Record:
    """A copy of the record with its departures from presets and the label made of them."""
    words = find_departures(record.model_copy(update={"config": json.loads(json.dumps(record.config, sort_keys=True))}))
    return record.model_copy(update={"from_presets": words, "label": label_with(record.method, words.method)})


def find_departures(record: Record) -> FromPresets:
    """Compare a record's settings with the presets of the same names, as they are today."""
    method, scoring = part_of(record.config, "method"), part_of(record.config, "task").get("scoring")
    bits = _preset_bits(record.bits, method.get("bits_by_layer"))
    known = _canonical_method(record.method, bits, scoring) if all(side in method for side in SIDES) else None
    return FromPresets(
        method=[] if known is None else departures(record.config, known),
        protocol=_protocol_departures(record),
        first_token=_first_token_departure(record),
    )


def _preset_bits(bits: str, by_layer: Any) -> str:
    """Bits at which a run's codecs are those of its preset: of the first layer, where layers have bits of their own."""
    parsed = parse_label(bits)
    if parsed is None or not isinstance(by_layer, Mapping):
        return bits
    found = (by_layer.get(side) or [mean] for side, mean in zip(SIDES, parsed, strict=True))
    key, value = (first_width(layers[0]) for layers in found)
    return Bits(*(int(number) if number == int(number) else number for number in (key, value))).label


def _protocol_departures(run: Record) -> list[str]:
    """The settings in which a run's task, model and text differ from their presets, in words."""
    out = []
    for group in ("task", "model", "dataset"):
        part, known = part_of(run.config, group), preset(group, getattr(run, group))
        if known is None:
            continue
        if group == "task" and not set(part) <= set(known):
            known = {**_added_by_variants(run.task), **known}
        ours, theirs = (_compared_settings(settings, _COMPARED.get(group)) for settings in (part, known))
        out += [in_words(name, value or "null") for name, value in sorted(ours.items()) if theirs.get(name) != value]
    out += _first_token_departure(run)
    if weights := part_of(run.config, "model").get("weights"):
        out.append(f"weights in {weights}")
    models = part_of(run.config, "model"), preset("model", run.model) or {}
    stored, usual = (model.get("cache_dtype") or run.provenance.dtype for model in models)
    if not _is_diagnostic(run.task) and stored != usual:
        out.append(_CACHES.get(stored, f"cache in {stored}"))
    return [*out, *([f"seed {seed}"] if (seed := run.config.get("seed")) else [])]


def _added_by_variants(task: str) -> Settings:
    """Settings of the variants of a task, which record its name, without the names that tell variants."""
    found = (preset("task", choice) for choice in choices_in_use()["task"])
    added = [settings for settings in found if settings is not None and settings.get("name") == task]
    parts = ((name, part) for settings in added for name, part in settings.items() if isinstance(part, Mapping))
    return {name: {key: value for key, value in part.items() if key != "name"} for name, part in parts}


def cache_dtype(run: Record) -> str:
    """Dtype of what the caches of a run kept in full precision."""
    stored, own = part_of(run.config, "model").get("cache_dtype"), run.provenance.engine or "transformers"
    return stored if isinstance(stored, str) and not own.startswith(("MLX", "ONNX")) else run.provenance.dtype


def _first_token_departure(run: Record) -> list[str]:
    """How windows or prompts begin, where that differs from the texts that the model was trained on."""
    task, known = part_of(run.config, "task"), preset("model", run.model) or {}
    of_chats = known.get("chat_bos") if task.get("chat_template") else None
    bos, own = task.get("bos"), bool(known.get("bos") if of_chats is None else of_chats)
    return [] if bos in (None, own) else ["begins with BOS" if bos else "begins without BOS"]


@functools.cache
def _is_diagnostic(task: str) -> bool:
    """Whether the task, of a plugin too, is a diagnostic, which takes states in the model's own dtype."""
    try:
        return issubclass(SCHEMAS.get(task) or plugins.settings_of_task(task), DiagnosticConfig)
    except ConfigError:
        return False


def _compared_settings(settings: Mapping[str, Any], wanted: Sequence[str] | None) -> dict[str, str | None]:
    """Settings as JSON text by dotted name, of those in `wanted` (None: all) and not in `_UNCOMPARED`."""
    kept = {name: part for name, part in settings.items() if name not in _UNCOMPARED and (not wanted or name in wanted)}
    if kept.get("windows") == "disjoint" or kept.get("stride") is None:
        kept.pop("stride", None)
    return {name: None if value in ("null", "[]", "{}") else value for name, value in flatten(kept)}


def parse_label(bits: str) -> tuple[float, float] | None:
    """Bits of keys and values of a label such as '3' or 'k3v2'; None for another label, such as a fixed rate's."""
    match = re.fullmatch(r"k(\d+(?:\.\d+)?)v(\d+(?:\.\d+)?)|(\d+(?:\.\d+)?)", bits)
    return None if match is None else (float(match[1] or match[3]), float(match[2] or match[3]))
