"""The name of the weights of a model in memory."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from kvq.errors import Unsupported

_SAMPLED = 1024  # entries of each weight that enter its name


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
