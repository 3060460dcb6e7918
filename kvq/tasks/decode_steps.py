"""Seconds of attention on codes by step, while tokens are decoded: `task=latency task.decode_steps=true`.

The review of OScaR asks what its scale vector, a norm per token, costs (weakness 4). Two answers, because a fused
kernel has no steps:

- attention in PyTorch (`kvq.kernels.eager`) with the clock read around each step, whatever kernel the run itself uses;
- in that kernel, the method and the same method without its token norms, in turn, as pairs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from torch import Tensor

from kvq.cache import KVCache
from kvq.codecs import Codec, TokenNorm
from kvq.errors import Unsupported
from kvq.kernels import watched
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.tasks.prefill_steps import check_two_codecs, medians_by_step

WATCHED = "watched_decode"
"""Name of the watched decoding among the subjects of a cell."""
PLAIN = "without_norms"
"""Name of the method without token norms among the subjects of a cell."""
_WHOLE = "attention"


class Clock:
    """Seconds by step, summed over layers and tokens."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._now = now

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[step] += self._now() - start


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


def watched_decode(
    loaded: LoadedModel, method: Method, prompt: Tensor, new_tokens: int, now: Callable[[], float]
) -> dict[str, Any]:
    """Seconds of decoding `new_tokens` behind the prompt and of the steps of its attention, both per token."""
    cache = KVCache(loaded, method, attention="packed")
    token = loaded.logits(loaded.hidden_states(prompt, cache)[:, -1:]).argmax(-1)
    clock, start = Clock(now), now()
    with watched(clock):
        for _ in range(new_tokens):
            token = loaded.logits(loaded.hidden_states(token, cache)).argmax(-1)
    took = now() - start
    steps = {step: seconds / new_tokens for step, seconds in clock.seconds.items()}
    return {"step_seconds_mean": took / new_tokens, "steps": steps}


def decode_metrics(cell: str, rows: list[dict[str, Any]], subject: str) -> tuple[dict[str, float], dict[str, str]]:
    """Medians over repeats: seconds of each step per token, its share of attention; the method over `without_norms`.

    Args:
        cell: the end of the metrics' names.
        rows: of the cell.
        subject: the name of the run's method among them.
    """
    here = [row for row in rows if row["subject"] == WATCHED and row["fits"]]
    wholes = [row["steps"][_WHOLE] for row in here]
    metrics, units = medians_by_step(cell, here, ("decode_step", "decode_share"), wholes, without=_WHOLE)
    value = itemgetter("step_seconds_median")
    mine, plain = (
        {row["repeat"]: value(row) for row in rows if row["subject"] == name and row["fits"]}
        for name in (subject, PLAIN)
    )
    if plain and mine:
        metrics[f"decode_{PLAIN}_{cell}"], units[f"decode_{PLAIN}_{cell}"] = statistics.median(plain.values()), "s"
        ratio = statistics.median(mine[repeat] / plain[repeat] for repeat in mine)
        metrics[f"decode_over_{PLAIN}_{cell}"], units[f"decode_over_{PLAIN}_{cell}"] = ratio, "x"
        metrics[f"overhead_norms_{cell}"], units[f"overhead_norms_{cell}"] = 100 * (ratio - 1), "%"
    return metrics, units
