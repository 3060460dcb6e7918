"""Seconds of a prefill by step of the codecs: `task=latency task.prefill_steps=true`.

The review of OScaR asks what norms cost while a prompt is read (limitation 7). The steps are those of the codecs in
PyTorch, as `cache.attention=dense` encodes. The clock is read around each, so the whole takes a little longer.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvq.cache import KVCache
from kvq.codecs import TokenNorm
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models import LoadedModel

WATCHED = "watched"
"""Name of the watched prefill among the subjects of a cell."""
NORMS = "norms"


class Watch:
    """Seconds by step, summed over layers and blocks: `key.hadamard`, `value.quantizer`; all token norms as `norms`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._now = now

    def put_around(self, method: Method) -> None:
        """Replace the encoding steps of a method's codecs, which no other cache may share, by watched ones."""
        for side in ("key", "value"):
            codec = getattr(method, side)
            for name, stage in () if codec is None else codec.stages:
                kinds = (f"{side}.{name}", *([NORMS] if isinstance(stage, TokenNorm) else []))
                stage.forward = self._around(stage.forward, kinds)
            if codec is not None:
                codec.quantizer.encode = self._around(codec.quantizer.encode, (f"{side}.quantizer",))

    def _around(self, call: Callable[..., Any], kinds: tuple[str, ...]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*given: Any, **named: Any) -> Any:
            start = self._now()
            out = call(*given, **named)
            took = self._now() - start
            for kind in kinds:
                self.seconds[kind] += took
            return out

        return watched


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


def watched_prefill(loaded: LoadedModel, method: Method, prompt: Tensor, now: Callable[[], float]) -> dict[str, Any]:
    """Seconds of a prefill and of its steps; `method` is built for this alone."""
    watch = Watch(now)
    watch.put_around(method)
    cache = KVCache(loaded, method)
    start = now()
    loaded.logits(loaded.hidden_states(prompt, cache)[:, -1:]).argmax(-1)
    return {"prefill_seconds": now() - start, "steps": dict(watch.seconds)}


def step_metrics(cell: str, rows: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Medians over repeats: seconds of each step, and its share of the watched prefill."""
    here = [row for row in rows if row["subject"] == WATCHED and row["fits"]]
    return medians_by_step(cell, here, ("prefill", "prefill_share"), [row["prefill_seconds"] for row in here])


def medians_by_step(
    cell: str, rows: list[dict[str, Any]], names: tuple[str, str], wholes: Sequence[float], without: str | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """Medians over watched rows, and their units: seconds of each step, and its share of the row's whole.

    Args:
        cell: the end of the metrics' names.
        names: their beginnings, of seconds and of shares.
        wholes: seconds, one number for each row.
        without: the step that is the whole, which has no share.
    """
    metrics, units = {}, {}
    for step in rows[0]["steps"] if rows else ():
        seconds = [row["steps"][step] for row in rows]
        shares = [part / whole for part, whole in zip(seconds, wholes, strict=True)]
        for name, values, unit in zip(names, (seconds, shares), ("s", "fraction"), strict=True):
            if unit == "s" or step != without:
                metrics[f"{name}_{step}_{cell}"] = statistics.median(values)
                units[f"{name}_{step}_{cell}"] = unit
    return metrics, units
