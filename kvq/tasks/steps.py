"""What `task=latency` looks into: seconds by step, and regimes in which a decoded token reads a packed past.

The review of OScaR asks what norms cost while a prompt is read (limitation 7): `task.prefill_steps=true` reads the
clock around each step of the codecs in PyTorch, as `cache.attention=dense` encodes, so the whole takes a little longer.
It asks too what its scale vector, a norm per token, costs while tokens are decoded (weakness 4).
`task.decode_steps=true` has two answers, because a fused kernel has no steps:

- attention in PyTorch (`kvq.kernels.eager`) with the clock read around each step, whatever kernel the run itself uses;
- in that kernel, the method and the same method without its token norms, in turn, as pairs.

nsn (Sato 2026) times its dequantization in three regimes: head by head in a Python loop, a layer at once, and compiled.
kvq adds two that its users can choose (`task.regimes`): keep the decoded past, and attend to codes without decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.cache import KVCache
from kvq.codecs import Codec, Packed, Rope, TokenNorm
from kvq.codecs.quantizers import Parts
from kvq.config.diagnostics import Regime
from kvq.errors import Unsupported
from kvq.kernels import watched
from kvq.methods.method import Method
from kvq.models import LoadedModel


class PerHeadCodec(Codec):
    """Decodes each head of each sequence on its own, in a Python loop."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer

    @override
    def decode(self, packed: Packed, rope: Rope | None = None) -> Float[Tensor, "batch heads tokens head_dim"]:
        decode = super().decode
        sequences = []
        for b in range(packed.batch):
            heads = [decode(_head(packed, b, h), rope) for h in range(packed.heads)]
            sequences.append(torch.cat(heads, 1))
        return torch.cat(sequences)


def _head(packed: Packed, b: int, h: int) -> Packed:
    parts = {name: part[b : b + 1, min(h, part.shape[1] - 1)][:, None] for name, part in packed.parts.items()}
    return dataclasses.replace(packed, parts=parts, batch=1, heads=1)


