"""Parts of `task=latency`: seconds of each step, and different ways in which a decoded token reads packed tokens.

The review of OScaR asks what norms cost while a prompt is read (limitation 7): `task.prefill_steps=true` reads the
clock around each step of the codecs, as `cache.attention=dense` encodes. It asks too what its norm per token costs
while tokens are decoded (weakness 4): `task.decode_steps=true` times the steps of attention in PyTorch, and in the
run's own kernel the method with and without its token norms, in pairs. nsn (Sato 2026) times its dequantization head
by head in a Python loop, a layer at once, and compiled; `task.regimes` has two more: kept decoded, and on codes.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.cache import KVCache
from kvq.codecs import Codec, Packed, Rope, TokenNorm
from kvq.codecs.quantizers import Parts
from kvq.config.diagnostics import Regime
from kvq.errors import Unsupported
from kvq.kernels import time_steps
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.results.provenance import now, timed

PREFILL, DECODE = "watched", "watched_decode"
"""Names of the watched prefill and decoding among the subjects of a cell."""
PLAIN = "without_norms"
"""Name of the method without token norms among the subjects of a cell."""
_WHOLE = "attention"
Step = Callable[..., AbstractContextManager[None]]
"""Opened around a step, by its names: it keeps the seconds."""
Row = dict[str, Any]
"""One repeat of a subject, as `kvq.tasks.speed.cell` gives it."""


class PerHeadCodec(Codec):
    """Decodes each head of each sequence on its own, in a Python loop."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer

    def decode(self, packed: Packed, rope: Rope | None = None) -> Float[Tensor, "batch heads tokens head_dim"]:
        decode = super().decode
        sequences = []
        for b in range(packed.batch):
            heads = []
            for h in range(packed.heads):  # parts may have one head for all
                own = {name: part[b : b + 1, [min(h, part.shape[1] - 1)]] for name, part in packed.parts.items()}
                heads.append(decode(dataclasses.replace(packed, parts=own, batch=1, heads=1), rope))
            sequences.append(torch.cat(heads, 1))
        return torch.cat(sequences)


