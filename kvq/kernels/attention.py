"""Decode attention on packed codes by the fastest implementation that fits; all agree up to rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.errors import Unsupported
from kvq.kernels import eager
from kvq.kernels.linear_chain import PackedStates

_WATCH: ContextVar[eager.Step | None] = ContextVar("_WATCH", default=None)
HAS_NUMBA, HAS_TRITON = (importlib.util.find_spec(name) is not None for name in ("numba", "triton"))


@contextmanager
def watched(step: eager.Step) -> Iterator[None]:
    """Within it attention runs in PyTorch, where a step can be told from the next: `step` is opened around each.

    It is opened around the whole too, as `attention`.
    """
    token = _WATCH.set(step)
    try:
        yield
    finally:
        _WATCH.reset(token)


def kernel_for(query: Tensor, keys: PackedStates, values: PackedStates, softcap: float | None = None) -> str:
    """`cpu` (numba) or `gpu` (Triton) where installed and able to read these keys and values, else `eager`."""
    if query.device.type == "cuda" and HAS_TRITON and query.dtype is not torch.float64:
        from kvq.kernels import gpu

        alike = keys.shape == values.shape  # one program reads both
        if alike and gpu.unfit(keys) is None and gpu.unfit(values) is None:
            return "gpu"
    if query.device.type == "cpu" and HAS_NUMBA and query.dtype is not torch.float64 and softcap is None:
        from kvq.kernels import cpu

        if cpu.unfit(keys) is None and cpu.unfit(values) is None:
            return "cpu"
    return "eager"


def attend(
    query: Float[Tensor, "batch heads 1 dim"],
    keys: PackedStates,
    values: PackedStates,
    scaling: float,
    first: int = 0,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads 1 _dim"]:
    """As `kvq.kernels.eager.attend`, by the implementation that `kernel_for` chooses; `first` counts sinks.

    Raises:
        Unsupported: as `eager.attend`; first tokens in full precision before packed prefixes of different lengths.
    """
    if keys.sinks or values.sinks:
        if (keys.sinks, keys.packed_tokens) != (values.sinks, values.packed_tokens):
            raise Unsupported("cache.attention=packed: first tokens in full precision need keys and values in step")
        hidden = min(first, keys.sinks)
        keys, values, first = keys.without_sinks(hidden), values.without_sinks(hidden), first - hidden
    if (step := _WATCH.get()) is not None:
        with step("attention"):
            return eager.attend(query, keys, values, scaling, first, softcap, step)
    kernel = kernel_for(query, keys, values, softcap)
    if kernel == "cpu":
        from kvq.kernels import cpu

        return cpu.attend(query, keys, values, scaling, first)
    if kernel == "gpu":
        from kvq.kernels import gpu

        return gpu.attend(query, keys, values, scaling, first, softcap)
    return eager.attend(query, keys, values, scaling, first, softcap)
