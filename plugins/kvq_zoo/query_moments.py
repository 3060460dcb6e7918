"""Transforms and grids fitted to second moments of the queries that read a cache."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.calibrated import Calibrated, Moments, States, Tables
from kvq.codecs.quantizers import Parts
from kvq.codecs.rotations import per_head
from kvq.codecs.second_moments import metric_basis
from kvq.codecs.stages import Side, Stage
from kvq.codecs.uniform import UniformQuantizer
from kvq.errors import Unsupported, at_least, require


class QueryTransform(Calibrated, Stage):
    """`(x - mean) C^(1/2) V` of each head, C the second moments of the queries that read it, before a vector quantizer.

    V are the eigenvectors of C^(1/2) S C^(1/2), S the covariance of the keys, so that squared error after the stage is
    the squared error of the scores. Components are dealt to groups of `group` neighbours in turn, by eigenvalue, so
    that each group spans the spectrum.

    Args:
        group: channels that the quantizer takes together.

    Tables: `mean` `[heads, 1, dim]`, `forward` and `inverse` `[heads, dim, dim]`, in fp32.

    Source: NOVA-KV (arXiv 2608.04074), as its released calibration has it (fit_vq_codebook.py).
    """

    version: ClassVar[int] = 1
    token_group = 1
    wants_moments = True

    def __init__(self, group: int = 4) -> None:
        at_least("group", group, 1)
        self.group = group

    def fit(self, x: States, gradients: States | None, seed: int, *, moments: Moments) -> Tables:  # type: ignore[override]
        """Fit the tables to a layer's keys `[heads, tokens, dim]` and the second moments of its queries."""
        wide = x.double()
        mean = wide.mean(-2, keepdim=True)
        found = []
        for rows, metric in zip(wide - mean, moments.double(), strict=True):
            spectrum, forward, inverse = metric_basis(rows.mT @ rows / len(rows), metric)
            deviation = spectrum.sqrt().masked_fill(spectrum == 0, 1)
            found.append((forward * deviation, inverse / deviation[:, None]))
        groups = -(-x.shape[-1] // self.group)
        dealt = torch.arange(x.shape[-1]).split(groups)
        order = torch.cat([torch.stack([row[place] for row in dealt if place < len(row)]) for place in range(groups)])
        forward, inverse = (torch.stack(part) for part in zip(*found, strict=True))
        return {"mean": mean.float(), "forward": forward[..., order].float(), "inverse": inverse[:, order].float()}

    def forward(self, x: Float[Tensor, "*lead heads tokens dim"]) -> tuple[Tensor, Side]:
        """x less `mean`, times the table `forward` of its head; nothing is stored."""
        return per_head(x - self.table("mean", x), self.table("forward", x)), {}

    def inverse(self, y: Float[Tensor, "*lead heads tokens dim"], side: Side) -> Tensor:
        """y times the table `inverse` of its head, plus `mean`."""
        return per_head(y, self.table("inverse", y)) + self.table("mean", y)


class SubspaceQuantizer(Calibrated, UniformQuantizer):
    """Rounds channels in groups, first to last, and moves the later ones against the error that queries would see.

    With Q the queries of a KV head, `rows` of them, Q̂ᵀQ̂ the `rank` largest eigenpairs of QᵀQ, and A = I + `weight`
    Q̂ᵀQ̂: after a group s is rounded with error e (decoded less given), the channels r after it become
    k_r - A_rr⁻¹ A_rs e, which minimizes |k̂ - k|² + `weight` |Q̂ (k̂ - k)|² over k_r. Codes are those of the grid, and
    decoding is.

    Args:
        bits, group_size: of the grid per channel, asymmetric, with a float zero point.
        channels: of a group; None: half of the head dim.
        rank, weight, rows: as above. Queries of a calibration stand for those of a prompt: their moment is QᵀQ / rows.

    Table: `carry` `[heads, dim, dim]` in fp32: rows of a group take its error to the channels after it.

    Raises:
        ConfigError: a number out of range.
        Unsupported: fewer than 2 channels.

    Source: SQuat (arXiv 2503.24358) and its released `new_pack.py`.
    """

    version: ClassVar[int] = 1
    wants_moments = True
    attended_as = None  # type: ignore[assignment]

    def __init__(
        self,
        bits: int,
        group_size: int | None = 32,
        channels: int | None = None,
        rank: int = 60,
        weight: float = 1e-3,
        rows: int = 8192,
    ) -> None:
        super().__init__(bits, "per_channel", group_size)
        for name, number in (("channels", channels), ("rank", rank), ("rows", rows)):
            at_least(name, 1 if number is None else number, 1)
        require(weight > 0, "weight", weight, "above 0")
        self.channels, self.rank, self.weight, self.rows = channels, rank, weight, rows

    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: one channel, or another number than that of the calibration."""
        require(head_dim >= 2, "head_dim", head_dim, "no channel behind the first ones", Unsupported)
        super().check(head_dim)

    def _ends(self, dim: int) -> list[int]:
        """The channel at which each group ends, but for the last group, after which no channel is corrected."""
        size = self.channels or -(-dim // 2)
        return list(range(size, dim, size))

    def fit(self, x: States, gradients: States | None, seed: int, moments: Moments | None = None) -> Tables:
        """`carry` `[heads, dim, dim]` from the second moments of the queries; the states are not used."""
        assert moments is not None
        dim = moments.shape[-1]
        energies, vectors = torch.linalg.eigh((moments.double() + moments.double().mT) / 2)
        kept = energies[..., -self.rank :].clamp(min=0).unsqueeze(-2) * vectors[..., -self.rank :]
        metric = torch.eye(dim, dtype=torch.float64) + self.weight * self.rows * kept @ vectors[..., -self.rank :].mT
        carry = torch.zeros_like(metric)
        start = 0
        for end in self._ends(dim):
            moved = torch.linalg.solve(metric[:, end:, end:], metric[:, end:, start:end])
            carry[:, start:end, end:] = -moved.mT
            start = end
        return {"carry": carry.float()}

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes and statistics of the grid per channel, of x with each group's error carried to later channels."""
        moved, carry, start = x.clone(), self.table("carry", x), 0
        for end in self._ends(x.shape[-1]):
            own = moved[..., start:end]
            error = self.decode(super().encode(own, dtype), own.shape, x.dtype) - own
            moved[..., end:] += per_head(error, carry[:, start:end, end:])
            start = end
        return super().encode(moved, dtype)
