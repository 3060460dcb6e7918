"""Drawn states of known distributions, and the attention weights of queries that know nothing of each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.config.diagnostics import Drawn

_STREAM = 3_141_592_653  # rotations, sketches and starts have small seeds: no state is drawn from the same generator
_DRAWS = 1000


@dataclass(frozen=True)
class Known:
    """States of one place (a draw, a layer) and what attends to them.

    `ranking`: the weights of the query that may rank tokens; `held_out`: those of others, each summing to 1 over the
    tokens; `queries`: what keys are multiplied with.
    """

    key: Float[Tensor, "1 heads tokens dim"]
    value: Float[Tensor, "1 heads tokens dim"]
    ranking: Float[Tensor, "1 heads tokens"]
    held_out: Float[Tensor, "1 heads tokens"]
    queries: Float[Tensor, "1 heads queries dim"]


def stream(seed: int, draw: int, part: int = 0) -> torch.Generator:
    """The generator of one part of a draw."""
    return torch.Generator().manual_seed(_STREAM + (seed * _DRAWS + draw) * 8 + part)


def walk(
    kind: Drawn,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    drift: float = 0.0,
    jumps: Collection[int] = (),
) -> Float[Tensor, "1 heads tokens dim"]:
    """States of `shape` `(heads, tokens, dim)`.

    A drifting token is the one before it plus `drift` times a Gaussian step, so that |k_t - k_(t-1)| begins at `drift`
    times |k|; the tokens `jumps` are drawn anew (kvquant-plus-plus, sections 2.2.9, 3.2 and 9.6).
    """
    heads, tokens, dim = shape
    steps = torch.randn(1, heads, tokens, dim, generator=generator)
    if kind is Drawn.sphere:
        return torch.nn.functional.normalize(steps, dim=-1)
    if kind is Drawn.gaussian:
        return steps
    starts = [0, *sorted(at for at in jumps if 0 < at < tokens), tokens]
    pieces = []
    for start, end in itertools.pairwise(starts):
        piece = steps[:, :, start:end].clone()
        piece[:, :, 1:] *= drift
        pieces.append(piece.cumsum(2))
    return torch.cat(pieces, 2)


def attended(
    query: Float[Tensor, "1 heads queries dim"], key: Float[Tensor, "1 heads tokens dim"], scaling: float | None = None
) -> Float[Tensor, "1 heads tokens"]:
    """Attention weights that each token gets from the queries of its head, which see all tokens, as a mean."""
    scale = 1 / math.sqrt(key.shape[-1]) if scaling is None else scaling
    return torch.softmax(query @ key.mT * scale, -1).mean(2)
