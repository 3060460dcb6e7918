"""The name of the weights of a model in memory, and weights rounded to few bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvq.errors import Unsupported

_SAMPLED = 1024  # entries of each weight that enter its name
_GROUP = 128  # input channels that share a scale and a zero point


def weights_name(model: nn.Module) -> str:
    """Name of the weights of a model in memory: a hash of all shapes and of the first entries of each, in bfloat16.

    Raises:
        Unsupported: weights that are nowhere, or wait where only their library finds them.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        first = _brought(model, name, weight).detach().flatten()[:_SAMPLED].to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(f"{name} {list(weight.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()


def _brought(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """A weight, from where accelerate lets it wait (offloaded to CPU or disk)."""
    if weight.device.type != "meta":
        return weight
    module, _, own = name.rpartition(".")
    waiting = getattr(getattr(model.get_submodule(module), "_hf_hook", None), "weights_map", None)
    if waiting is None:
        raise Unsupported(f"model: its weight {name} is not in memory, and names a calibration or saved cache")
    found: Tensor = waiting[own]
    return found


@contextmanager
def rounded_weights(model: Any, bits: int) -> Iterator[None]:
    """Round the linear layers of a model, but for the output embedding, while the context lasts.

    The same weights, bit for bit, come back after it; a second copy of them is held meanwhile. Entered after a rotation
    is merged into weights, it gives "merge, then quantize".

    Raises:
        Unsupported: weights that are quantized already, or that are not in memory.
    """
    output = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linear.items():
        if module.weight.device.type == "meta" or not module.weight.is_floating_point():
            raise Unsupported(f"model.round_weights={bits}: {name}.weight is quantized already or not in memory")
    weights = list({module.weight for module in linear.values() if module is not output})
    before = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.data.copy_(rounded(weight.data, bits))
        yield
    finally:
        for weight, own in zip(weights, before, strict=True):
            weight.data.copy_(own)


def rounded(weight: Float[Tensor, "out in"], bits: int) -> Float[Tensor, "out in"]:
    """A weight rounded to the nearest of 2^bits even steps between least and largest of 128 input channels of a row.

    Source: the round-to-nearest baseline of GPTQ (arXiv 2210.17323), section 5, at the group size of AWQ's checkpoints.
    """
    groups = []
    for group in weight.float().split(_GROUP, dim=1):
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
        groups.append(((group - low) / step).round() * step + low)
    return torch.cat(groups, 1).to(weight.dtype)
