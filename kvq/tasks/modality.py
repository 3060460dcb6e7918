"""Token-norm imbalance by modality: do image tokens and text tokens, which share scales, differ in norm."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvq.diagnostics.norms import imbalance, relative_norms, token_norms
from kvq.models.media import MODALITIES, MediaModel, modalities
from kvq.tasks.capture import Layer, capture

SIDES = ("query", "key", "value")


def norms_by_modality(loaded: MediaModel, tokens: Int[Tensor, " tokens"]) -> list[dict[str, Any]]:
    """One row per layer, side and modality, and one for all tokens (`modality` all).

    Rows have the means over heads of `variation`, `max_over_min` and `median_over_min` (`task=tni`'s) among the tokens
    of that modality, and `relative`: their median norm over the median of all tokens.

    Raises:
        Unsupported, DataError: as `capture`.
    """
    labels = modalities(loaded.model.config, tokens)
    rows: list[dict[str, Any]] = []

    def visit(layer: Layer) -> None:
        for side in SIDES:
            norms = token_norms(getattr(layer, side))
            relative = relative_norms(norms)[0]
            for name in ("all", *MODALITIES):
                kept = torch.ones_like(labels, dtype=torch.bool) if name == "all" else labels == MODALITIES.index(name)
                if not bool(kept.any()):
                    continue
                kept = kept.to(norms.device)
                spread = {key: float(value.mean()) for key, value in vars(imbalance(norms[:, :, kept])).items()}
                place = {"layer": layer.index, "side": side, "modality": name, "tokens": int(kept.sum())}
                rows.append(place | spread | {"relative": float(relative[kept].median())})

    try:
        capture(loaded, tokens, visit, **loaded.media_of(tokens[None].to(loaded.device)))
    finally:
        loaded.forget()
    return rows
