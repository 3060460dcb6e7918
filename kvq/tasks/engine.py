"""Perplexity from an engine's own logits (`task.engine`), and its preset's in PyTorch on the same windows.

The preset stores every token of a window at once, which is what an engine does one by one: its formats quantize each
token by itself. Two errors are told apart: that of the format, which the preset has too, and that of the engine's
arithmetic, which full precision shows (`agreement_kl` of the run with method=fp16) and, in llama.cpp on a CPU, queries
in 8 bits (`agreement_kl_q8`).

In a deep model a rounding error moves a few codes of a layer, each by a whole step, and these move more codes of the
next: two runs of one format diverge. How far is shown by the preset against itself, run again with errors of a unit in
the last place of its token embeddings (`preset_kl_self`). What is left without that is the difference of the engine to
PyTorch on the keys and values that the engine stored (`agreement_kl_stored`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.codecs import Codec
from kvq.config import PplConfig
from kvq.config.engine import EngineName
from kvq.config.residual import Policy
from kvq.engines.kld import LogitsWriter
from kvq.engines.llamacpp import LlamaCpp, write_gguf
from kvq.engines.mlx import Mlx
from kvq.errors import DataError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.inputs import Inputs
from kvq.models.layers import head_dims_of
from kvq.results.statistics import delta_nll_of_samples
from kvq.tasks.capture import States, engine_attention, rounding_error, unstaged
from kvq.tasks.scoring import log_probabilities, parallel_method, score, without_codecs
from kvq.tasks.windows import PplResult, Window, divergence

LLAMACPP_TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Format:
    """What an engine stores of keys and of values.

    `types`: ggml's of keys and values, or MLX's bits and group size (None: full precision). `rotated`: llama.cpp's
    Hadamard rotation.
    """

    types: tuple[Any, ...]
    rotated: bool = True


def format_of(method: Method, engine: EngineName, full: str) -> Format:
    """The format of an engine that a method is the preset of.

    Args:
        full: torch's name of the dtype in which a side without a codec is kept.

    Raises:
        Unsupported: a method that the engine has no cache for.
    """
    method.check_needs(f"task.engine={engine}", "codecs_alone", "same_stages", "one_width", "all_layers", "all_tokens")
    codecs = [(side, codec) for side in ("key", "value") if (codec := getattr(method, side)) is not None]
    for side, _ in codecs:
        if (kept := getattr(method.residual, side)).policy is not Policy.sliding or kept.size:
            raise Unsupported(
                f"task.engine={engine}: quantizes each token as it comes; residual.{side}: sliding, size 0"
            )
    return _mlx(method, codecs) if engine is EngineName.mlx else _llamacpp(method, codecs, _DTYPES[full])


def _llamacpp(method: Method, codecs: list[tuple[str, Codec]], full: str) -> Format:
    types = {"key": full, "value": full}
    rotations = set()
    for side, codec in codecs:
        given, names = method.settings[side]["quantizer"], [name for name, _ in codec.stages]
        known = {name: settings[side] for name, settings in _presets().items()}
        found = [name for name, one in known.items() if one["quantizer"] == given]
        if not found or names not in (["pairs", "hadamard"], ["pairs"], ["hadamard"], []):
            raise Unsupported(
                f"task.engine=llamacpp: no type of its cache is {method.name}'s {side}; a preset engine/llamacpp_*"
            )
        types[side] = found[0]
        rotations.add("hadamard" in names)
        if "hadamard" in names and method.settings[side]["stages"]["hadamard"] != known[found[0]]["stages"]["hadamard"]:
            raise Unsupported(f"task.engine=llamacpp: the engine rotates {side}s otherwise than {method.name}")
    if len(rotations) > 1:
        raise Unsupported("task.engine=llamacpp: rotates keys and values, or neither")
    return Format((types["key"], types["value"]), all(rotations))


@functools.cache
def _presets() -> dict[str, Mapping[str, Any]]:
    """The settings of a preset of each type."""
    return {name: build_method(f"engine/llamacpp_{name}", head_dim=64).settings for name in LLAMACPP_TYPES}


def _mlx(method: Method, codecs: list[tuple[str, Codec]]) -> Format:
    if not codecs:
        return Format((None, 64))
    sides = [method.settings[side] for side, _ in codecs]
    wanted = {"zero_point": "edge", "axis": "per_token"}
    found = sides[0]["quantizer"]
    alike = len(sides) == 2 and sides[0] == sides[1] and not sides[0]["stages"]
    if not alike or any(found.get(name) != value for name, value in wanted.items()):
        raise Unsupported(f"task.engine=mlx: stores keys and values alike, as engine/mlx_*; not {method.name}")
    return Format((found["bits"], found["group_size"]))


@contextlib.contextmanager
def opened(inputs: Inputs, found: Format) -> Iterator[LlamaCpp | Mlx]:
    """The engine of a run with the model in it; a GGUF file that was written of the weights is deleted afterwards."""
    task: PplConfig = inputs.config.task
    settings = task.engine
    if settings.name is EngineName.mlx:
        with Mlx(inputs.model.model, task.context, *found.types) as engine:
            yield engine
        return
    with tempfile.TemporaryDirectory(prefix="kvq-gguf-") as folder:
        if (file := settings.path) is None:
            file = Path(folder) / "model.gguf"
            write_gguf(inputs.model.model, file, getattr(torch, settings.weights.value))
        with LlamaCpp(
            file,
            task.context,
            *found.types,
            rotated=found.rotated,
            flash_attention=settings.flash_attention,
            threads=torch.get_num_threads(),
        ) as llamacpp:
            yield llamacpp


def scored(engine: LlamaCpp | Mlx, window: Window) -> Float[Tensor, "targets vocab"]:
    """The engine's log-probabilities of a window's targets."""
    parts, start = [], 0
    for logits in engine.logits(window.tokens[:-1]):
        parts.append(log_probabilities(logits[max(window.scored_from - 1 - start, 0) :]))
        start += logits.shape[0]
    return torch.cat(parts)


_MEANS = {
    "preset": "preset_kl",
    "rounded": "agreement_kl_q8",
    "stored": "agreement_kl_stored",
    "itself": "preset_kl_self",
}
"""Divergences whose mean is a metric, besides `between`, which is always there."""


@dataclass
class Agreement:
    """Sums and divergences of the preset and of the engine; rows of windows, divergences of their tokens by name."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, one: Tensor, other: Tensor) -> None:
        """Add the divergences between two sets of log-probabilities of a window."""
        self.parts[name].append(divergence(one, other))

    def metrics(self, samples: Sequence[dict[str, Any]], task: PplConfig) -> dict[str, float]:
        """Loss of the preset, its difference from the engine's with a standard error, divergences and correlations."""
        out = {"preset_nll": sum(row["nll"] for row in self.rows) / sum(row["tokens"] for row in self.rows)}
        out |= delta_nll_of_samples(self.rows, samples, **vars(task.bootstrap)).metrics("preset_off")
        out["agreement_kl"] = _mean(self.parts["between"])
        for part, name in _MEANS.items():
            if self.parts[part]:
                out[name] = _mean(self.parts[part])
        for part, name in (("preset", "agreement_correlation"), ("rounded_preset", "agreement_correlation_q8")):
            if self.parts[part]:
                out[name] = _correlation(self.parts["engine"], self.parts[part])
        return out


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean())


