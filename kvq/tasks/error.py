"""`task=error`: errors of a method's keys, values and attention outputs, stage by stage.

All tokens of a window are quantized, in the blocks of the method's residual; none stays in full precision.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.codecs import Codec
from kvq.config.diagnostics import Arms, ErrorConfig
from kvq.diagnostics.fidelity import (
    Arm,
    arms,
    attention_errors,
    before_rope,
    cosine,
    reconstruct,
    relative_mse,
    relative_mse_by_position,
)
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.capture import Layer, block_of, capture, check, fingerprint, windows_of
from kvq.tasks.measurement import Baseline, Measurement, Task, units_like

QUANTITIES = ("rel_mse", "cosine", "weight_kl", "output_error")
_UNITS = {"*_weight_kl": "nats/query", "windows": "windows", "context": "tokens"}


@dataclass(frozen=True)
class Case:
    """What is quantized (`key`, `value`, `both`), the stages used (`arm`; `both`: all), and before or after RoPE."""

    side: str
    arm: str
    rope: str
    complete: bool


@dataclass(frozen=True)
class Found:
    """A case with its decoded states; None: the original states."""

    case: Case
    key: Tensor | None
    value: Tensor | None


def bins_of(tokens: int, count: int) -> list[tuple[int, int]]:
    """`count` ranges of positions of equal length up to rounding, without empty ones."""
    edges = [tokens * index // count for index in range(count + 1)]
    return [(start, end) for start, end in itertools.pairwise(edges) if end > start]


class Errors:
    """Sums over windows: per case, layer and KV head, and per case, layer and bin of positions."""

    def __init__(self, method: Method, task: ErrorConfig) -> None:
        self.method, self.task = method, task
        self.bins = bins_of(task.context, task.bins)
        self._sums: dict[tuple[Case, int], Tensor] = {}
        self._positions: dict[tuple[Case, int], list[list[float]]] = defaultdict(list)
        self._windows: dict[int, int] = defaultdict(int)

    def add(self, layer: Layer) -> None:
        """Apply every case to one layer of one window."""
        found = [*self._side(layer, "key"), *self._side(layer, "value")]
        whole = {
            side: next((f for f in found if f.case.side == side and f.case.complete), None) for side in ("key", "value")
        }
        both = Found(
            Case("both", "complete", "after", True),
            whole["key"].key if whole["key"] else None,
            whole["value"].value if whole["value"] else None,
        )
        if found:
            found.append(both)
        attended = attention_errors(
            layer.attention, layer.query, layer.key, layer.value, [(each.key, each.value) for each in found]
        )
        shared = layer.query.shape[1] // layer.key.shape[1]
        for each, error in zip(found, attended, strict=True):
            kl, output = (part.unflatten(0, (-1, shared)).mean(1) for part in (error.weight_kl, error.output))
            errors = torch.zeros(4, layer.key.shape[1], dtype=torch.float64)
            errors[2], errors[3] = kl, output
            if each.case.side != "both":
                x = getattr(layer, each.case.side)
                x_hat = getattr(each, each.case.side)
                errors[0], errors[1] = relative_mse(x, x_hat), cosine(x, x_hat)
                if each.case.complete:
                    bins = relative_mse_by_position(x, x_hat, self.bins)
                    self._positions[each.case, layer.index].append(bins)
            name = (each.case, layer.index)
            self._sums[name] = self._sums[name] + errors if name in self._sums else errors
        self._windows[layer.index] += 1

    def _side(self, layer: Layer, side: str) -> list[Found]:
        codec: Codec | None = self.method.codec_of(side, layer.index)
        if codec is None:
            return []
        block = block_of(getattr(self.method.residual, side))
        x = getattr(layer, side)
        tried: list[tuple[Arm, Codec, str]] = [
            (arm, arm.codec, "after") for arm in arms(codec, self.task.arms is Arms.subsets)
        ]
        if side == "key" and layer.rope is not None:
            for arm, _, _ in list(tried):
                other = before_rope(arm.codec)
                if other is not None and not codec.uses_rope:
                    tried.append((arm, other, "before"))
        out = []
        for arm, chain, rope in tried:
            x_hat = reconstruct(chain, x, block, layer.rope)
            case = Case(side, arm.name, rope, arm.complete)
            out.append(Found(case, x_hat if side == "key" else None, x_hat if side == "value" else None))
        return out

    def samples(self) -> list[dict[str, Any]]:
        """One row per case, layer and head (`kind` error), and per complete case and layer (`kind` positions)."""
        rows: list[dict[str, Any]] = []
        for (case, layer), sums in self._sums.items():
            means = sums / self._windows[layer]
            for head in range(means.shape[1]):
                values = dict(zip(QUANTITIES, means[:, head].tolist(), strict=True))
                if case.side == "both":
                    del values["rel_mse"], values["cosine"]
                rows.append({"kind": "error", **vars(case), "layer": layer, "head": head, **values})
        for (case, layer), found in self._positions.items():
            means = torch.tensor(found, dtype=torch.float64).mean(0)
            rows.append(
                {"kind": "positions", **vars(case), "layer": layer, "bins": self.bins, "rel_mse": means.tolist()}
            )
        return rows


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors of `method` on the first windows; a full-precision method has none."""
    task: ErrorConfig = inputs.config.task
    errors = Errors(method, task)
    windows = windows_of(inputs)
    if not method.is_full_precision:
        for tokens in windows:
            capture(inputs.model, tokens, errors.add)
    rows = errors.samples()
    metrics = {"windows": float(len(windows)), "context": float(task.context)}
    for side in ("key", "value", "both"):
        chosen = [r for r in rows if (r["kind"], r["side"], r["complete"], r["rope"]) == ("error", side, True, "after")]
        for quantity in QUANTITIES:
            values = [row[quantity] for row in chosen if quantity in row]
            if values and (side, quantity) != ("value", "weight_kl"):
                metrics[f"{side}_{quantity}"] = sum(values) / len(values)
    return Measurement(metrics, units_like(metrics, _UNITS), rows)


TASK = Task(check, measure, fingerprint)
