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
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from kvq.cache import KVCache
from kvq.cache.hooks import layer_number
from kvq.codecs import Codec, UniformQuantizer
from kvq.config import PplConfig
from kvq.errors import DataError
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.layers import head_dims_of, window_of
from kvq.models.load import LoadedModel
from kvq.results.statistics import delta_nll_of_samples
from kvq.tasks.ppl import Writer
from kvq.tasks.scoring import PplResult, Window, divergence, log_probabilities, parallel_method, score, without_codecs
from kvq_engines.formats import Engine, format_for, open_engine
from kvq_engines.llamacpp import LlamaCpp
from kvq_engines.onnxruntime import AttentionFunction, replace_attention


def engine_log_probs(engine: Engine, window: Window) -> Float[Tensor, "targets vocab"]:
    """The engine's log-probabilities of a window's targets."""
    parts, start = [], 0
    for logits in engine.logits(window.tokens[:-1]):
        parts.append(log_probabilities(logits[max(window.scored_from - 1 - start, 0) :]))
        start += logits.shape[0]
    return torch.cat(parts)


Q8_0 = UniformQuantizer(8, "per_token", 32, symmetric=True, reciprocal=True)
"""ggml's 8-bit blocks of 32 channels as its vector kernels round them, halves to the even code."""

States = tuple[Float[Tensor, "heads tokens dim"], Float[Tensor, "heads tokens dim"]]
"""Keys and values of a layer."""


def undo_stages(codec: Codec, y: Float[Tensor, "*lead tokens dim"]) -> Float[Tensor, "*lead tokens dim"]:
    """Undo the stages of a codec, last first; they only reorder, rotate or scale channels."""
    for _, stage in reversed(codec.stages):
        y = stage.inverse(y, {})
    return y


def engine_attention(
    model: nn.Module, key: Codec | None, stored: Sequence[States] | None = None
) -> contextlib.AbstractContextManager[None]:
    """A context in which every attention of a model reads keys, values and queries as an engine does.

    Args:
        key: codec of the keys, whose stages precede the rounding of queries to 8 bits; None: queries as they are.
        stored: keys and values of each layer, in the place of the model's; None: the model's.

    Raises:
        Unsupported: attention that does not go through transformers' attention interface.
    """
    rounding = None if key is None else key.with_stages(key.stages, Q8_0)

    def replace_states(attention: AttentionFunction) -> AttentionFunction:
        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if stored is not None:
                key, value = (side[None].to(query) for side in stored[layer_number(module, kwargs)])
            if rounding is not None:
                query = rounding.decode(rounding.encode(query))
            return attention(module, query, key, value, *args, **kwargs)

        return attend

    return replace_attention(model, replace_states)


@contextlib.contextmanager
def rounding_error(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Within the context, token embeddings have relative Gaussian noise of one unit in the last place of fp32."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        noise = torch.randn(out.shape, generator=generator).to(out.device)
        return out * (1 + torch.finfo(torch.float32).eps * noise).to(out.dtype)

    handle = model.get_input_embeddings().register_forward_hook(nudge)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()


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
    """Mean over the tokens of all windows."""
    return float(torch.cat(parts).double().mean())


def _correlation(first: list[Tensor], second: list[Tensor]) -> float:
    """Pearson's correlation over tokens; 0 where one of the two is constant."""
    pair = torch.stack([torch.cat(first), torch.cat(second)]).double()
    found = torch.corrcoef(pair)[0, 1]
    return float(torch.nan_to_num(found))


def add_window(
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
    preset = torch_log_probs(loaded, method, window)
    nll = -preset.gather(1, window.tokens[window.scored_from :, None]).double().sum()
    into.rows.append({"window": len(into.rows), "tokens": window.targets, "nll": float(nll)})
    into.add("between", engine, preset)
    if full is None:
        return
    whole = without_codecs(method)
    reference = torch_log_probs(loaded, whole, window)
    into.add("engine", full, engine)
    into.add("preset", reference, preset)
    with rounding_error(loaded.model):
        into.add("itself", preset, torch_log_probs(loaded, method, window))
    own = method.for_model(loaded.text_config)
    key = own.key if rounds else None
    if key is not None:
        with engine_attention(loaded.model, key):
            rounded = torch_log_probs(loaded, method, window)
        into.add("rounded", engine, rounded)
        into.add("rounded_preset", reference, rounded)
    if stored is not None:
        states = []
        for layer, (keys, values) in enumerate(stored):
            key_codec, value_codec = (own.codec(side, layer, len(stored)) for side in ("key", "value"))
            assert key_codec is not None
            assert value_codec is not None
            states.append((undo_stages(key_codec, keys), undo_stages(value_codec, values)))
        with engine_attention(loaded.model, key, states):
            into.add("stored", engine, torch_log_probs(loaded, whole, window))


def torch_log_probs(loaded: LoadedModel, method: Method, window: Window) -> Float[Tensor, "targets vocab"]:
    """PyTorch's log-probabilities of a window's targets, all tokens quantized at once from the model's own dtype."""
    own = replace(loaded, cache_dtype=None) if method.key or method.value else loaded
    cache = KVCache(own, parallel_method(method))
    tokens = window.tokens[None].to(loaded.device)
    chunks = score(loaded, cache, tokens, window.scored_from, [(0, tokens.shape[1] - 1)])
    return torch.cat([log_probabilities(chunk.logits)[0].cpu() for chunk in chunks])


def run_engine(
    inputs: Inputs, method: Method, windows: Sequence[Window], result: PplResult, writer: Writer | None = None
) -> tuple[Agreement, str]:
    """Score every window in the engine; the agreement with the preset, and the engine's build.

    Args:
        result: receives the scores, and divergences from the engine's full precision.
        writer: stores the engine's log-probabilities.

    Raises:
        ConfigError, DataError, Unsupported: as the engines.
    """
    task = inputs.config.task
    loaded, agreement = inputs.model, Agreement()
    config = loaded.text_config
    found = format_for(inputs, method)
    full = format_for(inputs, without_codecs(method))
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(open_engine(inputs, found))
        if engine.vocab != config.vocab_size:
            given = f"task.engine.file={task.engine.file}: {engine.vocab} tokens"
            raise DataError(f"{given}; model={inputs.config.model.name} has {config.vocab_size}")
        reference = None if method.is_full_precision else stack.enter_context(open_engine(inputs, full))
        rounds = isinstance(engine, LlamaCpp)
        # llama.cpp keeps layers with windows in a second cache, whose states are not read.
        two_caches = rounds and any(window_of(config, layer) for layer in range(config.num_hidden_layers))
        for index, window in enumerate(tqdm(windows, desc=method.label, unit="window", leave=False, disable=None)):
            own = engine_log_probs(engine, window)
            expected = None if reference is None else engine_log_probs(reference, window)
            against = None if expected is None else expected[None]
            result.add([index], window.tokens[None, window.scored_from :], own[None], against)
            result.settle([index])
            result.storage = result.storage or storage_of_engine(engine, window)
            if not math.isfinite(result.scores[index].nll):
                raise DataError(f"window {index}: the engine's log-probabilities are not finite")
            if writer is not None:
                writer(index, window.scored_from, own)
            if task.engine.compare:
                whole = None in (method.key, method.value)
                shape = config.num_hidden_layers, config.num_key_value_heads, head_dims_of(config)[0]
                cached = None if whole or two_caches else engine.cached(*shape)
                add_window(agreement, loaded, method, window, own, expected, rounds, cached)
        return agreement, engine.build


def storage_of_engine(engine: Engine, window: Window) -> dict[str, float]:
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
