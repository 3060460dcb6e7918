"""The transform of all heads of a token into components whose noise costs add up, and the moments it is made of."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.calibrated import JointTransform, Tables
from kvq.codecs.quantizers import choice, to_stored
from kvq.codecs.rotations import eigenvectors, per_block
from kvq.errors import at_least, require

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

    M: what noise costs, S: the covariance of the states. Components that never vary, within rounding, have λ = 0 and
    decode to 0.
    """
    size, axes = torch.linalg.eigh((metric + metric.mT) / 2)
    size = size.clamp_min(max(_LEAST * float(size.max()), _NOTHING))
    root, back = ((axes * size**power) @ axes.mT for power in (0.5, -0.5))
    product = root @ covariance @ root
    spectrum, turn = eigenvectors((product + product.mT) / 2)
    spectrum, turn = spectrum.flip(0), turn.flip(1)
    least = _LEAST * max(float(spectrum.max()), torch.finfo(torch.float64).tiny / _LEAST)
    varies = spectrum > least
    turn, deviation = turn * varies, spectrum.clamp_min(least).sqrt()
    return spectrum * varies, root @ turn / deviation, deviation[:, None] * (turn.mT @ back)


class FisherTransform(JointTransform):
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
        ridge: added to the diagonal of F, as a share of its mean; `ledoit_wolf`: F is shrunk towards the mean of its
            diagonal by what `ledoit_wolf` says, all heads together, and nothing is added.
        mixing: share of the covariance that is replaced by its diagonal (0: none), for small calibrations;
            `ledoit_wolf`: by the mean of its diagonal, the share as `ledoit_wolf` says, all heads together.
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

    # 1 also since the signs of eigenvectors are fixed: they are a free choice, which LAPACK's rounding made before.
    # Records from then are as valid as any other draw of signs: quantizers see components of the same distribution.
    version: ClassVar[int] = 1

    def __init__(
        self,
        metric: Metric | str = Metric.full,
        heads_together: int | None = None,
        ridge: float | int | Literal["ledoit_wolf"] = 0.01,
        mixing: float | int | Literal["ledoit_wolf"] = 0.0,
        left_out: int = 1,
        tables: Literal["float32", "float16"] = "float32",
        across: float | int = 0.0,
    ) -> None:
        self.metric = choice(Metric, metric, "metric")
        if heads_together is not None:
            at_least("heads_together", heads_together, 1)
        at_least("left_out", left_out, 0)
        for name, share, said in (("ridge", ridge, "above 0"), ("mixing", mixing, "a share, 0 to 1")):
            number = not isinstance(share, str) and (share > 0 if name == "ridge" else 0 <= share <= 1)
            require(number or share == LEDOIT_WOLF, name, share, f"{said}, or {LEDOIT_WOLF}")
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
        covariance, fisher = self._covariance(moments), self._fisher(moments)
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
    def multiplications(self) -> int:
        return sum(table.numel() for name, table in self.tables.items() if name.endswith("inverse"))

    def _matrices(self, name: str, like: Tensor) -> list[Float[Tensor, "rows columns"]]:
        """Those of all groups, the first heads' first."""
        return [own for prefix in _prefixes(self.tables) for own in self.table(prefix + name, like)]

    def _components(self, rows: Float[Tensor, "*lead tokens n"], like: Tensor) -> Float[Tensor, "*lead tokens m"]:
        order, matrices = self.table("order", like)[0].long(), self._matrices("forward", like)
        parts = rows.split([len(own) for own in matrices], -1)
        found = [per_block(*pair) for pair in zip(parts, matrices, strict=True)]
        if "across_forward" in self.tables:
            cut = [
                part.tensor_split([_joined(self.tables, len(own))], -1)
                for part, own in zip(found, matrices, strict=True)
            ]
            first, rest = zip(*cut, strict=True)
            found = [per_block(torch.cat(first, -1), self.table("across_forward", like)[0]), *rest]
        return torch.cat(found, -1).index_select(-1, order)

    def _states(
        self, components: Float[Tensor, "*lead tokens n"], like: Tensor, some: slice
    ) -> Float[Tensor, "*lead tokens channels"]:
        order, matrices = self.table("order", like)[0].long(), self._matrices("inverse", like)
        flat, counts = components[..., : len(order)], [len(own) for own in matrices]
        turns = [*self.table("across_inverse", like)] if "across_inverse" in self.tables else []
        firsts = [_joined(self.tables, own.shape[1]) for own in matrices]
        lengths = [*map(len, turns), *(count - first for count, first in zip(counts, firsts, strict=True))]
        rows = flat.new_zeros(*flat.shape[:-1], sum(lengths)).index_copy_(-1, order, flat).split(lengths, -1)
        if turns:
            first = per_block(rows[0], turns[0]).split(firsts, -1)
            rows = tuple(torch.cat(pair, -1) for pair in zip(first, rows[1:], strict=True))
        starts = itertools.accumulate((own.shape[1] for own in matrices), initial=0)
        parts = [
            per_block(own, matrix[:, max(some.start - start, 0) : some.stop - start])
            for own, matrix, start in zip(rows, matrices, starts, strict=False)
            if some.start < start + matrix.shape[1] and start < some.stop
        ]
        return torch.cat(parts, -1)


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
    sizes = sizes.masked_fill(sizes == 0, 1)
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
