"""Projections around an attention: which channels of which matrix hold the heads of queries, keys, values, outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_APART = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
_OUTPUTS = ("o_proj", "out_proj")
_JOINED = {"c_attn": "c_proj", "Wqkv": "out_proj", "query_key_value": "dense"}
"""Queries, keys and values from one matrix, and what reads the outputs."""
_BY_HEAD = "query_key_value"
"""Holds the query, key and value of a head side by side; the others hold all queries first, then keys, then values."""


@dataclass(frozen=True)
class Heads:
    """Channels of a matrix, head after head; None: all of them.

    `written`: they are what the matrix writes, else what it reads.
    """

    matrix: nn.Module
    written: bool
    channels: Int[Tensor, " channels"] | None = None

    def turn(self, rotation: Float[Tensor, "dim dim"]) -> None:
        """Every head's channels become those times the rotation, in double precision."""
        weight: Tensor = self.matrix.weight.data  # type: ignore[assignment]
        transposed = isinstance(self.matrix, Conv1D)  # of a linear layer
        last = weight.T if self.written != transposed else weight
        self._turn(last, rotation)
        bias = getattr(self.matrix, "bias", None)
        if self.written and bias is not None:
            self._turn(bias.data[None], rotation)

    def _turn(self, rows: Float[Tensor, "rows channels"], rotation: Float[Tensor, "dim dim"]) -> None:
        chosen = slice(None) if self.channels is None else self.channels.to(rows.device)
        heads = rows[:, chosen].double().unflatten(1, (-1, rotation.shape[0]))
        rows[:, chosen] = (heads @ rotation.to(rows.device)).flatten(1).to(rows.dtype)


def projections(attention: nn.Module, head_dim: int) -> Mapping[str, Heads]:
    """The heads of `query`, `key`, `value` and `output` of an attention, those that are in plain matrices.

    Quantized weights are no plain matrices.
    """
    found = {name: Heads(part, True) for name, child in _APART.items() if (part := _plain(attention, child))}
    if found:
        outputs = [part for child in _OUTPUTS if (part := _plain(attention, child))]
        return found | ({"output": Heads(outputs[0], False)} if outputs else {})
    for child, reader in _JOINED.items():
        joined, output = _plain(attention, child), _plain(attention, reader)
        if joined is None or output is None or isinstance(joined, Conv1D) != (child == "c_attn"):
            continue
        size, width = _written(joined), _written(output)
        if size != 3 * width or width % head_dim:
            continue
        places = torch.arange(size)
        by_head = child == _BY_HEAD
        parts = places.view(-1, 3, head_dim).unbind(1) if by_head else places.view(3, -1).unbind(0)
        heads = (Heads(joined, True, part.flatten()) for part in parts)
        return dict(zip(_APART, heads, strict=True)) | {"output": Heads(output, False)}
    return {}


def _plain(attention: nn.Module, name: str) -> nn.Module | None:
    """A matrix of floating-point numbers."""
    part = getattr(attention, name, None)
    return part if isinstance(part, nn.Linear | Conv1D) and part.weight.is_floating_point() else None


def _written(matrix: nn.Module) -> int:
    """How many channels a matrix writes."""
    weight: Tensor = matrix.weight  # type: ignore[assignment]
    return weight.shape[1] if isinstance(matrix, Conv1D) else weight.shape[0]