class CompiledCodec(Codec):
    """Decodes a layer at once, by `torch.compile`; the first call compiles."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer
        self._decode: Callable[..., Tensor] = torch.compile(super().decode_block, dynamic=True)

    def decode_block(
        self, parts: Parts, shape: torch.Size, dtype: torch.dtype, rope: Rope | None = None
    ) -> Float[Tensor, "*lead heads tokens head_dim"]:
        try:
            return self._decode(parts, shape, dtype, rope)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise Unsupported(f"task.regimes: compiled: torch.compile cannot, {reason}") from error


def cache_maker(regime: Regime, loaded: LoadedModel, method: Method) -> Callable[[], Any]:
    """A function that makes an empty cache of `regime`."""
    wrap = {Regime.per_head: PerHeadCodec, Regime.compiled: CompiledCodec}.get(regime)
    if wrap is not None:
        key, value = (None if codec is None else wrap(codec) for codec in (method.key, method.value))
        method = dataclasses.replace(method, key=key, value=value)
    kept, attention = regime is Regime.kept, "packed" if regime is Regime.packed else "dense"
    return lambda: KVCache(loaded, method, keep_decoded=kept, attention=attention)


def watch_codecs(method: Method, step: Step) -> None:
    """Watch the encoding steps of a method's codecs, which no other cache may share; all token norms as `norms`."""

    def around(call: Callable[..., Any], *names: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def watching(*given: Any, **named: Any) -> Any:
            with step(*names):
                return call(*given, **named)

        return watching

    for side in ("key", "value"):
        if (codec := getattr(method, side)) is not None:
            for name, stage in codec.stages:
                kinds = ["norms"] if isinstance(stage, TokenNorm) else []
                stage.forward = around(stage.forward, f"{side}.{name}", *kinds)
            codec.quantizer.encode = around(codec.quantizer.encode, f"{side}.quantizer")


def next_token(loaded: LoadedModel, tokens: Tensor, cache: Any) -> Tensor:
    """The likeliest token after `tokens`, which the cache takes: `[batch, 1]`."""
    return loaded.logits(loaded.hidden_states(tokens, cache)[:, -1:]).argmax(-1)


def decode(loaded: LoadedModel, cache: Any, token: Tensor, count: int) -> list[float]:
    """Decode `count` tokens greedily after `token` `[batch, 1]`; the seconds that each takes."""
    took = []
    for _ in range(count):
        start = now(loaded.device)
        token = next_token(loaded, token, cache)
        took.append(now(loaded.device) - start)
    return took


def without_norms(method: Method) -> Method | None:
    """The method without the token norms of its codecs; None: it has none."""
    codecs, found = {side: codec for side in ("key", "value") if (codec := getattr(method, side))}, {}
    for side, codec in codecs.items():
        kept = [(name, stage) for name, stage in codec.stages if not isinstance(stage, TokenNorm)]
        if len(kept) < len(codec.stages):
            found[side] = codec.with_stages(kept)
    return dataclasses.replace(method, **found) if found else None


def watched_prefill(loaded: LoadedModel, method: Method, prompt: Tensor) -> dict[str, Any]:
    """Seconds of a prefill and of its steps, summed over layers and blocks; `method` serves nothing else."""
    seconds, steps = dict[str, float](), dict[str, float]()
    watch_codecs(method, functools.partial(timed, steps, device=loaded.device))
    cache = KVCache(loaded, method)
    with timed(seconds, "prefill_seconds", device=loaded.device):
        next_token(loaded, prompt, cache)
    return {**seconds, "steps": steps}


def watched_decode(loaded: LoadedModel, method: Method, prompt: Tensor, new_tokens: int) -> dict[str, Any]:
    """Seconds of decoding `new_tokens` after the prompt and of the steps of its attention, both per token."""
    cache, steps = KVCache(loaded, method, attention="packed"), dict[str, float]()
    token = next_token(loaded, prompt, cache)
    with time_steps(functools.partial(timed, steps, device=loaded.device)):
        took = sum(decode(loaded, cache, token, new_tokens))
    each = {step: seconds / new_tokens for step, seconds in steps.items()}
    return {"step_seconds_mean": took / new_tokens, "steps": each}


def median_of(rows: list[Row], subject: str, value: Callable[[Row], float]) -> float:
    """The median over repeats of a subject."""
    return statistics.median(value(row) for row in rows if row["subject"] == subject)


def paired_ratio(rows: list[Row], value: Callable[[Row], float], subject: str, reference: str) -> float:
    """The median over repeats of subject / reference."""
    mine, pairs = ({row["repeat"]: value(row) for row in rows if row["subject"] == one} for one in (subject, reference))
    return statistics.median(mine[repeat] / pairs[repeat] for repeat in mine)


def step_metrics(cell: str, rows: list[Row], subject: str) -> dict[str, float]:
    """Medians of each watched step and its share of prefill or attention; the method over `without_norms`."""
    metrics: dict[str, float] = {}
    watched = ((PREFILL, "prefill", "prefill_share"), (DECODE, "decode_step", "decode_share"))
    for watched_subject, seconds, share in watched:
        here = [row for row in rows if row["subject"] == watched_subject and row["fits"]]
        for step in here[0]["steps"] if here else ():
            metrics[f"{seconds}_{step}_{cell}"] = statistics.median(row["steps"][step] for row in here)
            if step != _WHOLE:
                shares = (row["steps"][step] / row.get("prefill_seconds", row["steps"].get(_WHOLE)) for row in here)
                metrics[f"{share}_{step}_{cell}"] = statistics.median(shares)
    if any(row["subject"] == PLAIN and row["fits"] for row in rows):
        middle = itemgetter("step_seconds_median")
        metrics[f"decode_{PLAIN}_{cell}"] = median_of(rows, PLAIN, middle)
        ratio = paired_ratio(rows, middle, subject, PLAIN)
        metrics |= {f"decode_over_{PLAIN}_{cell}": ratio, f"overhead_norms_{cell}": 100 * (ratio - 1)}
    return metrics
