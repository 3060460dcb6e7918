"""What a run's settings have that the presets of its method, task, model and data set have not, in words.

The words are found when a run is measured, with the presets as they are then, and its record keeps them. For a record
of an earlier version they are found when it is read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvq.config.bits import Bits
from kvq.config.diagnostics import SCHEMAS as DIAGNOSTICS
from kvq.results.presets import SIDES, departures, flatten, joined, presets, said
from kvq.results.record import FromPresets, Record

_OVERRIDE = re.compile(r"[+~]{0,2}((?:method|residual)\.[\w.]+|residual)=(.*)")
# Settings of model and data set that are compared with their presets: those of a run's key, without fingerprints.
_PROTOCOL = {
    "model": ("dtype", "outliers", "trust_remote_code", "load_in", "round_weights", "attn_implementation"),
    "dataset": ("loader", "documents", "max_tokens"),
}
_NOT_SAID = ("name", "fingerprint", "version", "batch_size", "bootstrap", "bos")
_CACHES = {
    "float16": "16-bit cache",
    "bfloat16": "bfloat16 cache",
    "float32": "32-bit cache",
    "float64": "64-bit cache",
}


def from_presets(record: Record) -> FromPresets:
    """The record's own words, or those of its settings and the presets of today."""
    return found_of(record) if record.from_presets is None else record.from_presets


def worded(record: Record) -> Record:
    """The record with its words and the label that is made of them."""
    words = found_of(record)
    return record.model_copy(update={"from_presets": words, "label": joined(record.method, words.method)})


def found_of(record: Record) -> FromPresets:
    """The words by which the settings of a record depart from presets."""
    return FromPresets(method=_of_preset(record), protocol=_of_protocol(record), first_token=_begins_otherwise(record))


def _of_preset(record: Record) -> list[str]:
    method = record.config.get("method")
    if not isinstance(method, Mapping) or any(side not in method for side in SIDES):
        return []  # a record of another package's settings
    task = record.config.get("task")
    scoring = task.get("scoring") if isinstance(task, Mapping) else None
    preset = presets().method(
        record.method,
        _preset_bits(record.bits, method.get("bits_by_layer")),
        scoring if isinstance(scoring, str) else None,
    )
    return _overridden(record) if preset is None else departures(record.config, preset)


def _preset_bits(bits: str, by_layer: Any) -> str:
    """Bits at which a run's codecs are those of its preset: of the first layer, where layers have bits of their own."""
    parsed = parse_label(bits)
    if parsed is None or not isinstance(by_layer, Mapping):
        return bits
    key, value = (next(iter(by_layer.get(side) or ()), mean) for side, mean in zip(SIDES, parsed, strict=True))
    return Bits(*(int(number) if number == int(number) else number for number in (key, value))).label


def _overridden(record: Record) -> list[str]:
    """Settings of the method that the record's command line overrides; of a sweep's values, the record's own."""
    try:
        words = shlex.split(record.provenance.command)
    except ValueError:
        words = record.provenance.command.split()
    given = {match[1]: match[2] for word in words if (match := _OVERRIDE.fullmatch(word))}
    leaves = dict(flatten(record.config))
    out = []
    for name, value in given.items():
        gone = re.fullmatch(r"method\.(?:(key|value)\.)?stages\.(\w+)", name)
        if gone and value == "null":
            out.append(f"− {f'{gone[1]}.' if gone[1] else ''}{gone[2]}")
            continue
        chosen = value if "," not in value or value[0] in "[{" else leaves.get(name)
        if chosen is not None:
            out.append(said(name, chosen))
    return out


def _of_protocol(run: Record) -> list[str]:
    """The settings in which a run's task, model and text differ from their presets, in words."""
    out = []
    for group in ("task", "model", "dataset"):
        part = run.config.get(group)
        preset = presets().settings(group, getattr(run, group))
        if not isinstance(part, Mapping) or preset is None:
            continue
        wanted = _PROTOCOL.get(group)
        ours, theirs = (_leaves(settings, wanted) for settings in (part, preset))
        out += [said(name, value) for name, value in sorted(ours.items()) if _plain(theirs.get(name)) != _plain(value)]
    seed = run.config.get("seed")
    return [*out, *_by_model(run), *([f"seed {seed}"] if seed else [])]


def cache_dtype(run: Record) -> str:
    """Dtype of what the caches of a run kept in full precision."""
    model = run.config.get("model")
    stored = model.get("cache_dtype") if isinstance(model, Mapping) else None
    return stored if isinstance(stored, str) else run.provenance.dtype


def _begins_otherwise(run: Record) -> list[str]:
    """How windows or prompts begin, where that is not as the run's model was trained."""
    task, preset = run.config.get("task"), presets().settings("model", run.model) or {}
    task = task if isinstance(task, Mapping) else {}
    of_chats = preset.get("chat_bos") if task.get("chat_template") else None
    bos, own = task.get("bos"), bool(preset.get("bos") if of_chats is None else of_chats)
    return [] if bos in (None, own) else ["begins with BOS" if bos else "begins without BOS"]


def _by_model(run: Record) -> list[str]:
    """What a run does otherwise than the preset of its model would have it: its first token, its cache's dtype."""
    words, preset = _begins_otherwise(run), presets().settings("model", run.model) or {}
    if weights := (run.config.get("model") or {}).get("weights"):
        words.append(f"weights in {weights}")
    stored = cache_dtype(run)
    if run.task not in DIAGNOSTICS and stored != (preset.get("cache_dtype") or run.provenance.dtype):
        words.append(_CACHES.get(stored, f"cache in {stored}"))
    return words


def _plain(value: str | None) -> str | None:
    return None if value in ("null", "[]", "{}") else value


def _leaves(settings: Mapping[str, Any], wanted: Sequence[str] | None) -> dict[str, str]:
    kept = {name: part for name, part in settings.items() if name not in _NOT_SAID and (not wanted or name in wanted)}
    if kept.get("windows") == "disjoint":
        kept.pop("stride", None)
    return {name: value for name, value in flatten(kept) if name != "stride" or value != "null"}


def parse_label(bits: str) -> tuple[float, float] | None:
    """Bits of keys and values of a label such as '3' or 'k3v2'; None for another label, such as a fixed rate's."""
    if match := re.fullmatch(r"k(\d+(?:\.\d+)?)v(\d+(?:\.\d+)?)", bits):
        return float(match[1]), float(match[2])
    if re.fullmatch(r"\d+(?:\.\d+)?", bits):
        return float(bits), float(bits)
    return None
