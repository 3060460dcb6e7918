"""kvq: compare KV-cache quantizers on the papers' own protocols, with bits and bytes that are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq.cache import KVCache
    from kvq.calibration import bind_calibration
    from kvq.calibration.fit import calibrate_on_text as calibrate
    from kvq.methods.build import build_method
    from kvq.methods.method import Method, bind_kept_keys
    from kvq.methods.presets import method_for, quantize
    from kvq.report.tables.build import load_results

__version__ = "0.3.0"
__all__ = [
    "KVCache",
    "Method",
    "__version__",
    "bind_calibration",
    "bind_kept_keys",
    "build_method",
    "calibrate",
    "load_results",
    "method_for",
    "quantize",
]

_HOMES = {
    "KVCache": "kvq.cache",
    "Method": "kvq.methods.method",
    "bind_calibration": "kvq.calibration",
    "bind_kept_keys": "kvq.methods.method",
    "build_method": "kvq.methods.build",
    "calibrate": "kvq.calibration.fit:calibrate_on_text",
    "load_results": "kvq.report.tables.build",
    "method_for": "kvq.methods.presets",
    "quantize": "kvq.methods.presets",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'kvq' has no attribute '{name}'")
    module, _, other = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), other or name)
