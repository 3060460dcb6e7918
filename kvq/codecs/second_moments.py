"""Transforms and grids fitted to what noise costs: second moments of the queries or of the loss's gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs.calibrated import Calibrated, Moments, States, Tables
from kvq.codecs.quantizers import Axis, Parts, choice, to_stored
from kvq.codecs.rotations import per_block, per_head
from kvq.codecs.stages import Side, Stage
from kvq.codecs.uniform import UniformQuantizer
from kvq.errors import Unsupported, at_least, require

_LEAST = 1e-12  # of the largest eigenvalue: components below it have no variance


_NOTHING = 1e-30  # an eigenvalue of a metric that is 0


class Metric(enum.Enum):
    """What of the Fisher information F counts: `full`, `diagonal`, or `none`: only its mean (KLT of the states)."""

    full = "full"
    diagonal = "diagonal"
    none = "none"


@dataclass(frozen=True)
class JointMoments:
    """Second moments of the n channels of all KV heads of a token, in fp64.

    Attributes:
        mean, covariance: of the states. fisher: E[g gᵀ], g the gradient of the loss summed over a text, in nats, at a
            token's state, so that noise e costs (1/2) tr(F E[e eᵀ]) nats per token.
        heads: KV heads, head after head.
        tokens: how many were seen.
        fourth, fisher_fourth: E |x - mean|⁴ and E |g|⁴; None: not known; `ledoit_wolf` needs them.
    """

    mean: Float[Tensor, " n"]
    covariance: Float[Tensor, "n n"]
    fisher: Float[Tensor, "n n"]
    heads: int
    tokens: int
    fourth: float | None = None
    fisher_fourth: float | None = None


LEDOIT_WOLF = "ledoit_wolf"
"""In the place of a share: the one that the data say."""


def ledoit_wolf(second: Float[Tensor, "n n"], fourth: float, tokens: int) -> float:
    """The share of a matrix of second moments that is replaced by its mean diagonal, which minimizes squared error.

    min(1, E |x xᵀ - S|² / (tokens |S - μ I|²)), μ the mean of the diagonal. Exact for independent tokens; those of a
    text are correlated, S is then less certain than so many tokens make it, and the share is an underestimate.

    Args:
        second: S = E[x xᵀ], of states about their mean, or of gradients.
        fourth: E |x|⁴ of the same.

    Source: Ledoit and Wolf 2004, A well-conditioned estimator for large-dimensional covariance matrices.
    """
    away = float((second - second.diagonal().mean() * torch.eye(len(second), dtype=second.dtype)).square().sum())
    noise = max(fourth - float(second.square().sum()), 0.0) / tokens
    return min(noise / away, 1.0) if away > 0 and len(second) > 1 else 0.0


def _shrunk(second: Float[Tensor, "n n"], fourth: float | None, tokens: int) -> Float[Tensor, "n n"]:
    assert fourth is not None, "moments without a fourth"
    mean = second.diagonal().mean() * torch.eye(len(second), dtype=second.dtype)
    return torch.lerp(second, mean, ledoit_wolf(second, fourth, tokens))


def metric_basis(
    covariance: Float[Tensor, "n n"], metric: Float[Tensor, "n n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Eigenvalues λ of M^(1/2) S M^(1/2), descending, and the matrices to its components, of deviation 1, and back.

    M: what noise costs, S: the covariance of the states. Components that never vary decode to 0.
    """
    size, axes = torch.linalg.eigh((metric + metric.mT) / 2)
    size = size.clamp_min(max(_LEAST * float(size.max()), _NOTHING))
    root, back = ((axes * size**power) @ axes.mT for power in (0.5, -0.5))
    product = root @ covariance @ root
    spectrum, turn = torch.linalg.eigh((product + product.mT) / 2)
    spectrum, turn = spectrum.flip(0), turn.flip(1)
    least = _LEAST * max(float(spectrum.max()), torch.finfo(torch.float64).tiny / _LEAST)
    turn = turn * (spectrum > least)  # whatever bits are left for it
    spectrum = spectrum.clamp_min(least)
    deviation = spectrum.sqrt()
    return spectrum, root @ turn / deviation, deviation[:, None] * (turn.mT @ back)


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

    @override
    def fit(self, x: States, gradients: States | None, seed: int, *, moments: Moments) -> Tables:  # type: ignore[override]
        """The tables, from the states of a layer and the moments of its queries."""
        wide = x.double()
        mean = wide.mean(-2, keepdim=True)
        found = []
        for rows, metric in zip(wide - mean, moments.double(), strict=True):
            spectrum, forward, inverse = metric_basis(rows.mT @ rows / len(rows), metric)
            deviation = spectrum.sqrt()
            found.append((forward * deviation, inverse / deviation[:, None]))
        groups = -(-x.shape[-1] // self.group)
        dealt = torch.arange(x.shape[-1]).split(groups)
        order = torch.cat([torch.stack([row[place] for row in dealt if place < len(row)]) for place in range(groups)])
        forward, inverse = (torch.stack(part) for part in zip(*found, strict=True))
        return {"mean": mean.float(), "forward": forward[..., order].float(), "inverse": inverse[:, order].float()}

    @override
    def forward(self, x: Float[Tensor, "*lead heads tokens dim"]) -> tuple[Tensor, Side]:
        return per_head(x - self.table("mean", x), self.table("forward", x)), {}

    @override
    def inverse(self, y: Float[Tensor, "*lead heads tokens dim"], side: Side) -> Tensor:
        return per_head(y, self.table("inverse", y)) + self.table("mean", y)


class FisherTransform(Calibrated, Stage):
    """`(x - mean) T`, T = F^(1/2) U, of all heads of a token, scaled to deviations of 1.

    U and λ are the eigenvectors and eigenvalues of F^(1/2) S F^(1/2), S the covariance of the states and F the Fisher
    information of the loss at them. Noise of relative size d in component i costs λ_i d / 2 nats per token. Components
    come in the order of λ, descending, and those without bits are not computed.

    Args:
        metric: see `Metric`.
        heads_together: neighbouring KV heads that are transformed together (None: all of a layer; 1: each apart). The
            heads that are left over, where their number is no multiple of it, are a smaller last group.
        ridge: added to the diagonal of F, as a share of its mean; `ledoit_wolf`: F is shrunk towards the mean of its
            diagonal by what `ledoit_wolf` says, all heads together, and nothing is added.
        mixing: share of the covariance that is replaced by its diagonal (0: none), for small calibrations;
            `ledoit_wolf`: by the mean of its diagonal, the share as `ledoit_wolf` says, all heads together.
        left_out: first tokens of each calibration text that do not count, because they stay in full precision.
        tables: dtype in which matrices are kept.

    Tables: `mean` `[1, n]`; `forward` `[groups, channels, m]` and `inverse` `[groups, m, channels]` of the groups of
    equal size, m the components of the one that uses most; `last_forward` and `last_inverse` of a smaller last group,
    with an m of its own; `order` `[1, used]`: which of the groups' components, one group after the other, is which. The
    quantizer behind keeps λ as its weights.

    Raises:
        ConfigError: an unknown metric or dtype, a number out of range.
    """

    version: ClassVar[int] = 1
    token_group = 1
    wants_joint = True

    def __init__(
        self,
        metric: Metric | str = Metric.full,
        heads_together: int | None = None,
        ridge: float | int | Literal["ledoit_wolf"] = 0.01,
        mixing: float | int | Literal["ledoit_wolf"] = 0.0,
        left_out: int = 1,
        tables: Literal["float32", "float16"] = "float32",
    ) -> None:
        self.metric = choice(Metric, metric, "metric")
        if heads_together is not None:
            at_least("heads_together", heads_together, 1)
        at_least("left_out", left_out, 0)
        for name, share, said in (("ridge", ridge, "above 0"), ("mixing", mixing, "a share, 0 to 1")):
            number = not isinstance(share, str) and (share > 0 if name == "ridge" else 0 <= share <= 1)
            require(number or share == LEDOIT_WOLF, name, share, f"{said}, or {LEDOIT_WOLF}")
        require(tables in ("float32", "float16"), "tables", tables, "float32 or float16")
        self.heads_together, self.ridge, self.mixing, self.left_out = heads_together, ridge, mixing, left_out
        self.dtype = getattr(torch, tables)

    def fit_joint(self, moments: JointMoments) -> Tables:
        """The tables with all components, and `spectrum` `[1, n]`: λ."""
        heads, n = moments.heads, len(moments.mean)
        together = heads if self.heads_together is None else min(self.heads_together, heads)
        size = n // heads * together
        groups = [slice(start, min(start + size, n)) for start in range(0, n, size)]
        covariance, fisher = self._covariance(moments), self._fisher(moments)
        found = [metric_basis(covariance[group, group], fisher[group, group]) for group in groups]
        spectrum = torch.cat([own for own, _, _ in found])
        order = spectrum.argsort(descending=True, stable=True)
        tables = {"mean": moments.mean.float()[None]}
        alike = n // size
        for prefix, part in (("", found[:alike]), ("last_", found[alike:])):
            if part:
                _, forward, inverse = zip(*part, strict=True)
                tables[f"{prefix}forward"] = to_stored(torch.stack(forward), self.dtype)
                tables[f"{prefix}inverse"] = to_stored(torch.stack(inverse), self.dtype)
        return tables | {"order": order.int()[None], "spectrum": spectrum[order].float()[None]}

    def _covariance(self, moments: JointMoments) -> Float[Tensor, "n n"]:
        if self.mixing == LEDOIT_WOLF:
            return _shrunk(moments.covariance, moments.fourth, moments.tokens)
        return torch.lerp(moments.covariance, moments.covariance.diagonal().diag(), float(self.mixing))

    def _fisher(self, moments: JointMoments) -> Float[Tensor, "n n"]:
        fisher, shrunk = moments.fisher, self.ridge == LEDOIT_WOLF
        base = fisher.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        mean = base * torch.eye(len(fisher), dtype=fisher.dtype)
        if self.metric is Metric.none:
            return mean
        if shrunk:
            fisher = _shrunk(fisher, moments.fisher_fourth, moments.tokens)
        kept = fisher if self.metric is Metric.full else fisher.diagonal().diag()
        return kept if shrunk else kept + float(self.ridge) * mean

    @staticmethod
    def trimmed(tables: Tables, used: int) -> Tables:
        """The tables of the first `used` components, at least one."""
        order = tables["order"][0, : max(used, 1)].long()
        kept, out = torch.empty_like(order), dict(tables)
        before = after = 0
        for prefix in _prefixes(tables):
            forward, inverse = tables[f"{prefix}forward"], tables[f"{prefix}inverse"]
            groups, _, count = forward.shape
            own = (order >= before) & (order < before + groups * count)
            inside = order[own] - before
            most = max((inside % count + 1).tolist(), default=1)
            kept[own] = inside // count * most + inside % count + after
            out[f"{prefix}forward"] = forward[..., :most].contiguous()
            out[f"{prefix}inverse"] = inverse[:, :most].contiguous()
            before, after = before + groups * count, after + groups * most
        return out | {"order": kept.int()[None]}

    def _matrices(self, name: str, like: Tensor) -> list[Float[Tensor, "rows columns"]]:
        """Those of all groups, the first heads' first."""
        return [own for prefix in _prefixes(self.tables) for own in self.table(prefix + name, like)]

    @override
    def forward(self, x: Float[Tensor, "*lead heads tokens dim"]) -> tuple[Tensor, Side]:
        order = self.table("order", x)[0].long()
        flat = x.transpose(-3, -2).flatten(-2) - self.table("mean", x)
        matrices = self._matrices("forward", x)
        rows = flat.split([len(own) for own in matrices], -1)
        found = torch.cat([per_block(*pair) for pair in zip(rows, matrices, strict=True)], -1).index_select(-1, order)
        found = torch.nn.functional.pad(found, (0, flat.shape[-1] - len(order)))
        return found.unflatten(-1, (x.shape[-3], -1)).transpose(-3, -2), {}

    @override
    def inverse(
        self, y: Float[Tensor, "*lead heads tokens dim"], side: Side, product: Callable[..., Tensor] = per_block
    ) -> Tensor:
        """Components back to states; `product(rows, matrix)` may round in another way than blocks are decoded."""
        order = self.table("order", y)[0].long()
        flat = y.transpose(-3, -2).flatten(-2)[..., : len(order)]
        matrices = self._matrices("inverse", y)
        counts = [len(own) for own in matrices]
        spread = flat.new_zeros(*flat.shape[:-1], sum(counts)).index_copy_(-1, order, flat)
        parts = [product(*pair) for pair in zip(spread.split(counts, -1), matrices, strict=True)]
        found = torch.cat(parts, -1) + self.table("mean", y)
        return found.unflatten(-1, (y.shape[-3], -1)).transpose(-3, -2).contiguous()


def _prefixes(tables: Mapping[str, Tensor]) -> list[str]:
    """Of the names of a `FisherTransform`'s matrices: those of groups of equal size, and of a smaller last one."""
    return ["", "last_"] if "last_forward" in tables else [""]


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

    def __init__(
        self,
        bits: int,
        group_size: int | None = 32,
        channels: int | None = None,
        rank: int = 60,
        weight: float = 1e-3,
        rows: int = 8192,
    ) -> None:
        super().__init__(bits, Axis.per_channel, group_size)
        for name, number in (("channels", channels), ("rank", rank), ("rows", rows)):
            at_least(name, 1 if number is None else number, 1)
        require(weight > 0, "weight", weight, "above 0")
        self.channels, self.rank, self.weight, self.rows = channels, rank, weight, rows

    @override
    def check(self, head_dim: int) -> None:
        require(head_dim >= 2, "head_dim", head_dim, "no channel behind the first ones", Unsupported)
        super().check(head_dim)

    def _ends(self, dim: int) -> list[int]:
        """Where groups end that have others after them."""
        size = self.channels or -(-dim // 2)
        return list(range(size, dim, size))

    @override
    def fit(self, x: States, gradients: States | None, seed: int, moments: Moments | None = None) -> Tables:
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

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        moved, carry, start = x.clone(), self.table("carry", x), 0
        for end in self._ends(x.shape[-1]):
            own = moved[..., start:end]
            error = self.decode(super().encode(own, dtype), own.shape, x.dtype) - own
            moved[..., end:] += per_head(error, carry[:, start:end, end:])
            start = end
        return super().encode(moved, dtype)
