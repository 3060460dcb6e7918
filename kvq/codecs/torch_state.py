"""Settings of torch that a caller may have changed, and that must not change what kvq computes.

Codecs, caches and calibrations compute in dtypes of their choice, on the device of the states, in full precision and
without gradients, whatever autocast, inference mode, default dtype, default device or precision of matrix products is
in force around them. Constants that are made meanwhile, and kept, are plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_PRODUCTS = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
_FULL = ("none", "ieee")


@contextmanager
def isolated(gradients: bool = False) -> Iterator[None]:
    """A context (or decorator) in which torch computes as in a new process, without gradients.

    Args:
        gradients: leave them on where they are. Inference mode, which has none, ends in any case.
    """
    probe = torch.empty(0)
    with ExitStack() as stack:
        if probe.is_inference():
            stack.enter_context(torch.inference_mode(False))  # switches gradients on
        if probe.is_inference() or not gradients:
            stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if probe.device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if probe.dtype != torch.float32:
            stack.callback(torch.set_default_dtype, probe.dtype)
            torch.set_default_dtype(torch.float32)
        for products in _PRODUCTS:
            if (precision := products.fp32_precision) not in _FULL:
                stack.callback(setattr, products, "fp32_precision", precision)
                products.fp32_precision = "ieee"
        yield