def _correlation(first: list[Tensor], second: list[Tensor]) -> float:
    """Pearson's correlation over tokens; 0 where one of the two is constant."""
    pair = torch.stack([torch.cat(first), torch.cat(second)]).double()
    found = torch.corrcoef(pair)[0, 1]
    return float(torch.nan_to_num(found))


def compare(
    into: Agreement,
    loaded: LoadedModel,
    method: Method,
    window: Window,
    engine: Float[Tensor, "targets vocab"],
    full: Float[Tensor, "targets vocab"] | None,
    rounds: bool,
    stored: Sequence[States] | None,
) -> None:
    """Add a window to an agreement.

    Args:
        engine: the engine's log-probabilities under the method.
        full: those of the engine in full precision; None: the method is that.
        rounds: the engine multiplies quantized keys by queries in 8 bits.
        stored: its keys and values of each layer, after the stages of their codecs; None: a side is not quantized.
    """
    preset = in_torch(loaded, method, window)
    nll = -preset.gather(1, window.tokens[window.scored_from :, None]).double().sum()
    into.rows.append({"window": len(into.rows), "tokens": window.targets, "nll": float(nll)})
    into.add("between", engine, preset)
    if full is None:
        return
    whole = without_codecs(method)
    reference = in_torch(loaded, whole, window)
    into.add("engine", full, engine)
    into.add("preset", reference, preset)
    with rounding_error(loaded.model):
        into.add("itself", preset, in_torch(loaded, method, window))
    own = method.in_order_of(loaded.text_config)
    key = own.key if rounds else None
    if key is not None:
        with engine_attention(loaded.model, key):
            rounded = in_torch(loaded, method, window)
        into.add("rounded", engine, rounded)
        into.add("rounded_preset", reference, rounded)
    if stored is not None and own.key is not None and own.value is not None:
        states = [(unstaged(own.key, keys), unstaged(own.value, values)) for keys, values in stored]
        with engine_attention(loaded.model, key, states):
            into.add("stored", engine, in_torch(loaded, whole, window))


