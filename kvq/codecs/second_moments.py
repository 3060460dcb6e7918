"""Transform of all heads of a token into components whose losses by quantization add up, computed from moments."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvq.codecs.calibrated import Components, JointTransform, Tables
from kvq.codecs.levels import best_row_steps, dequantize_rows, pack_rows, quantize_rows, unpack_rows
from kvq.codecs.quantizers import checked_choice, to_stored
from kvq.codecs.rotations import eigenvectors, per_block
from kvq.errors import at_least, require

_LEAST = 1e-12  # of the largest eigenvalue: components below it have no variance
_NOTHING = 1e-30  # an eigenvalue of a metric that is 0
FOLDED = "folded_"
"""Begins the names of tables that are part of the model's weights, and are not counted."""
Metric = Literal["full", "diagonal", "none"]
"""What of the Fisher information F counts: `full`, `diagonal`, or `none`: only its mean (KLT of the states)."""
LEDOIT_WOLF = "ledoit_wolf"
"""In the place of a share: the one that the data say."""
Square = Float[Tensor, "n n"]


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
    covariance: Square
    fisher: Square
    heads: int
    tokens: int
    fourth: float | None = None
    fisher_fourth: float | None = None


def ledoit_wolf(second: Square, fourth: float, tokens: int) -> float:
    """The shrinkage of a matrix of second moments towards its mean diagonal that minimizes the squared error, 0 to 1.

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


def _shrink(second: Square, fourth: float | None, tokens: int) -> Square:
    assert fourth is not None, "moments without a fourth"
    mean = second.diagonal().mean() * torch.eye(len(second), dtype=second.dtype)
    return torch.lerp(second, mean, ledoit_wolf(second, fourth, tokens))


def metric_basis(covariance: Square, metric: Square) -> tuple[Float[Tensor, " n"], Square, Square]:
    """Eigenvalues λ of M^(1/2) S M^(1/2), descending; matrices from states to components of variance 1, and back.

    M: `metric`, noise e costs eᵀ M e / 2; S: the covariance of the states. Components that never vary, within rounding,
    have λ = 0 and decode to 0.
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


def best_encoder(
    rows: Float[Tensor, "m n"], metric: Square, covariance: Square
) -> tuple[Float[Tensor, "n m"], Float[Tensor, " m"], Float[Tensor, " m"]]:
    """The encoder of least loss for a decoder B (`rows`), standard deviations of its components, and their λ.

    A = M Bᵀ (B M Bᵀ)^-1 projects in the metric M: an error of the rows costs nothing but what lies outside of them.
    """
    within = rows @ metric @ rows.mT
    within += _LEAST * within.diagonal().mean() * torch.eye(len(rows), dtype=rows.dtype)
    forward = torch.linalg.solve(within, rows @ metric).mT
    sizes = ((covariance @ forward) * forward).sum(0).clamp_min(0).sqrt()
    return forward, sizes, sizes.square() * within.diagonal()


