"""The label of a run: its method's name with everything that departs from the preset of that name, in words.

Without such a preset (of a --config-dir that is not given) it has the overrides of the record's command line. A method
has one colour (`palette.yaml`) wherever it is drawn: figures, the page, Weights & Biases.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml

from kvq.config import plugins
from kvq.config.method import TEST_TEXT
from kvq.errors import RecordError
from kvq.report.command import line
from kvq.results import Broken, Record, Store
from kvq.results.presets import departures_of, label_with, parse_label, part_of

RATES = ("cq/4c9b", "cq/8c10b")
"""Presets with a slash that are a paper's method at one of its rates, which `bits` cannot choose."""
ON_TEST_TEXT = "calibrated on the text under test"
_WINDOWS = ("windows", "context", "stride", "scoring")
_SCORED = {"generation": "as in generation", "parallel": "in parallel", "continuation": "as a continuation"}
PREFERRED = ("smollm2_135m", "tiny_hard")
"""Models in the order in which they are asked: a trained model of some size, then the embedded one with sinks."""
FEWEST = 10
"""Runs of perplexity that a preferred model must have."""
_OWN = ("#E15759", "#4E79A7", "#F28E2B", "#76B7B2", "#59A14F", "#B07AA1", "#9C755F", "#86785F")
"""Colours of methods that no palette names, by a hash of their names."""
ENGINES = "engine"
"""The folder of presets of inference engines' cache formats, each of which is a method of its own."""


def labelled(store: Store, near: Collection[str] | None = None) -> tuple[list[Record], list[Broken]]:
    """Records of a store, or of the models and data sets of the runs `near`; without a label they are broken."""
    records, broken = store.scan(near)
    kept, odd = [], list(broken)
    for record in records:
        try:
            for name in ("task", "model", "dataset", "method", "residual"):
                if not isinstance(part := record.config.get(name), dict | None):
                    raise RecordError(f"config.{name} is {part!r:.40}, not an object")
            if not 0 <= (p_value := record.metrics.get("p_value", 0.0)) <= 1:
                raise RecordError(f"metrics.p_value is {p_value:g}, not a probability")
            _ = label(record), protocol(record)
            kept.append(record)
        except Exception as error:  # of settings that the schema takes and no run has
            odd.append(Broken(store.record_path(record.key), f"label: {line(error)}"))
    return kept, odd


def label(record: Record) -> str:
    """The method's name with what departs from its preset: `oscar − key.hadamard`, `oscar, residual 64`."""
    return label_with(record.method, method_departures(record))


def named(record: Record) -> str:
    """A run's label with its bits."""
    return f"{label(record)} {record.bits}".strip()


def is_variant(record: Record) -> bool:
    """Whether a run is a preset's variant (`kvquant/pysource`) or departs from its preset, not a method of its own."""
    names = record.method.split("+")  # of a pair of two formats, both
    plain = not any("/" in name.removeprefix(f"{ENGINES}/") for name in names) or record.method in RATES
    return not plain or bool(method_departures(record))


def keeps_first(record: Record) -> bool:
    """Whether a run departs from its preset in that it keeps the first token in full precision, and in nothing else."""
    return method_departures(record) == ["sink tokens 1"]


def method_departures(record: Record) -> list[str]:
    """The settings that differ from the preset of the record's method, in words, and a calibration on the test text."""
    return [*departures_of(record).method, *([ON_TEST_TEXT] if is_on_test_text(record) else [])]


def is_on_test_text(record: Record) -> bool:
    """Whether a run's calibration shares more n-grams with what it scored than texts that are apart do."""
    return record.metrics.get("calibration_shared", 0.0) > TEST_TEXT


def by_bits(bits: str) -> tuple[float, str]:
    """Sort key of a bit label: the mean of keys and values, labels without a number last."""
    parsed = parse_label(bits)
    return (float("inf") if parsed is None else sum(parsed) / 2, bits)


def model_name(name: str) -> str:
    """A model's name; of a path or hub id, its last part."""
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] or name


def protocol(run: Record) -> str:
    """A run's protocol for a figure: windows and scoring where the task has them, and what departs from its presets."""
    given = part_of(run.config, "task")
    words = []
    if given.get("windows"):
        size = f" of {given['context']}" if given.get("context") else ""
        step = f" every {given['stride']}" if given.get("stride") else ""
        words.append(f"{given['windows']} windows{size}{step} tokens")
    if given.get("scoring"):
        words.append(f"scored {_SCORED.get(str(given['scoring']), given['scoring'])}")
    others = [word for word in departures_of(run).protocol if not (words and word.startswith(_WINDOWS))]
    return ", ".join([*words, *others])


def main_model(records: Iterable[Record]) -> str | None:
    """The first of `PREFERRED` with `FEWEST` runs of perplexity, else that with most, by name; None: no records."""
    records = list(records)
    counts = Counter(model_name(record.model) for record in records if record.task == "ppl" and record.status == "done")
    counts = counts or Counter(model_name(record.model) for record in records)
    most = min(counts, key=lambda name: (-counts[name], name), default=None)
    return next((name for name in PREFERRED if counts[name] >= FEWEST), most)


def read_with_plugins(path: Path) -> dict[str, Any]:
    """A YAML file of lists and tables, with what plugins' files of its name add to them."""
    found: dict[str, Any] = {}
    for file in (path, *(folder / path.name for folder in plugins.packages())):
        for name, part in yaml.safe_load(file.read_text(encoding="utf-8")).items() if file.is_file() else ():
            known = found.get(name, type(part)())
            found[name] = known | part if isinstance(part, dict) else [*known, *part]
    return found


_PALETTE = read_with_plugins(Path(__file__).with_name("palette.yaml"))
FIRST: dict[str, str] = _PALETTE["first"]
"""Methods that most figures show; their lines are solid."""
BY_ENGINE: dict[str, tuple[str, str]] = {name: tuple(known) for name, known in _PALETTE.get("engines", {}).items()}
"""By the beginning of a preset's name: the engine's name and colour."""


def method_of(label: str) -> str:
    """The method of a label, which may also have a variant, changed settings and bits."""
    folder, slash, rest = label.partition("/")
    if folder == ENGINES and slash:
        return f"{folder}/{method_of(rest)}"
    return re.split(r"[/ ,]", label, maxsplit=1)[0]


def engine_of(label: str) -> str | None:
    """The engine whose cache format a label names, by the first word of a preset in the folder `engine`; else None."""
    method = method_of(label)
    if not method.startswith(f"{ENGINES}/"):
        return None
    name = method.removeprefix(f"{ENGINES}/").partition("_")[0]
    return BY_ENGINE[name][0] if name in BY_ENGINE else name


def colour_of(label: str) -> str:
    """The colour of a label's method, as #RRGGBB; it is readable on white and on a dark page."""
    method = method_of(label)
    of_engine = dict(BY_ENGINE.values()).get(engine_of(method) or "")
    own = _OWN[zlib.crc32(method.encode()) % len(_OWN)]
    return of_engine or FIRST.get(method) or _PALETTE["others"].get(method, own)