def in_torch(loaded: LoadedModel, method: Method, window: Window) -> Float[Tensor, "targets vocab"]:
    """PyTorch's log-probabilities of a window's targets, all tokens quantized at once from the model's own dtype."""
    own = replace(loaded, cache_dtype=None) if method.key or method.value else loaded
    cache = KVCache(own, parallel_method(method))
    tokens = window.tokens[None].to(loaded.device)
    chunks = score(loaded, cache, tokens, window.scored_from, [(0, tokens.shape[1] - 1)])
    return torch.cat([log_probabilities(chunk.logits)[0].cpu() for chunk in chunks])


def check(inputs: Inputs, method: Method) -> Format:
    """The format of a run's method in its engine. Raises: Unsupported: as `format_of`."""
    stored = inputs.config.cache_dtype or inputs.config.model.dtype
    return format_of(method, inputs.config.task.engine.name, stored.value)


def run_engine(
    inputs: Inputs, method: Method, windows: Sequence[Window], result: PplResult, writer: LogitsWriter | None = None
) -> tuple[Agreement, str]:
    """Score every window in the engine; the agreement with the preset, and the engine's build.

    Args:
        result: receives the scores, and divergences from the engine's full precision.
        writer: stores the engine's log-probabilities.

    Raises:
        ConfigError, DataError, Unsupported: as the engines.
    """
    task: PplConfig = inputs.config.task
    loaded, agreement = inputs.model, Agreement()
    config = loaded.text_config
    found = check(inputs, method)
    full = check(inputs, without_codecs(method))
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(opened(inputs, found))
        if engine.vocab != config.vocab_size:
            given = f"task.engine.file={task.engine.file}: {engine.vocab} tokens"
            raise DataError(f"{given}; model={inputs.config.model.name} has {config.vocab_size}")
        reference = None if method.is_full_precision else stack.enter_context(opened(inputs, full))
        rounds = isinstance(engine, LlamaCpp)
        for index, window in enumerate(tqdm(windows, desc=method.label, unit="window", leave=False, disable=None)):
            own = scored(engine, window)
            expected = None if reference is None else scored(reference, window)
            against = None if expected is None else expected[None]
            result.add([index], window.tokens[None, window.scored_from :], own[None], against)
            result.storage = result.storage or stored(engine, window)
            if not math.isfinite(result.scores[index].nll):
                raise DataError(f"window {index}: the engine's log-probabilities are not finite")
            if writer is not None:
                writer.write(index, window.scored_from, own)
            if task.engine.compare:
                whole = None in (method.key, method.value)
                shape = config.num_hidden_layers, config.num_key_value_heads, head_dims_of(config)[0]
                cached = None if whole else engine.cached(*shape)
                compare(agreement, loaded, method, window, own, expected, rounds, cached)
        return agreement, engine.build


def stored(engine: LlamaCpp | Mlx, window: Window) -> dict[str, float]:
    """What the engine's cache holds after a window: bits of keys, of values, of both, and bytes of the sequence."""
    key, value = engine.side_bits("key"), engine.side_bits("value")
    mean = (key + value) / 2
    return {
        "bits_per_element": mean,
        "key_bits": key,
        "value_bits": value,
        "effective_bits": mean,
        "total_bytes": float(engine.state_bytes),
        "cached_tokens": float(window.tokens.numel() - 1),
    }
