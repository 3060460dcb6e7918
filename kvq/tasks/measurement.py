"""What tasks share: their interface, a cache's storage as metrics, hooks on the states that attention reads."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.cache.hooks import attentions, call_before
from kvq.cache.observe import INTERFACE, hook_attention_functions, scaling_of
from kvq.cache.rotary import angles, styles_of
from kvq.codecs import Codec, CodedBlocks, HeadsCodec, HuffmanCodec, Rope
from kvq.config import Loader, TaskConfig
from kvq.config.diagnostics import CaptureConfig
from kvq.config.method import Policy, PrefillBlock, ResidualSide
from kvq.config.plugins import module_of_task
from kvq.config.tasks import is_timed
from kvq.diagnostics import AttentionRule
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.method import Method
from kvq.methods.policies import Capability
from kvq.models.inputs import Inputs
from kvq.models.layers import places_of
from kvq.models.load import LoadedModel, base_of
from kvq.results.files import Journal
from kvq.tasks.scoring import cut_windows

_HOMES = {
    **dict.fromkeys(("latency", "throughput"), "speed"),
    **dict.fromkeys(("random_states", "model_states"), "known_states"),
    **dict.fromkeys(("multimodal", "modality"), "multimodal"),
    **dict.fromkeys(("error", "synthetic"), "error"),
    "generate": "reader",
}
"""Modules of this package with tasks of other names; several are in their `TASKS`, one is their `TASK`."""
STORED = (
    *("bits_per_element", "key_bits", "value_bits", "effective_bits", "packed_bytes", "total_bytes", "cached_tokens"),
    *("index_bits", "index_entropy", "uncoded_bits"),
    *("recompressed_tokens", "recompression_error"),  # of methods that encode packed tokens again with other bits
    *("state_bytes", "state_bits"),  # of models with states of fixed size; part of total bytes and effective bits
)
"""Metrics of what a cache stores (`storage_metrics`)."""


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
    journal, from which a killed run resumes; `fingerprint` names the data; `texts`: to compare with a calibration's.
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


@dataclass(frozen=True)
class LayerStates:
    """States of layer `index` of `count`, as attention reads them; `rope`: rotations of the keys (None: no RoPE)."""

    index: int
    count: int
    query: Float[Tensor, "1 heads tokens dim"]
    key: Float[Tensor, "1 kv_heads tokens dim"]
    value: Float[Tensor, "1 kv_heads tokens dim"]
    attention: AttentionRule
    rope: Rope | None


@torch.no_grad()
def capture(
    loaded: LoadedModel, tokens: Int[Tensor, " tokens"], visit: Callable[[LayerStates], None], **media: Tensor
) -> None:
    """Run `tokens` without a cache; call `visit` before every attention; `media`: further inputs of the model."""
    if getattr(loaded.text_config, "kv_lora_rank", None):
        raise Unsupported("model: its attention reads keys expanded from a latent; what a cache holds is the latent")
    base = base_of(loaded.model)
    modules = attentions(base)
    styles, places = styles_of(loaded.model), places_of(loaded.text_config)
    tables: dict[int, tuple[Tensor, Tensor] | None] = {}
    seen: set[int] = set()

    def keep(module: Any, arguments: dict[str, Any]) -> None:
        tables[module.layer_idx] = angles(module, arguments)

    def see(module: Any, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> None:
        if not hasattr(module, "layer_idx"):  # it looks at an image
            return
        index = places.get(int(module.layer_idx))
        if index is None or index in seen:  # it reads the keys and values of an earlier layer
            return
        if not bool(torch.isfinite(key).all() and torch.isfinite(value).all()):
            raise DataError(f"layer {index}: NaN or infinite keys or values; check the model's weights and the dtypes")
        seen.add(index)
        style, table = styles[index][0], tables.get(index)
        rope = None if style is None or table is None else style.rope(table[0][:1], table[1][:1])
        rule = AttentionRule(scaling_of(module, query, given), given.get("sliding_window"), given.get("softcap"))
        visit(LayerStates(index, len(styles), query, key, value, rule, rope))

    families = {type(module).__module__: module for module in modules}
    with ExitStack() as hooked:
        hooked.enter_context(call_before(modules, keep))
        for name, module in families.items():
            if hasattr(sys.modules[name], INTERFACE):
                hooked.callback(hook_attention_functions(module, see))
        base(input_ids=tokens[None].to(loaded.device), use_cache=False, **media)
    if len(seen) < len(styles):
        outside = "outside of transformers' attention interface, whose queries cannot be seen"
        raise Unsupported(f"model: {type(loaded.model).__name__} has attentions {outside}")


def windows_of(inputs: Inputs) -> list[Int[Tensor, " tokens"]]:
    """The first disjoint windows of `task.context` tokens, at most `task.windows`."""
    task: CaptureConfig = inputs.config.task
    cut = cut_windows(inputs.tokens.streams, task.context, None, task.windows, inputs.bos)
    return [window.tokens for window in cut]


def capture_windows(inputs: Inputs, visit: Callable[[LayerStates], None]) -> int:
    """`capture` each window of `windows_of`; returns how many there are."""
    windows = windows_of(inputs)
    for tokens in windows:
        capture(inputs.model, tokens, visit)
    return len(windows)


def check_capture(inputs: Inputs, method: Method, needed: Sequence[Capability] = ()) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method with policies."""
    method.check_needs(f"task={inputs.config.task.name}", "codecs_alone", "all_at_once", *needed)
    if any(isinstance(codec, HeadsCodec) for at in method.by_layer for codec in (at.key, at.value)):
        raise Unsupported("method.bits_by_layer: bits of single heads, whose stages have no common states")
    inputs.check_context()


def block_of(side: ResidualSide, codec: Codec) -> int | None:
    """Tokens per block, under `sliding` whole groups of the codec's; None: all tokens, as in a prefill of one block."""
    if side.prefill_block is PrefillBlock.whole or (side.policy is Policy.none and not side.size):
        return None
    group = (codec.token_group or 1) if side.policy is Policy.sliding else 1
    return max(side.size // group, 1) * group
