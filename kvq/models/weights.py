"""The name of the weights of a model in memory."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLED = 1024  # entries of each weight that enter its name


def weights_name(model: nn.Module) -> str:
    """Name of the weights of a model in memory: a hash of all shapes and of the first entries of each, in bfloat16."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        first = weight.detach().flatten()[:_SAMPLED].to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(f"{name} {list(weight.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()
