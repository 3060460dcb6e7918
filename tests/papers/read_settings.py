"""What is read from a run's configuration, by the name that rows of `tests.papers.test_settings` have for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvq.config import Config

READ: dict[str, Callable[[Config], Any]] = {
    "task": lambda c: c.task.name,
    "dataset": lambda c: c.dataset.name,
    "text": lambda c: c.dataset.path,
    "model": lambda c: c.model.name,
    "weights": lambda c: c.model.path,
    "rounded": lambda c: c.model.round_weights,
    "bits": lambda c: c.parsed_bits.label if c.parsed_bits else None,
    "calibration": lambda c: (c.method.calibration.dataset, c.method.calibration.samples, c.method.calibration.length),
    "calibration text": lambda c: c.method.calibration.dataset,
    "residual": lambda c: {getattr(c.effective_residual, side).size for side in _sides(c)},
    "policy": lambda c: {getattr(c.effective_residual, side).policy.value for side in _sides(c)},
    "groups": lambda c: tuple(_quantizer(c, side).get("group_size") for side in _sides(c)),
    "outliers": lambda c: {_quantizer(c, side)["outliers"] for side in _sides(c)},
    "anchors": lambda c: {tuple(_quantizer(c, s)[f"anchor_{n}"] for n in ("every", "threshold")) for s in _sides(c)},
    "rank": lambda c: {_quantizer(c, side)["rank"] for side in _sides(c)},
    "qnorm": lambda c: {_quantizer(c, side)["qnorm"] for side in _sides(c)},
    "clip": lambda c: {_quantizer(c, side)["clip"] for side in _sides(c)},
    "coupled": lambda c: {(_quantizer(c, side)["channels"], _quantizer(c, side)["code_bits"]) for side in _sides(c)},
    "sink_tokens": lambda c: c.method.sink_tokens,
    "kept": lambda c: (c.method.kept_keys.texts, c.method.kept_keys.layers),
    "parts": lambda c: (
        *(_quantizer(c, "key")[name] for name in ("axis", "symmetric")),
        c.method.key["stages"].get("norm") is not None,
    ),
    "first_stage": lambda c: c.method.key["order"][0],
    "attention": lambda c: c.cache.attention.value,
    "budget": lambda c: c.method.eviction["budget"],
    "model.context": lambda c: c.model.context,
    **{
        name: (lambda c, name=name: getattr(c.task, name))
        for name in (
            *("windows", "context", "stride", "scoring", "prompt", "max_windows", "prefill", "tasks", "subsets"),
            *("buckets", "limit", "max_length", "chat_template", "num_fewshot", "generation", "repeats", "benchmark"),
            *("states", "tokens", "head_dim", "drift", "jumps", "against", "against_bits", "layers", "held_out"),
            *("mode", "planted", "lengths", "depths", "batches", "contexts", "new_tokens", "chunk", "regimes"),
            *("vectors", "vector_windows", "decode_steps", "channel_ranges", "bos", "max_new_tokens"),
        )
    },
}


def _sides(config: Config) -> list[str]:
    return [side for side in ("key", "value") if getattr(config.method, side) is not None]


def _quantizer(config: Config, side: str) -> dict[str, Any]:
    return getattr(config.method, side)["quantizer"]
