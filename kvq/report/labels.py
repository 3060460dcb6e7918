"""The label of a run: its method's name with everything that departs from the preset of that name, in words.

The record's settings are compared with the preset composed at the same bits. Where there is no preset of that name (one
of a --config-dir that is not given), the label has the overrides of the record's command line.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvq.config.bits import Bits
from kvq.config.diagnostics import SCHEMAS as DIAGNOSTICS
from kvq.config.method import TEST_TEXT
from kvq.report.command import line
from kvq.report.palette import ENGINES
from kvq.report.presets import SIDES, departures, flatten, joined, presets, said
from kvq.results import Broken, Record, Store

_OVERRIDE = re.compile(r"[+~]{0,2}((?:method|residual)\.[\w.]+|residual)=(.*)")
# Settings of model and data set that are compared with their presets: those of a run's key, without fingerprints.
_PROTOCOL = {
    "model": ("dtype", "outliers", "trust_remote_code", "load_in", "round_weights", "attn_implementation"),
    "dataset": ("loader", "documents", "max_tokens"),
}
RATES = ("cq/4c9b", "cq/8c10b")
"""Presets with a slash that are a paper's method at one of its rates, which `bits` cannot choose."""
ON_TEST_TEXT = "calibrated on the text under test"
_NOT_SAID = ("name", "fingerprint", "version", "batch_size", "bootstrap", "bos")
_CACHES = {
    "float16": "16-bit cache",
    "bfloat16": "bfloat16 cache",
    "float32": "32-bit cache",
    "float64": "64-bit cache",
}


def labelled(store: Store) -> tuple[list[Record], list[Broken]]:
    """`store.scan()`, with the records whose settings no label can be made of among the broken.

    Raises:
        RecordError: the folder cannot be listed.
    """
    records, broken = store.scan()
    kept, odd = [], list(broken)
    for record in records:
        try:
            _ = label(record), protocol(record)
            kept.append(record)
        except Exception as error:  # of settings that the schema takes and no run has
            odd.append(Broken(store.record_path(record.key), f"label: {line(error)}"))
    return kept, odd


def label(record: Record) -> str:
    """The method's name with what departs from its preset: `oscar − key.hadamard`, `oscar, residual 64`."""
    return joined(record.method, method_departures(record))


def named(record: Record) -> str:
    """A run's label with its bits."""
    return f"{label(record)} {record.bits}".strip()


def is_variant(record: Record) -> bool:
    """Whether a run is a preset's variant (`kvquant/pysource`) or departs from its preset, not a method of its own."""
    plain = "/" not in record.method.removeprefix(f"{ENGINES}/") or record.method in RATES
    return not plain or bool(method_departures(record))


def method_departures(record: Record) -> list[str]:
    """The settings that differ from the preset of the record's method, in words, and a calibration on the test text."""
    return [*_of_preset(record), *([ON_TEST_TEXT] if is_on_test_text(record) else [])]


def is_on_test_text(record: Record) -> bool:
    """Whether a run's calibration shares more n-grams with what it scored than texts that are apart do."""
    return record.metrics.get("calibration_shared", 0.0) > TEST_TEXT


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


def parse_label(bits: str) -> tuple[float, float] | None:
    """Bits of keys and values of a label such as '3' or 'k3v2'; None for another label, such as a fixed rate's."""
    if match := re.fullmatch(r"k(\d+(?:\.\d+)?)v(\d+(?:\.\d+)?)", bits):
        return float(match[1]), float(match[2])
    if re.fullmatch(r"\d+(?:\.\d+)?", bits):
        return float(bits), float(bits)
    return None


def by_bits(bits: str) -> tuple[float, str]:
    """Sort key of a bit label: the mean of keys and values, labels without a number last."""
    parsed = parse_label(bits)
    return (float("inf") if parsed is None else sum(parsed) / 2, bits)


def model_name(name: str) -> str:
    """A model's name; of a path or hub id, its last part."""
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] or name


_WINDOWS = ("windows", "context", "stride", "scoring")
_SCORED = {"generation": "as in generation", "parallel": "in parallel", "continuation": "as a continuation"}


def protocol(run: Record) -> str:
    """A run's protocol for a figure: windows and scoring where the task has them, and what departs from its presets."""
    task = run.config.get("task")
    given = {name: task.get(name) for name in _WINDOWS} if isinstance(task, Mapping) else {}
    words = []
    if given.get("windows"):
        size = f" of {given['context']}" if given.get("context") else ""
        step = f" every {given['stride']}" if given.get("stride") else ""
        words.append(f"{given['windows']} windows{size}{step} tokens")
    if given.get("scoring"):
        words.append(f"scored {_SCORED.get(str(given['scoring']), given['scoring'])}")
    others = [word for word in protocol_departures(run) if not (words and word.startswith(_WINDOWS))]
    return ", ".join([*words, *others])


def protocol_departures(run: Record) -> list[str]:
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


def begins_otherwise(run: Record) -> list[str]:
    """How windows or prompts begin, where that is not as the run's model was trained."""
    task, preset = run.config.get("task"), presets().settings("model", run.model) or {}
    bos, own = task.get("bos") if isinstance(task, Mapping) else None, bool(preset.get("bos"))
    return [] if bos in (None, own) else ["begins with BOS" if bos else "begins without BOS"]


def _by_model(run: Record) -> list[str]:
    """What a run does otherwise than the preset of its model would have it: its first token, its cache's dtype."""
    words, preset = begins_otherwise(run), presets().settings("model", run.model) or {}
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


PREFERRED = ("smollm2_135m", "tiny_hard")
"""Models in the order in which they are asked: a trained model of some size, then the embedded one with sinks."""
FEWEST = 10
"""Runs of perplexity that a preferred model must have."""


def main_model(records: Iterable[Record]) -> str | None:
    """The first of `PREFERRED` with `FEWEST` runs of perplexity, else the model with most; None: no records."""
    records = list(records)
    counts = Counter(model_name(record.model) for record in records if record.task == "ppl" and record.status == "done")
    counts = counts or Counter(model_name(record.model) for record in records)
    return next(
        (name for name in PREFERRED if counts[name] >= FEWEST), max(counts, key=counts.__getitem__, default=None)
    )
