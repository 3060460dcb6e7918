"""`task=modality`: do image tokens and text tokens, which share scales, differ in norm.

Published claims under test: OScaR (arXiv 2605.19660), section 4.1 and Figures 19-21, on models that read images: norms
vary more than in models of text alone; they are smooth within a modality and differ between modalities; some tokens
have norms far above the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.config.diagnostics import ModalityConfig
from kvq.diagnostics.norms import imbalance, over_median, relative_norms, token_norms
from kvq.errors import DataError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.load import load_processor
from kvq.models.media import MODALITIES, MediaModel, modalities
from kvq.results.journal import Journal
from kvq.tasks.capture import Layer, capture
from kvq.tasks.measurement import Baseline, Measurement, Task, units_like
from kvq.tasks.multimodal import fingerprint, make_items, with_media

SIDES = ("query", "key", "value")
ALL = "all"
_SPREADS = {"cv": "variation", "max_over_min": "max_over_min", "max_over_median": "max_over_median"}
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class ByModality:
    """Norm statistics of one prompt by layer, side and modality, and norms by position."""

    def __init__(self, labels: Int[Tensor, " tokens"]) -> None:
        self._labels = labels
        self.rows: list[dict[str, Any]] = []
        self._boxes: list[dict[str, Any]] = []

    def add(self, layer: Layer) -> None:
        """Take one layer."""
        for side in SIDES:
            norms, place = token_norms(getattr(layer, side)), {"layer": layer.index, "side": side}
            self.rows += [{"kind": "modality", **place, **row} for row in self._statistics(norms)]
            boxes = norms[0].quantile(torch.tensor(_QUANTILES, dtype=norms.dtype, device=norms.device), dim=0)
            self._boxes.append({"kind": "tokens", **place, "norms": boxes.cpu()})

    def boxes(self, count: int) -> list[dict[str, Any]]:
        """Rows of norms by position, of `count` layers that are evenly spread."""
        layers = sorted({row["layer"] for row in self._boxes})
        steps = torch.linspace(0, len(layers) - 1, min(count, len(layers))).long().tolist()
        chosen = {layers[step] for step in steps}
        found = [row for row in self._boxes if row["layer"] in chosen]
        return [row | {"spans": spans(self._labels), "norms": row["norms"].tolist()} for row in found]

    def _statistics(self, norms: Float[Tensor, "1 heads tokens"]) -> Iterable[dict[str, Any]]:
        relative = relative_norms(norms)[0]
        for name in (ALL, *MODALITIES):
            among = torch.ones_like(self._labels, dtype=torch.bool)
            if name != ALL:
                among = self._labels == MODALITIES.index(name)
            if not bool(among.any()):
                continue
            among = among.to(norms.device)
            part = norms[:, :, among]
            spread = {key: float(value.mean()) for key, value in vars(imbalance(part)).items()}
            highest = float(over_median(part).amax(-1).mean())
            middle = float(relative[among].median())
            yield {
                "modality": name,
                "tokens": int(among.sum()),
                **spread,
                "max_over_median": highest,
                "relative": middle,
            }


def spans(labels: Int[Tensor, " tokens"]) -> list[list[Any]]:
    """Runs of tokens of one modality, in order: `[name, tokens]` each."""
    values, counts = torch.unique_consecutive(labels, return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return [[MODALITIES[value], count] for value, count in pairs]


def norms_by_modality(loaded: MediaModel, tokens: Int[Tensor, " tokens"], layers: int = 0) -> list[dict[str, Any]]:
    """Rows of one prompt of `tokens`.

    `kind` modality: one per layer, side and modality, and one for all tokens (`modality` all), with the means over
    heads of `variation`, `max_over_min` and `median_over_min` (`task=tni`'s) and of `max_over_median` among the tokens
    of that modality, and `relative`: their median norm over the median of all tokens.
    `kind` tokens: one per side of `layers` layers evenly spread, with `norms` [5, tokens] (least, quartiles and
    largest of each token's norms over its heads) and `spans` of tokens of one modality.

    Raises:
        Unsupported, DataError: as `capture`.
    """
    found = ByModality(modalities(loaded.model.config, tokens))
    try:
        capture(loaded, tokens, found.add, **loaded.media_of(tokens[None].to(loaded.device)))
    finally:
        loaded.forget()
    return found.rows + found.boxes(layers)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Norms of every prompt by modality; by position too for the first prompt, in some layers."""
    task: ModalityConfig = inputs.config.task
    processor = load_processor(inputs.config.model)
    items = make_items(inputs, processor, 0)
    rows: list[dict[str, Any]] = []
    for index, (item,) in enumerate(items.batches):
        loaded, tokens = with_media(inputs.model, processor, item)
        found = norms_by_modality(loaded, tokens[0], 0 if index else task.layers)
        rows += [{"item": item.name, **row} for row in found]
    if not rows:
        reasons = next(iter(items.skipped.values()), "no items")
        raise DataError(f"task=modality: no prompt can be read: {reasons}")
    metrics = summary(rows)
    rows += [{"kind": "skipped", "item": name, "skipped": reason} for name, reason in items.skipped.items()]
    metrics |= {"items": float(len(items.batches)), "skipped_items": float(len(items.skipped))}
    return Measurement(metrics, units_like(metrics, {"*_tokens": "tokens", "*items": "items"}), rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over prompts and layers: spreads of norms by side, and by modality with its relative median."""
    out: dict[str, float] = {}
    found = [row for row in rows if row["kind"] == "modality"]
    for side in SIDES:
        for name in (ALL, *MODALITIES):
            part = [row for row in found if (row["side"], row["modality"]) == (side, name)]
            if not part:
                continue
            end = "" if name == ALL else f"[modality={name}]"
            for metric, key in (*_SPREADS.items(), *([] if name == ALL else [("relative", "relative")])):
                out[f"{side}_{metric}{end}"] = sum(row[key] for row in part) / len(part)
    first = found[0]["layer"]
    for name in MODALITIES[:2]:
        counts = [r["tokens"] for r in found if (r["side"], r["layer"], r["modality"]) == ("key", first, name)]
        out[f"{name}_tokens"] = float(sum(counts))
    return out


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method: norms are those of a model's states."""
    if not method.is_full_precision:
        raise Unsupported("task=modality: looks at queries, keys and values before any method; method=fp16")


TASK = Task(check, measure, fingerprint)
