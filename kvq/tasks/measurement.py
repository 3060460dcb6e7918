"""The interface of tasks: their inputs and outputs, and the storage of a cache as metrics."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.codecs import CodedBlocks, HuffmanCodec
from kvq.config import Loader, TaskConfig
from kvq.config.plugins import module_of_task
from kvq.config.tasks import is_timed
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.methods.method import Method
    from kvq.models.inputs import Inputs
    from kvq.results.files import Journal

_HOMES = {
    **dict.fromkeys(("latency", "throughput"), "speed"),
    **dict.fromkeys(("random_states", "model_states"), "known_states"),
    **dict.fromkeys(("multimodal", "modality"), "multimodal"),
    **dict.fromkeys(("error", "synthetic"), "error"),
}
"""Modules of this package with several tasks, which are in their `TASKS`; another has the name of its one `TASK`."""
STORED = (
    *("bits_per_element", "key_bits", "value_bits", "effective_bits", "packed_bytes", "total_bytes", "cached_tokens"),
    *("index_bits", "index_entropy", "uncoded_bits"),
)
RECOMPRESSED = ("recompressed_tokens", "recompression_error")
"""Of methods that encode packed tokens again with other bits."""
STATES = ("state_bytes", "state_bits")
"""Of models some of whose layers keep a state of fixed size; both are part of total bytes and effective bits."""


@dataclass(frozen=True)
class Baseline:
    """The full-precision run that a run is compared with: its key, metrics and samples."""

    key: str
    metrics: dict[str, float]
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class Measurement:
    """Metrics by name with their units, and one sample per item; `engine`: the program that computed the logits."""

    metrics: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    engine: str | None = None


def units_like(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """The unit of each metric, by the first pattern (as of `fnmatch`) that its name has; "1" where it has none."""
    return {name: next((unit for like, unit in known.items() if fnmatchcase(name, like)), "1") for name in names}


def mean_metric(name: str, rows: Iterable[Mapping[str, Any]], quantity: str, /, **where: str | int) -> dict[str, float]:
    """A metric: the mean of a quantity over the rows with these fields that have it; none where no row is such."""
    alike = (row for row in rows if quantity in row and all(row.get(key) == value for key, value in where.items()))
    values = [row[quantity] for row in alike]
    return {name: sum(values) / len(values)} if values else {}


def averaged(rows: Iterable[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """One row for each set of these fields, in order: means over its rows of all others, numbers or lists."""
    groups: dict[tuple[tuple[str, Any], ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple((name, row[name]) for name in names if name in row)].append(row)
    out = []
    for named, same in groups.items():
        means = {name: np.mean([one[name] for one in same], 0).tolist() for name in same[0] if name not in names}
        out.append({**dict(named), **means})
    return out


def decoded(inputs: Inputs, tokens: Iterable[Tensor]) -> list[str]:
    """The text of each sequence of tokens."""
    return [str(inputs.tokenizer.decode(sequence.tolist(), skip_special_tokens=True)) for sequence in tokens]


def text_of_dataset(inputs: Inputs) -> list[str]:
    """The text of a run's data set by stream of tokens; none where it holds items or is not scored."""
    config = inputs.config
    if config.dataset.loader is Loader.items or is_timed(config.task):
        return []
    return decoded(inputs, inputs.streams(getattr(config.task, "context", 2)).streams)


def items_fingerprint(inputs: Inputs, parts: Iterable[Any], *more: str) -> str:
    """The sha256 (hex) of what names items: JSON data, and the model's longest context, which cuts or skips prompts."""
    named = (*more, inputs.longest_context) if more else inputs.longest_context
    digest = hashlib.sha256(repr(named).encode())
    for part in parts:
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """A task, as the runner calls it; `settings`: of a task outside the package, the dataclass of its settings.

    `check` reads no weights and raises `Unsupported` or `ConfigError`; `measure` writes what it has scored to the
    journal, from which a killed run resumes; `fingerprint` names the data; `texts`: its texts, to compare with a
    calibration's.
    """

    check: Callable[[Inputs, Method], None]
    measure: Callable[[Inputs, Method, Baseline | None, Journal], Measurement]
    fingerprint: Callable[[Inputs], str] = lambda inputs: inputs.tokens.fingerprint
    settings: type[TaskConfig] | None = None
    texts: Callable[[Inputs], list[str]] = text_of_dataset


