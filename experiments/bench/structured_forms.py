"""Predicted loss of transforms with few multiplications: `python -m experiments.bench.structured_forms smollm2_135m`.

Moments of keys with values of every layer on the calibration text (minutes; `table_forms.moments_of_text`), then for
each structure of the decoder its rows B, the encoder that loses least with them (`best_encoder`), bits by one water
level over all layers, and the second-order loss: (1/2) sum of λ D, plus what lies outside of the rows that have bits.
Multiplications are those of decoding an element at 8 heads of 128 channels, with the share of rows that have bits here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.bench.table_forms import LARGER, moments_of_text
from kvq.codecs import TrellisQuantizer
from kvq.codecs.second_moments import best_encoder, metric_basis

Square = Float[Tensor, "n n"]
ERRORS = torch.tensor(TrellisQuantizer(bits=2, memory=8, widths="pooled").errors, dtype=torch.float64)
RIDGE = 0.01


def joint_rows(covariance: Square, metric: Square, blocks: int) -> Square:
    """Rows of the transform of all channels, the one that waterfill_kv has."""
    return metric_basis(covariance, metric)[2]


def rows_apart(covariance: Square, metric: Square, blocks: int) -> Square:
    """Rows of a transform for each head of keys and of values."""
    parts = [slice(start, start + len(metric) // blocks) for start in range(0, len(metric), len(metric) // blocks)]
    return torch.block_diag(*(metric_basis(covariance[at, at], metric[at, at])[2] for at in parts))


def kronecker_rows(covariance: Square, metric: Square, blocks: int) -> Square:
    """Rows A ⊗ B, A over heads and sides and B over channels, of the nearest Kronecker products of both matrices."""
    ridge = 1e-6 * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=covariance.dtype)
    outer, inner = zip(_factors(covariance + ridge, blocks), _factors(metric, blocks), strict=True)
    return torch.kron(metric_basis(*outer)[2], metric_basis(*inner)[2])


def _factors(matrix: Square, blocks: int, rounds: int = 15) -> tuple[Tensor, Tensor]:
    """A and B of the normal distribution with covariance A ⊗ B that is nearest in likelihood, by alternation."""
    size = len(matrix) // blocks
    outer, parts = torch.eye(blocks, dtype=matrix.dtype), matrix.view(blocks, size, blocks, size)
    for _ in range(rounds):
        inner = torch.einsum("iajb,ij->ab", parts, torch.linalg.inv(outer)) / blocks
        outer = torch.einsum("iajb,ab->ij", parts, torch.linalg.inv(inner)) / size
    return outer, inner


def ranks_across(covariance: Square, metric: Square, blocks: int) -> Square:
    """Rows of heads apart, then a transform of the components of equal rank of all heads."""
    rows, size = rows_apart(covariance, metric, blocks), len(metric) // blocks
    covariance, metric = _in_components(rows, covariance, metric)
    mixing = torch.eye(len(metric), dtype=metric.dtype)
    for rank in range(size):
        at = torch.arange(blocks) * size + rank
        mixing[at[:, None], at] = metric_basis(covariance[at][:, at], metric[at][:, at])[2]
    return mixing @ rows


def pair_rotations(covariance: Square, metric: Square, blocks: int, stages: int) -> Square:
    """Rows of heads apart, then `stages` times a 2 x 2 transform of the pairs that gain most, each component in one."""
    rows = rows_apart(covariance, metric, blocks)
    covariance, metric = _in_components(rows, covariance, metric)
    for _ in range(stages):
        stage = torch.eye(len(metric), dtype=metric.dtype)
        for pair in _best_pairs(covariance, metric):
            at = torch.tensor(pair)
            stage[at[:, None], at] = metric_basis(covariance[at][:, at], metric[at][:, at])[2]
        covariance, metric = _in_components(stage, covariance, metric)
        rows = stage @ rows
    return rows


def _in_components(rows: Square, covariance: Square, metric: Square) -> tuple[Square, Square]:
    forward = torch.linalg.inv(rows)
    return forward.mT @ covariance @ forward, rows @ metric @ rows.mT


def _best_pairs(covariance: Square, metric: Square) -> list[tuple[int, int]]:
    """Disjoint pairs, greedily by how much a transform of two components lowers the product of their costs."""
    sizes, costs = covariance.diagonal(), metric.diagonal()
    products = (sizes[:, None] * sizes - covariance**2) * (costs[:, None] * costs - metric**2)
    both = sizes * costs
    gain = torch.log(both[:, None] * both / products.clamp_min(torch.finfo(products.dtype).tiny)).triu(1)
    order = gain.flatten().topk(min(40 * len(gain), gain.numel() // 2)).indices.tolist()
    taken: set[int] = set()
    found = []
    for pair in (divmod(place, len(gain)) for place in order):
        if taken.isdisjoint(pair):
            taken.update(pair)
            found.append(pair)
    return found


def share_bits(costs: list[Tensor], bits: float) -> list[Int[Tensor, " n"]]:
    """Bits of each component of each layer: the next bit goes where it saves most."""
    flat = torch.cat(costs)
    saved = torch.stack([flat * (here - after) / 2 for here, after in pairwise(ERRORS)])
    level = saved.flatten().topk(round(bits * len(flat))).values[-1]
    return [*(saved >= level).sum(0).split([len(own) for own in costs])]


def predict(layers: list[tuple[Square, Square]], rows: list[Square], bits: float) -> tuple[float, float]:
    """Second-order loss over all layers in nats per token, and the share of rows that have bits."""
    first = [_costs(pair, own) for pair, own in zip(layers, rows, strict=True)]
    kept = [own[widths > 0] for own, widths in zip(rows, share_bits(first, bits), strict=True)]
    encoders, costs = [], []
    for (covariance, metric), own in zip(layers, kept, strict=True):
        forward, _, cost = best_encoder(own, metric, covariance)
        encoders.append(forward)
        costs.append(torch.nn.functional.pad(cost, (0, len(metric) - len(own))))
    loss = 0.0
    for cost, width in zip(costs, share_bits(costs, bits), strict=True):
        loss += float((cost * ERRORS[width]).sum() / 2)
    for (covariance, metric), own, forward in zip(layers, kept, encoders, strict=True):
        left = torch.eye(len(metric), dtype=metric.dtype) - forward @ own
        loss += float((covariance @ left @ metric * left).sum() / 2)
    return loss, sum(map(len, kept)) / sum(map(len, rows))


def _costs(pair: tuple[Square, Square], rows: Square) -> Float[Tensor, " n"]:
    covariance, metric = _in_components(rows, *pair)
    return covariance.diagonal() * metric.diagonal()


def main(model: str) -> None:
    """Print a line of a Markdown table for each structure."""
    moments = list(moments_of_text(model).values())
    eye = torch.eye(len(moments[0].mean), dtype=torch.float64)
    layers = [(one.covariance, one.fisher + RIDGE * one.fisher.diagonal().mean() * eye) for one in moments]
    blocks, (_, heads, dim) = moments[0].heads, LARGER
    forms: dict[str, tuple[Callable[[Square, Square, int], Square], float, float]] = {
        "keys with values, all heads": (joint_rows, 2 * heads * dim, 0),
        "heads apart": (rows_apart, dim, 0),
        "Kronecker product of heads and channels": (kronecker_rows, dim, 2 * heads),
        "heads apart, then across equal ranks": (ranks_across, dim, 2 * heads),
    }
    forms |= {
        f"heads apart, then {stages} stages of pairs": (partial(pair_rotations, stages=stages), dim, 2 * stages)
        for stages in (4, 8, 16, 32)
    }
    print("| decoder | 1.25 bits | multiplications | 2.25 bits | multiplications |\n|---|---:|---:|---:|---:|")
    for name, (make, wide, more) in forms.items():
        rows = [make(*pair, blocks) for pair in layers]
        found = [predict(layers, rows, bits) for bits in (1.25, 2.25)]
        cells = [f"{loss:.4f} | {used * wide + more:.0f}" for loss, used in found]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
