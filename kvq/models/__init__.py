"""Models: loading, fingerprints, function-preserving outlier implants, the embedded tiny model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq.models.load import LoadedModel, load_model, load_tokenizer, model_fingerprint, shape_of
    from kvq.models.weights import implant_outliers

__all__ = ["LoadedModel", "implant_outliers", "load_model", "load_tokenizer", "model_fingerprint", "shape_of"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them: `kvq.models.folder` does not."""
    if name not in __all__:
        raise AttributeError(f"module 'kvq.models' has no attribute '{name}'")
    home = "weights" if name == "implant_outliers" else "load"
    return getattr(importlib.import_module(f"kvq.models.{home}"), name)