def task_of(settings: TaskConfig) -> Task:
    """The task of these settings: in the module of its name in this package, or outside it as `module_of_task` says."""
    name, home = settings.name, module_of_task(settings)
    try:
        found = importlib.import_module(f"kvq.tasks.{_HOMES.get(name, name)}" if home.startswith("kvq.") else home)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvq":
            raise
        raise ConfigError(f"task={name}: needs {error.name}; pip install -e '.[eval]'") from error
    task: Task = getattr(found, "TASKS", {}).get(name) or found.TASK
    return task


def journaled(
    journal: Journal, items: Iterable[str], score: Callable[[str], Mapping[str, Any]], label: str, unit: str
) -> list[dict[str, Any]]:
    """The journal's rows of items; a row that it lacks is made by `score(item)` and added at once."""
    rows = []
    for item in tqdm(list(items), desc=label, unit=unit, leave=False, disable=None):
        if item not in journal.rows:
            journal.add([{"item": item, **score(item)}])
        rows.append(journal.rows[item])
    return rows


def scored_rows(
    journal: Journal, kind: str, count: int, score: Callable[[int], Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The journal's rows `<kind> <index>`, as `journaled`, and the same rows without `storage`, as samples."""
    indices = {f"{kind} {index}": index for index in range(count)}
    rows = journaled(journal, indices, lambda item: score(indices[item]), f"{kind}s", kind)
    return rows, [{name: value for name, value in row.items() if name != "storage"} for row in rows]


def storage_metrics(cache: KVCache, sequences: int) -> dict[str, float]:
    """Measured bits of a cache in its present state, and bytes of one of its sequences.

    With Huffman codes: mean length of code words and entropy of each block's frequencies. With compressed blocks: bits
    before. With tokens encoded again: how many (of a head, each time), and the relative squared change of their decoded
    forms. With states of fixed size: their bytes, and part of effective bits.
    """
    stored = {
        "bits_per_element": cache.bits_per_element,
        "key_bits": cache.side_bits("key"),
        "value_bits": cache.side_bits("value"),
        "effective_bits": cache.effective_bits,
        "packed_bytes": cache.packed_bytes / sequences,
        "total_bytes": cache.nbytes / sequences,
        "cached_tokens": cache.get_seq_length() - sum(cache.padding or ()) / sequences,
    }
    sides = [(getattr(side, "codec", None), side) for layer in cache.kv_layers for side in (layer.key, layer.value)]
    rates = [codec.rate(part) for codec, side in sides if isinstance(codec, HuffmanCodec) for part in side.packed]
    if indices := sum(rate.indices for rate in rates):
        stored["index_bits"] = sum(rate.coded for rate in rates) / indices
        stored["index_entropy"] = sum(rate.entropy for rate in rates) / indices
    blocks = [(codec, part) for codec, side in sides if isinstance(codec, CodedBlocks) for part in side.packed]
    coded = [(part, size) for codec, part in blocks if (size := codec.uncoded_bytes(part)) is not None]
    if elements := sum(part.batch * part.heads * part.tokens * part.head_dim for part, _ in coded):
        stored["uncoded_bits"] = 8 * sum(size for _, size in coded) / elements
    if cache.state_bytes:
        stored["state_bytes"] = cache.state_bytes / sequences
        stored["state_bits"] = stored["effective_bits"] * cache.state_bytes / cache.nbytes
    if (done := cache.recompression) is not None:
        lost = done.lost / done.energy if done.energy else 0.0
        stored |= {"recompressed_tokens": done.moves / sequences, "recompression_error": lost}
    return stored