class CompiledCodec(Codec):
    """Decodes a layer at once, by `torch.compile`; the first call compiles."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer
        self._decode: Callable[..., Tensor] = torch.compile(super().decode_block, dynamic=True)

    @override
    def decode_block(
        self, parts: Parts, shape: torch.Size, dtype: torch.dtype, rope: Rope | None = None
    ) -> Float[Tensor, "*lead heads tokens head_dim"]:
        try:
            return self._decode(parts, shape, dtype, rope)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise Unsupported(f"task.regimes: compiled: torch.compile cannot, {reason}") from error


CODECS: dict[Regime, type[PerHeadCodec | CompiledCodec]] = {
    Regime.per_head: PerHeadCodec,
    Regime.compiled: CompiledCodec,
}


def check_regimes(method: Method, regimes: list[Regime]) -> None:
    """Raise `Unsupported`, in one line, for a method with more than two codecs and a residual."""
    for name in ("backend", "plan", "eviction", "first_layers", "by_layer", "is_calibrated"):
        if regimes and getattr(method, name):
            raise Unsupported(
                f"task.regimes: method={method.name} ({name}) has no past that can be decoded in each way"
            )
    if Regime.packed in regimes and not method.is_full_precision:
        method.check_packed()


def cache_maker(regime: Regime, loaded: LoadedModel, method: Method) -> Callable[[], Any]:
    """A function that makes an empty cache of `regime`."""
    wrap = CODECS.get(regime)
    if wrap is not None:
        key, value = (None if codec is None else wrap(codec) for codec in (method.key, method.value))
        method = dataclasses.replace(method, key=key, value=value)
    kept, attention = regime is Regime.kept, "packed" if regime is Regime.packed else "dense"
    return lambda: KVCache(loaded, method, keep_decoded=kept, attention=attention)


PREFILL, DECODE = "watched", "watched_decode"
"""Names of the watched prefill and decoding among the subjects of a cell."""
PLAIN = "without_norms"
"""Name of the method without token norms among the subjects of a cell."""
NORMS = "norms"
_WHOLE = "attention"


class Clock:
    """Seconds by step, summed over layers, and over blocks or tokens.

    Of a prefill `key.hadamard`, `value.quantizer`, and all token norms as `norms`.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._now = now

    @contextmanager
    def __call__(self, *steps: str) -> Iterator[None]:
        start = self._now()
        yield
        took = self._now() - start
        for step in steps:
            self.seconds[step] += took

    def put_around(self, method: Method) -> None:
        """Replace the encoding steps of a method's codecs, which no other cache may share, by watched ones."""
        for side in ("key", "value"):
            codec = getattr(method, side)
            for name, stage in () if codec is None else codec.stages:
                kinds = (f"{side}.{name}", *([NORMS] if isinstance(stage, TokenNorm) else []))
                stage.forward = self._around(stage.forward, kinds)
            if codec is not None:
                codec.quantizer.encode = self._around(codec.quantizer.encode, (f"{side}.quantizer",))

    def _around(self, call: Callable[..., Any], steps: tuple[str, ...]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            with self(*steps):
                return call(*given, **named)

        return timed


def next_token(loaded: LoadedModel, tokens: Tensor, cache: Any) -> Tensor:
    """The likeliest token after `tokens`, which the cache takes: `[batch, 1]`."""
    return loaded.logits(loaded.hidden_states(tokens, cache)[:, -1:]).argmax(-1)


def check_steps(method: Method, packed: bool) -> None:
    """Raise `Unsupported` for a method whose steps are not those of two codecs."""
    if packed:
        raise Unsupported("task.prefill_steps: packed attention encodes in one pass; use cache.attention=dense")
    check_two_codecs(method, "task.prefill_steps", "encodes by")


def check_two_codecs(method: Method, setting: str, does: str) -> None:
    """Raise `Unsupported` in the name of a setting for a method that `does` something by more than two codecs."""
    for name in ("backend", "plan", "eviction", "first_layers", "by_layer", "gqa", "is_calibrated"):
        if getattr(method, name):
            raise Unsupported(f"{setting}: method={method.name} ({name}) {does} more than two codecs")


def check_decode_steps(method: Method, packed: bool) -> None:
    """Raise `Unsupported` for attention that does not read codes, or codes of more than two codecs."""
    if not packed:
        raise Unsupported("task.decode_steps: the steps of attention on codes; use cache.attention=packed")
    check_two_codecs(method, "task.decode_steps", "has codes of")


def without_norms(method: Method) -> Method | None:
    """The method without the token norms of its codecs; None: it has none."""
    sides = method.key, method.value
    if not any(isinstance(stage, TokenNorm) for codec in sides if codec is not None for _, stage in codec.stages):
        return None
    key, value = map(_plain, sides)
    return dataclasses.replace(method, key=key, value=value)


def _plain(codec: Codec | None) -> Codec | None:
    return codec and codec.rebuilt((name, stage) for name, stage in codec.stages if not isinstance(stage, TokenNorm))


def watched_prefill(loaded: LoadedModel, method: Method, prompt: Tensor, now: Callable[[], float]) -> dict[str, Any]:
    """Seconds of a prefill and of its steps; `method` is built for this alone."""
    clock = Clock(now)
    clock.put_around(method)
    cache = KVCache(loaded, method)
    start = now()
    next_token(loaded, prompt, cache)
    return {"prefill_seconds": now() - start, "steps": dict(clock.seconds)}


def watched_decode(
    loaded: LoadedModel, method: Method, prompt: Tensor, new_tokens: int, now: Callable[[], float]
) -> dict[str, Any]:
    """Seconds of decoding `new_tokens` after the prompt and of the steps of its attention, both per token."""
    cache = KVCache(loaded, method, attention="packed")
    token = next_token(loaded, prompt, cache)
    clock, start = Clock(now), now()
    with watched(clock):
        for _ in range(new_tokens):
            token = next_token(loaded, token, cache)
    took = now() - start
    steps = {step: seconds / new_tokens for step, seconds in clock.seconds.items()}
    return {"step_seconds_mean": took / new_tokens, "steps": steps}


def step_metrics(cell: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over repeats: seconds of each step, and its share of the watched prefill."""
    here = [row for row in rows if row["subject"] == PREFILL and row["fits"]]
    return medians_by_step(cell, here, ("prefill", "prefill_share"), [row["prefill_seconds"] for row in here])


def medians_by_step(
    cell: str, rows: list[dict[str, Any]], names: tuple[str, str], wholes: Sequence[float], without: str | None = None
) -> dict[str, float]:
    """Medians over watched rows: seconds of each step, and its share of the row's whole.

    Args:
        cell: the end of the metrics' names.
        names: their beginnings, of seconds and of shares.
        wholes: seconds, one number for each row.
        without: the step that is the whole, which has no share.
    """
    metrics = {}
    for step in rows[0]["steps"] if rows else ():
        seconds = [row["steps"][step] for row in rows]
        shares = [part / whole for part, whole in zip(seconds, wholes, strict=True)]
        metrics[f"{names[0]}_{step}_{cell}"] = statistics.median(seconds)
        if step != without:
            metrics[f"{names[1]}_{step}_{cell}"] = statistics.median(shares)
    return metrics


def decode_metrics(cell: str, rows: list[dict[str, Any]], subject: str) -> dict[str, float]:
    """Medians over repeats: seconds of each step per token, its share of attention; the method over `without_norms`.

    Args:
        cell: the end of the metrics' names.
        rows: of the cell.
        subject: the name of the run's method among them.
    """
    here = [row for row in rows if row["subject"] == DECODE and row["fits"]]
    wholes = [row["steps"][_WHOLE] for row in here]
    metrics = medians_by_step(cell, here, ("decode_step", "decode_share"), wholes, without=_WHOLE)
    value = itemgetter("step_seconds_median")
    mine, plain = (
        {row["repeat"]: value(row) for row in rows if row["subject"] == name and row["fits"]}
        for name in (subject, PLAIN)
    )
    if plain and mine:
        metrics[f"decode_{PLAIN}_{cell}"] = statistics.median(plain.values())
        ratio = statistics.median(mine[repeat] / plain[repeat] for repeat in mine)
        metrics |= {f"decode_over_{PLAIN}_{cell}": ratio, f"overhead_norms_{cell}": 100 * (ratio - 1)}
    return metrics