class FisherTransform(JointTransform):
    """`(x - mean) T`, T = F^(1/2) U, of all heads of a token, scaled to deviations of 1.

    U and λ are the eigenvectors and eigenvalues of F^(1/2) S F^(1/2), S the covariance of the states and F the Fisher
    information of the loss at them. Noise of relative size d in component i costs λ_i d / 2 nats per token. Components
    come in the order of λ, descending, and those without bits are not computed.

    With `tables` of integers only the inverse is rounded, row by row: the bits are then shared out anew over the
    components of the encoder that is best for the rounded rows (`best_encoder`). `width+c` gives a row c bits more than
    its component has: as rows are as long as their components' deviations, all then have about the same absolute error.

    Args:
        metric: see `Metric`.
        heads_together: neighbouring KV heads that are transformed together (None: all of a layer, 1: each apart). The
            heads that are left over, where their number is no multiple of it, are a smaller last group.
        ridge: added to the diagonal of F, as a share of its mean; `ledoit_wolf`: instead, F of all heads is shrunk
            towards the mean of its diagonal by the share that the function `ledoit_wolf` returns.
        mixing: share of the covariance that is replaced by its diagonal (0: none), for small calibrations;
            `ledoit_wolf`: by the mean of its diagonal, with the share that the function returns for all heads.
        left_out: first tokens of each calibration text that do not count, because they stay in full precision.
        tables: dtype in which matrices are kept: float32, float16, or of the inverse int2 to int8 or width+0 to
            width+8, with a step for each row.
        with_values: behind the heads of keys are those of values; a group of `heads_together` heads has both.
        folded: the forward matrices are part of the model's weights, which make components of hidden states: they take
            the place of W_K and W_V and have their size. As the cache receives states, they are here too, not counted.

    Tables: `mean` `[1, n]`; `forward` `[groups, channels, m]` (`folded_forward` where they are) and `inverse` `[groups,
    m, channels]` of the groups of equal size, m the components of the one that uses most; `last_forward` and
    `last_inverse` of a smaller last group, with an m of its own; `order` `[1, used]`: which of the components is which,
    of one group after the other. The quantizer behind keeps λ as its weights. Integers: `codes`, in the place of
    `inverse`, rows after each other, `steps` `[groups, m, 1]` in fp32, `row_bits` `[groups, m]` in uint8.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        metric: Metric | str = "full",
        heads_together: int | None = None,
        ridge: float | int | Literal["ledoit_wolf"] = 0.01,
        mixing: float | int | Literal["ledoit_wolf"] = 0.0,
        left_out: int = 1,
        tables: str = "float32",
        with_values: bool = False,
        folded: bool = False,
    ) -> None:
        self.metric: Metric = checked_choice(Metric, metric, "metric")
        at_least("heads_together", heads_together, 1)
        at_least("left_out", left_out, 0)
        for name, share, allowed in (("ridge", ridge, "above 0"), ("mixing", mixing, "a share, 0 to 1")):
            number = not isinstance(share, str) and (share > 0 if name == "ridge" else 0 <= share <= 1)
            require(number or share == LEDOIT_WOLF, name, share, f"{allowed}, or {LEDOIT_WOLF}")
        known = re.fullmatch(r"float32|float16|int[2-8]|width\+[0-8]", tables)
        require(known is not None, "tables", tables, "float32, float16, int2 to int8, or width+0 to width+8")
        self.heads_together, self.ridge, self.mixing, self.left_out = heads_together, ridge, mixing, left_out
        self.tables_as, self.with_values, self.folded = tables, with_values, folded

    @property
    def rounds(self) -> bool:
        """Whether the inverse is kept as integers."""
        return not self.tables_as.startswith("float")

    def fit_joint(self, moments: JointMoments) -> Tables:
        """The tables with all components, and `spectrum` `[1, n]`: λ."""
        bases = [metric_basis(covariance, fisher) for covariance, fisher in self._blocks(moments)]
        spectra, forward, inverse = zip(*bases, strict=True)
        tables = {"mean": moments.mean.float()[None]}
        return self._assemble(tables, spectra, {"forward": forward, "inverse": inverse})

    def round_tables(self, tables: Tables, moments: JointMoments, widths: UInt8[Tensor, " n"]) -> Tables:
        """Quantize the inverse in tables of `fit_joint`, without rows of `widths` 0, and refit the encoder to it."""
        by_component = torch.zeros(len(widths), dtype=torch.long)
        by_component[tables["order"][0].long()] = widths.long()
        made: dict[str, list[Tensor]] = {"forward": [], "inverse": [], "steps": [], "row_bits": []}
        spectra, start = [], 0
        for (covariance, fisher), rows in zip(self._blocks(moments), self._rows(tables, "inverse"), strict=True):
            size = len(fisher)
            width, start = by_component[start : start + size], start + size
            kept = width > 0 if bool(width.any()) else torch.arange(size) < 1
            number = int(re.sub(r"\D", "", self.tables_as))
            bits = torch.full_like(width[kept], number) if self.tables_as.startswith("int") else width[kept] + number
            half, exact = 2.0 ** (bits[:, None] - 1), rows.double()[:size][kept]
            steps = best_row_steps(exact, bits)
            forward, sizes, costs = best_encoder(
                dequantize_rows(quantize_rows(exact, steps, half), steps, half), fisher, covariance
            )
            at = costs.argsort(descending=True)
            steps, half, exact = steps[at], half[at], exact[at]
            rounded = dequantize_rows(quantize_rows(exact, steps, half), steps, half) * sizes[at, None]
            more = (0, size - len(at))
            spectra.append(torch.nn.functional.pad(costs[at], more))
            parts = (forward[:, at] / sizes[at]).mT, rounded, steps * sizes[at, None], bits[at, None]
            for name, part in zip(made, parts, strict=True):
                made[name].append(torch.nn.functional.pad(part, (0, 0, *more)))
        made["forward"] = [part.mT for part in made["forward"]]
        return self._assemble({"mean": tables["mean"]}, spectra, made)

    def _assemble(self, tables: Tables, spectra: Sequence[Tensor], made: Mapping[str, Sequence[Tensor]]) -> Tables:
        """Add to `tables` the groups' matrices, stacked (a smaller last group apart), the components' order, and λ."""
        alike = sum(len(one) == len(spectra[0]) for one in spectra)
        for name, parts in made.items():
            for prefix, some in (("", parts[:alike]), ("last_", parts[alike:])):
                if some:
                    half = self.tables_as == "float16" and name != "steps"
                    tables[prefix + name] = to_stored(torch.stack([*some]), torch.float16 if half else torch.float32)
        spectrum = torch.cat([*spectra])
        order = spectrum.argsort(descending=True, stable=True)
        return tables | {"order": order.int()[None], "spectrum": spectrum[order].float()[None]}

    def _blocks(self, moments: JointMoments) -> list[tuple[Tensor, Tensor]]:
        """Covariance and Fisher information of each group."""
        heads, n = moments.heads, len(moments.mean)
        unit = 2 if self.with_values else 1
        together = heads if self.heads_together is None else min(self.heads_together * unit, heads)
        size = n // heads * together
        order = self._channel_order(n, heads)
        if self.mixing == LEDOIT_WOLF:
            mixed = _shrink(moments.covariance, moments.fourth, moments.tokens)
        else:
            mixed = torch.lerp(moments.covariance, moments.covariance.diagonal().diag(), float(self.mixing))
        covariance, fisher = (part[order][:, order] for part in (mixed, self._fisher(moments)))
        groups = [slice(start, min(start + size, n)) for start in range(0, n, size)]
        return [(covariance[group, group], fisher[group, group]) for group in groups]

    def _fisher(self, moments: JointMoments) -> Square:
        fisher, shrunk = moments.fisher, self.ridge == LEDOIT_WOLF
        base = fisher.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        mean = base * torch.eye(len(fisher), dtype=fisher.dtype)
        if self.metric == "none":
            return mean
        if shrunk:
            fisher = _shrink(fisher, moments.fisher_fourth, moments.tokens)
        kept = fisher if self.metric == "full" else fisher.diagonal().diag()
        return kept if shrunk else kept + float(self.ridge) * mean

    def trim_tables(self, tables: Tables, used: int) -> Tables:
        """Cut tables to the first `used` components, at least one, and pack integer rows: the stored tables."""
        order = tables["order"][0, : max(used, 1)].long()
        kept, out = torch.empty_like(order), dict(tables)
        before = after = 0
        for prefix in _prefixes(tables):
            groups, channels, _ = tables[f"{prefix}forward"].shape
            of_prefix = (order >= before) & (order < before + groups * channels)
            inside = order[of_prefix] - before
            most = max((inside % channels + 1).tolist(), default=1)
            kept[of_prefix] = inside // channels * most + inside % channels + after
            used_rows = torch.zeros(groups, most, dtype=torch.bool)
            used_rows[inside // channels, inside % channels] = True
            for name, along in (("forward", 2), ("inverse", 1), ("steps", 1), ("row_bits", 1)):
                if f"{prefix}{name}" in tables:
                    out[f"{prefix}{name}"] = tables[f"{prefix}{name}"].narrow(along, 0, most).contiguous()
            if self.rounds:
                bits = (out.pop(f"{prefix}row_bits")[..., 0] * used_rows).to(torch.uint8)
                rows, steps = out.pop(f"{prefix}inverse").flatten(0, 1), out[f"{prefix}steps"].flatten(0, 1)
                codes = quantize_rows(rows, steps.clamp_min(_NOTHING), 2.0 ** (bits.flatten()[:, None].float() - 1))
                out[f"{prefix}row_bits"] = bits
                out[f"{prefix}codes"] = pack_rows(codes, bits.flatten().tolist())
            before, after = before + groups * channels, after + groups * most
        if self.folded:
            out = {FOLDED + name if name.endswith("forward") else name: table for name, table in out.items()}
        return out | {"order": kept.int()[None]}

    @property
    def multiplications(self) -> int:
        return sum(matrix.numel() for matrix in self._rows(self.tables, "inverse"))

    def _rows(self, tables: Mapping[str, Tensor], name: str) -> list[Float[Tensor, "rows columns"]]:
        """The matrix `name`, `forward` or `inverse`, of each group, in the order of heads; codes are dequantized."""
        matrices = []
        for prefix in _prefixes(tables):
            table = tables.get(f"{prefix}{name}", tables.get(f"{FOLDED}{prefix}{name}"))
            if table is None:  # the inverse, from integer codes and steps
                bits, steps = tables[f"{prefix}row_bits"].cpu()[..., None], tables[f"{prefix}steps"].cpu()
                forward = f"{prefix}forward" if f"{prefix}forward" in tables else f"{FOLDED}{prefix}forward"
                columns = tables[forward].shape[1]
                codes = unpack_rows(tables[f"{prefix}codes"].cpu(), bits.flatten().tolist(), columns)
                codes = codes.unflatten(0, (len(bits), -1))
                table = (dequantize_rows(codes, steps.double(), 2.0 ** (bits.double() - 1)) * (bits > 0)).float()
            matrices += [*table]
        return matrices

    def _matrices(self, name: str, like: Tensor) -> list[Float[Tensor, "rows columns"]]:
        """The matrices of `_rows`, in the dtype and on the device of `like`; cached."""
        self.table("mean", like)  # whose shape is checked
        key = (name, like.dtype, like.device)
        if key not in self._cast:
            matrices = [matrix.to(like.device, like.dtype) for matrix in self._rows(self.tables, name)]
            self._cast[key] = matrices  # type: ignore[assignment]
        return self._cast[key]  # type: ignore[return-value]

    def _channel_order(self, n: int, heads: int) -> Int[Tensor, " n"]:
        """Channels in the order of the groups: each head's values behind its keys, where groups have both."""
        places = torch.arange(n)
        return places.view(2, heads // 2, -1).transpose(0, 1).flatten() if self.with_values else places

    def _components(self, rows: Float[Tensor, "*lead tokens n"], like: Tensor) -> Float[Tensor, "*lead tokens m"]:
        order, matrices = self.table("order", like)[0].long(), self._matrices("forward", like)
        if self.with_values:
            rows = rows.index_select(-1, self._channel_order(rows.shape[-1], like.shape[-3]).to(like.device))
        parts = rows.split([len(matrix) for matrix in matrices], -1)
        components = [per_block(*pair) for pair in zip(parts, matrices, strict=True)]
        return torch.cat(components, -1).index_select(-1, order)

    def _states(self, components: Components, like: Tensor, some: slice) -> Float[Tensor, "*lead tokens channels"]:
        if self.with_values:  # of a group's rows some are keys and some are values
            places = self._channel_order(components.shape[-1], like.shape[-3]).argsort()[some].to(like.device)
            return self._group_states(components, like, slice(0, components.shape[-1])).index_select(-1, places)
        return self._group_states(components, like, some)

    def _group_states(self, components: Tensor, like: Tensor, some: slice) -> Tensor:
        """Decode stored components to channels `some` of states minus mean, numbered in the order of head groups."""
        order, matrices = self.table("order", like)[0].long(), self._matrices("inverse", like)
        flat, counts = components[..., : len(order)], [len(matrix) for matrix in matrices]
        rows = flat.new_zeros(*flat.shape[:-1], sum(counts)).index_copy_(-1, order, flat).split(counts, -1)
        starts = itertools.accumulate((matrix.shape[1] for matrix in matrices), initial=0)
        parts = [
            per_block(group_rows, matrix[:, max(some.start - start, 0) : some.stop - start])
            for group_rows, matrix, start in zip(rows, matrices, starts, strict=False)
            if some.start < start + matrix.shape[1] and start < some.stop
        ]
        return torch.cat(parts, -1)


def _prefixes(tables: Mapping[str, Tensor]) -> list[str]:
    """Name prefixes of the matrices present: "" for groups of equal size, "last_" for a smaller last group."""
    return ["", "last_"] if any(name.endswith("last_forward") for name in tables) else [""]
