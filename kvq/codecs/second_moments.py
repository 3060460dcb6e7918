"""Transforms and grids fitted to what noise costs: second moments of the queries or of the loss's gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
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
    """

    mean: Float[Tensor, " n"]
    covariance: Float[Tensor, "n n"]
    fisher: Float[Tensor, "n n"]
    heads: int
    tokens: int


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

    With `across`, T has two stages: A, the transforms of each group of heads, from its own blocks of S and F; then P,
    the same for the first components of each head, from their covariance AᵀSA and what noise in them costs,
    A⁻¹FA⁻ᵀ. The other components stay. Noise in a component costs (T⁻¹FT⁻ᵀ)_ii = λ_i: exactly, with either stage.
    Components turned by P are also uncorrelated, and their costs add up. All others are correlated across heads; that
    errors of two of them cost something together is neglected, as it is between groups without `across`.

    Args:
        metric: see `Metric`.
        heads_together: neighbouring KV heads that are transformed together (None: all of a layer, with `across` each
            apart; 1: each apart). The heads that are left over, where their number is no multiple of it, are a smaller
            last group.
        ridge: added to the diagonal of F, as a share of its mean.
        mixing: share of the covariance that is replaced by its diagonal (0: none), for small calibrations.
        left_out: first tokens of each calibration text that do not count, because they stay in full precision.
        tables: dtype in which matrices are kept.
        across: share of the components of each head, those of the largest λ, that the second stage joins across groups
            of heads, at least one (0: there is no second stage).

    Tables: `mean` `[1, n]`; `forward` `[groups, channels, m]` and `inverse` `[groups, m, channels]` of the groups of
    equal size, m the components of the one that uses most; `last_forward` and `last_inverse` of a smaller last group,
    with an m of its own; `across_forward` `[1, joined, k]` and `across_inverse` `[1, k, joined]` of the second stage, k
    the components of it that are used; `order` `[1, used]`: which of the components is which, those of the second
    stage first, then of one group after the other what it does not join. The quantizer behind keeps λ as its weights.

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
        ridge: float | int = 0.01,
        mixing: float | int = 0.0,
        left_out: int = 1,
        tables: Literal["float32", "float16"] = "float32",
        across: float | int = 0.0,
    ) -> None:
        self.metric = choice(Metric, metric, "metric")
        if heads_together is not None:
            at_least("heads_together", heads_together, 1)
        at_least("left_out", left_out, 0)
        require(ridge > 0, "ridge", ridge, "above 0")
        require(0 <= mixing <= 1, "mixing", mixing, "a share, 0 to 1")
        require(tables in ("float32", "float16"), "tables", tables, "float32 or float16")
        require(0 <= across <= 1, "across", across, "a share, 0 to 1")
        self.heads_together = 1 if heads_together is None and across else heads_together
        self.ridge, self.mixing, self.left_out, self.across = ridge, mixing, left_out, across
        self.dtype = getattr(torch, tables)

    def fit_joint(self, moments: JointMoments) -> Tables:
        """The tables with all components, and `spectrum` `[1, n]`: λ."""
        heads, n = moments.heads, len(moments.mean)
        together = heads if self.heads_together is None else min(self.heads_together, heads)
        size = n // heads * together
        groups = [slice(start, min(start + size, n)) for start in range(0, n, size)]
        fisher = self._fisher(moments.fisher)
        covariance = torch.lerp(moments.covariance, moments.covariance.diagonal().diag(), float(self.mixing))
        found = [metric_basis(covariance[group, group], fisher[group, group]) for group in groups]
        spectra, alike = [own for own, _, _ in found], n // size
        parts = {"": found[:alike], "last_": found[alike:]}
        if self.across:
            least = max(round(self.across * n / heads), 1)
            firsts = [len(own) * heads // n * least for own in spectra]
            parts["across_"] = [_carried(covariance, fisher, found, firsts)]
            rest = [own[first:] for own, first in zip(spectra, firsts, strict=True)]
            spectra = [parts["across_"][0][0], *rest]
        tables = {"mean": moments.mean.float()[None]}
        for prefix, part in parts.items():
            if part:
                _, forward, inverse = zip(*part, strict=True)
                tables[f"{prefix}forward"] = to_stored(torch.stack(forward), self.dtype)
                tables[f"{prefix}inverse"] = to_stored(torch.stack(inverse), self.dtype)
        spectrum = torch.cat(spectra)
        order = spectrum.argsort(descending=True, stable=True)
        return tables | {"order": order.int()[None], "spectrum": spectrum[order].float()[None]}

    def _fisher(self, fisher: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        diagonal = fisher.diagonal()
        base = diagonal.mean().clamp_min(torch.finfo(torch.float64).tiny)
        if self.metric is Metric.none:
            return base * torch.eye(len(fisher), dtype=fisher.dtype)
        kept = fisher if self.metric is Metric.full else diagonal.diag()
        return kept + self.ridge * base * torch.eye(len(fisher), dtype=fisher.dtype)

    @staticmethod
    def trimmed(tables: Tables, used: int) -> Tables:
        """The tables of the first `used` components, at least one."""
        order = tables["order"][0, : max(used, 1)].long()
        kept, out = torch.empty_like(order), dict(tables)
        before = after = 0
        for prefix in [*(["across_"] if "across_forward" in tables else []), *_prefixes(tables)]:
            forward, inverse = tables[f"{prefix}forward"], tables[f"{prefix}inverse"]
            groups, channels, count = forward.shape
            first = 0 if prefix == "across_" else _joined(tables, channels)
            count -= first
            own = (order >= before) & (order < before + groups * count)
            inside = order[own] - before
            most = max((inside % max(count, 1) + 1).tolist(), default=0 if first else 1)
            kept[own] = inside // max(count, 1) * most + inside % max(count, 1) + after
            out[f"{prefix}forward"] = forward[..., : first + most].contiguous()
            out[f"{prefix}inverse"] = inverse[:, : first + most].contiguous()
            before, after = before + groups * count, after + groups * most
        return out | {"order": kept.int()[None]}

    @property
    @override
    def multiplications(self) -> int:
        return sum(table.numel() for name, table in self.tables.items() if name.endswith("inverse"))

    def _matrices(self, name: str, like: Tensor) -> list[Float[Tensor, "rows columns"]]:
        """Those of all groups, the first heads' first."""
        return [own for prefix in _prefixes(self.tables) for own in self.table(prefix + name, like)]

    @override
    def forward(self, x: Float[Tensor, "*lead heads tokens dim"]) -> tuple[Tensor, Side]:
        order = self.table("order", x)[0].long()
        flat = x.transpose(-3, -2).flatten(-2) - self.table("mean", x)
        matrices = self._matrices("forward", x)
        rows = flat.split([len(own) for own in matrices], -1)
        found = [per_block(*pair) for pair in zip(rows, matrices, strict=True)]
        if "across_forward" in self.tables:
            cut = [
                part.tensor_split([_joined(self.tables, len(own))], -1)
                for part, own in zip(found, matrices, strict=True)
            ]
            first, rest = zip(*cut, strict=True)
            found = [per_block(torch.cat(first, -1), self.table("across_forward", x)[0]), *rest]
        kept = torch.cat(found, -1).index_select(-1, order)
        kept = torch.nn.functional.pad(kept, (0, flat.shape[-1] - len(order)))
        return kept.unflatten(-1, (x.shape[-3], -1)).transpose(-3, -2), {}

    @override
    def inverse(
        self, y: Float[Tensor, "*lead heads tokens dim"], side: Side, product: Callable[..., Tensor] = per_block
    ) -> Tensor:
        """Components back to states; `product(rows, matrix)` may round in another way than blocks are decoded."""
        order = self.table("order", y)[0].long()
        flat = y.transpose(-3, -2).flatten(-2)[..., : len(order)]
        matrices = self._matrices("inverse", y)
        counts = [len(own) for own in matrices]
        turns = [*self.table("across_inverse", y)] if "across_inverse" in self.tables else []
        firsts = [_joined(self.tables, own.shape[1]) for own in matrices]
        lengths = [*map(len, turns), *(count - first for count, first in zip(counts, firsts, strict=True))]
        rows = flat.new_zeros(*flat.shape[:-1], sum(lengths)).index_copy_(-1, order, flat).split(lengths, -1)
        if turns:
            first = product(rows[0], turns[0]).split(firsts, -1)
            rows = tuple(torch.cat(pair, -1) for pair in zip(first, rows[1:], strict=True))
        parts = [product(*pair) for pair in zip(rows, matrices, strict=True)]
        found = torch.cat(parts, -1) + self.table("mean", y)
        return found.unflatten(-1, (y.shape[-3], -1)).transpose(-3, -2).contiguous()


def _prefixes(tables: Mapping[str, Tensor]) -> list[str]:
    """Of the names of a `FisherTransform`'s matrices: those of groups of equal size, and of a smaller last one."""
    return ["", "last_"] if "last_forward" in tables else [""]


def _joined(tables: Mapping[str, Tensor], channels: int) -> int:
    """Components of a group of so many channels that the second stage joins."""
    return tables["across_forward"].shape[1] * channels // tables["mean"].shape[1] if "across_forward" in tables else 0


def _carried(
    covariance: Float[Tensor, "n n"],
    fisher: Float[Tensor, "n n"],
    found: Sequence[tuple[Tensor, Tensor, Tensor]],
    firsts: Sequence[int],
) -> tuple[Float[Tensor, " joined"], Float[Tensor, "joined joined"], Float[Tensor, "joined joined"]]:
    """`metric_basis` of the first components of each group, from the moments carried into them.

    The metric is that of components before they are scaled to deviations of 1, whose own blocks are the identity.
    """
    sizes = torch.cat([own[:first].sqrt() for (own, _, _), first in zip(found, firsts, strict=True)])
    forward, inverse = (
        torch.block_diag(*parts)
        for parts in (
            [forward[:, :first] for (_, forward, _), first in zip(found, firsts, strict=True)],
            [inverse[:first] for (_, _, inverse), first in zip(found, firsts, strict=True)],
        )
    )
    forward, inverse = forward * sizes, inverse / sizes[:, None]
    spectrum, turn, back = metric_basis(forward.mT @ covariance @ forward, inverse @ fisher @ inverse.mT)
    return spectrum, sizes[:, None] * turn, back / sizes


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
