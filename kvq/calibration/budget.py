"""Bits shared by all layers and sides: one budget in nats (Fisher transforms), and KVTC's groups of coefficients.

Budget: a part that shares bits says what each further bit of each of its components saves in nats (`Demand`). Bits are
given in the order of what they save, until the budget is spent: the water level is what the last one saves.

Groups: the error of every possible group is measured on the calibration's coefficients. Over the coefficients of a
layer, in the order of their variances, the least error at each number of bits follows from that of fewer coefficients;
over layers, from that of fewer layers. Both are exact. Source: KVTC (arXiv 2511.01815), section 3.2 and appendix B.17,
as public reproductions quote them: docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvq.calibration.collect import Place
from kvq.codecs import (
    Budget,
    Codec,
    CoefficientQuantizer,
    ComponentQuantizer,
    FisherTransform,
    Groups,
    JointMoments,
    PrincipalComponents,
    Rope,
    Tables,
    Widths,
)
from kvq.codecs.coefficients import KINDS, coded, cost, values_of
from kvq.codecs.stages import Stage
from kvq.errors import ConfigError, Unsupported


@dataclass(frozen=True)
class Demand:
    """The loss that bits save: `gains[i, b]` nats per token by bit b + 1 of component i; `bits`: the budget."""

    gains: Float[Tensor, "components steps"]
    bits: float | int


def shared_out(demands: Sequence[Demand]) -> list[UInt8[Tensor, " components"]]:
    """Share one budget out over the components of all demands: the sum of their bits, rounded to a whole number.

    A bit never counts for more than the one before it. Of equal gains, lower bits come first, then earlier components.
    Bits that save nothing, those of components without variance, are not given.
    """
    steps = [demand.gains.double().cummin(1).values for demand in demands]
    most = max(own.shape[1] for own in steps)
    padded = [torch.nn.functional.pad(own, (0, most - own.shape[1]), value=-torch.inf) for own in steps]
    together = torch.cat(padded)
    ranked = together.T.flatten()  # bit after bit, so that a stable sort keeps their order
    budget = min(round(sum(demand.bits for demand in demands)), int((ranked > 0).sum()))
    chosen = torch.zeros(len(ranked), dtype=torch.uint8)
    chosen[ranked.argsort(descending=True, stable=True)[:budget]] = 1
    widths = chosen.view(most, -1).sum(0).to(torch.uint8)
    return list(widths.split([len(own) for own in steps]))


Transform = TypeVar("Transform", bound=Stage)


def last_stage(codec: Codec | None, kind: type[Transform], shares: bool, said: str) -> tuple[str, Transform] | None:
    """The name and the object of the transform of this kind that is the last stage of a codec.

    None: the codec has neither it nor a quantizer that `shares` bits over its components.

    Raises:
        ConfigError: as `said`: one without the other, or something between them or before, other than stages of RoPE.
    """
    stages = [] if codec is None else codec.stages
    names = [name for name, stage in stages if isinstance(stage, kind)]
    if not names and not shares:
        return None
    if len(names) != 1 or not shares or stages[-1][0] != names[0] or not all(s.uses_rope for _, s in stages[:-1]):
        raise ConfigError(said)
    return names[0], cast(Transform, stages[-1][1])


def joint_parts(codec: Codec | None) -> tuple[str, FisherTransform, ComponentQuantizer] | None:
    """Name and object of the Fisher transform, and the quantizer that shares bits; None: the codec has neither.

    Raises:
        ConfigError: as `last_stage`.
    """
    quantizer = None if codec is None else codec.quantizer
    shares = isinstance(quantizer, ComponentQuantizer) and quantizer.widths is not Widths.equal
    said = (
        "a FisherTransform stands last of its stages, behind none but those of RoPE, and its quantizer has "
        "widths=pooled or widths=own"
    )
    found = last_stage(codec, FisherTransform, shares, said)
    return None if found is None else (*found, cast(ComponentQuantizer, quantizer))


def fit_sharing(codecs: Mapping[Place, Codec], moments: Mapping[Place, JointMoments]) -> dict[Place, Tables]:
    """Tables of all codecs, `<part>.<table>`, which share their bits as their quantizers have it.

    Raises:
        ConfigError: as `joint_parts`.
    """
    found: dict[Place, Tables] = {}
    demands: dict[Place, Demand] = {}
    names: dict[Place, str] = {}
    for place, codec in codecs.items():
        parts = joint_parts(codec)
        assert parts is not None
        name, stage, quantizer = parts
        names[place], found[place] = name, stage.fit_joint(moments[place])
        demands[place] = demand_of(quantizer, found[place]["spectrum"][0])
    widths = _widths(codecs, demands)
    rounding = {place: stage for place in codecs if (stage := _transform(codecs[place])).rounds}
    for place, stage in rounding.items():  # whose components are others than those of exact matrices
        found[place] = stage.rounded(found[place], moments[place], widths[place])
        demands[place] = demand_of(_quantizer(codecs[place]), found[place]["spectrum"][0])
    widths = _widths(codecs, demands) if rounding else widths
    out: dict[Place, Tables] = {}
    for place, codec in codecs.items():
        own = _transform(codec).trimmed(found[place], int((widths[place] > 0).sum()))
        tables = _quantizer(codec).shared_out(own.pop("spectrum")[0], widths[place])
        out[place] = {f"{names[place]}.{name}": table for name, table in own.items()}
        out[place] |= {f"quantizer.{name}": table for name, table in tables.items()}
    return out


def _widths(codecs: Mapping[Place, Codec], demands: Mapping[Place, Demand]) -> dict[Place, Tensor]:
    """The widths of all components, those of pooled codecs shared out together."""
    pooled = [place for place, codec in codecs.items() if _quantizer(codec).widths is Widths.pooled]
    widths = dict(zip(pooled, shared_out([demands[place] for place in pooled]), strict=True)) if pooled else {}
    return widths | {place: shared_out([demands[place]])[0] for place in codecs if place not in widths}


def _transform(codec: Codec) -> FisherTransform:
    stage = codec.stages[-1][1]
    assert isinstance(stage, FisherTransform)
    return stage


def _quantizer(codec: Codec) -> ComponentQuantizer:
    assert isinstance(codec.quantizer, ComponentQuantizer)
    return codec.quantizer


def demand_of(quantizer: ComponentQuantizer, spectrum: Float[Tensor, " components"]) -> Demand:
    """What bits save: half of λ times the fall of the error."""
    errors = torch.tensor(quantizer.errors, dtype=torch.float64)
    saved = errors[:-1] - errors[1:]
    return Demand(spectrum.double()[:, None] * saved / 2, quantizer.bits * len(spectrum))


def predicted(quantizer: ComponentQuantizer, spectrum: Tensor, widths: Tensor) -> float:
    """Second-order loss in nats per token of components with these widths: half of Σ λ D.

    Raises:
        Unsupported: a width that the quantizer does not have.
    """
    errors = torch.tensor(quantizer.errors, dtype=torch.float64)
    if int(widths.max()) >= len(errors):
        raise Unsupported(f"width {int(widths.max())}: {type(quantizer).__name__} has up to {len(errors) - 1} bits")
    return float((spectrum.double() * errors[widths.long()]).sum() / 2)


_TOGETHER = 2**24
"""Numbers that are in memory at once while errors are measured."""
_NONE = (1, 0)


@dataclass(frozen=True)
class Errors:
    """Squared errors of the groups of n coefficients, summed over tokens.

    `energies` `[n]`: of coefficients that are not stored. `of[size, kind]` `[n - size + 1]`: of the group that begins
    at a coefficient.
    """

    energies: Float[np.ndarray, " n"]
    of: Mapping[tuple[int, int], Float[np.ndarray, " starts"]]

    @property
    def options(self) -> list[tuple[int, int]]:
        """Sizes and kinds that a group may have; the first is one coefficient that is not stored."""
        return [_NONE, *self.of]


def measured(z: Float[Tensor, "tokens n"], sizes: Sequence[int]) -> Errors:
    """Errors of all groups of these sizes, those that are larger than n left out."""
    found = {}
    for size in (size for size in sizes if size <= z.shape[1]):
        windows = z.unfold(1, size, 1)
        for kind in KINDS if size > 1 else KINDS[:1]:  # one coefficient is its shift, whatever the bits
            pieces = windows.split(max(1, _TOGETHER // (len(z) * size)), 1)
            found[size, kind] = torch.cat([_error(piece, kind) for piece in pieces]).numpy()
    return Errors(z.double().square().sum(0).numpy(), found)


def _error(x: Float[Tensor, "tokens groups size"], kind: int) -> Float[Tensor, " groups"]:
    codes, scale, shift = coded(x, kind)
    out = values_of(codes, kind, x.dtype) * scale.to(x.dtype) + shift.to(x.dtype)
    return (out - x).square().sum((0, 2), dtype=torch.float64)


class _Table:
    """Least errors of the first i coefficients at up to u units of bits, `[n + 1, u + 1]`, and the last group."""

    def __init__(self, errors: Errors, unit: int, most: int) -> None:
        n = len(errors.energies)
        self.errors, self.unit = errors, unit
        self.least = np.zeros((n + 1, most + 1))
        self.last = np.zeros((n + 1, most + 1), dtype=np.uint8)
        for end in range(1, n + 1):
            best = self.least[end - 1] + errors.energies[end - 1]
            for number, (size, kind) in enumerate(errors.options):
                spent = cost(size, kind) // unit
                if kind == 0 or size > end or spent > most:
                    continue
                tried = self.least[end - size, : most + 1 - spent] + errors.of[size, kind][end - size]
                better = tried < best[spent:]
                best[spent:][better] = tried[better]
                self.last[end, spent:][better] = number
            self.least[end] = best

    @property
    def curve(self) -> Float[np.ndarray, " units"]:
        """Least error of all coefficients at up to each number of units."""
        return self.least[-1]

    def groups(self, units: int) -> Groups:
        """The groups of least error at up to `units`, without coefficients after the last that is stored."""
        found, end = [], len(self.least) - 1
        while end:
            size, kind = self.errors.options[self.last[end, units]]
            found.append((size, kind))
            end, units = end - size, units - cost(size, kind) // self.unit
        while found and found[0][1] == 0:
            found.pop(0)
        return Groups(tuple(size for size, _ in reversed(found)), tuple(kind for _, kind in reversed(found)))


def planned(layers: Sequence[Errors], bits: int) -> list[Groups]:
    """The groups of least total error whose bits of a token, over all layers, are at most `bits`."""
    unit = math.gcd(*(cost(*option) for errors in layers for option in errors.options)) or 1
    units = bits // unit
    curves = []
    for errors in layers:
        # Beyond this more bits change nothing: every coefficient in a group of its own, of the most bits.
        most = max((cost(size, kind) / size for size, kind in errors.of), default=0.0) * len(errors.energies) / unit
        curves.append(_Table(errors, unit, min(units, math.ceil(most))).curve)
    shares = _shares(curves, units)
    return [_Table(errors, unit, share).groups(share) for errors, share in zip(layers, shares, strict=True)]


def _shares(curves: Sequence[Float[np.ndarray, " units"]], units: int) -> list[int]:
    """Units of each layer, at which the sum of the curves is least; of equal ones, fewer for later layers."""
    total = np.zeros(units + 1)
    chosen = []
    for curve in curves:
        best, share = np.full(units + 1, np.inf), np.zeros(units + 1, dtype=np.int32)
        for own, error in enumerate(curve):
            tried = total[: units + 1 - own] + error
            better = tried < best[own:]
            best[own:][better], share[own:][better] = tried[better], own
        total = best
        chosen.append(share)
    left, shares = units, []
    for share in reversed(chosen):
        shares.append(int(share[left]))
        left -= shares[-1]
    return shares[::-1]


def grouped_parts(codec: Codec | None) -> tuple[str, PrincipalComponents, CoefficientQuantizer] | None:
    """Name and object of the principal components, and the quantizer that codes them; None: the codec has neither.

    Raises:
        ConfigError: as `last_stage`.
    """
    quantizer = None if codec is None else codec.quantizer
    said = (
        "PrincipalComponents stand last of their stages, behind none but those of RoPE, and before a "
        "CoefficientQuantizer"
    )
    found = last_stage(codec, PrincipalComponents, isinstance(quantizer, CoefficientQuantizer), said)
    return None if found is None else (*found, cast(CoefficientQuantizer, quantizer))


def joined(codec: Codec, x: Float[Tensor, "heads tokens dim"], rope: Rope | None) -> Float[Tensor, "tokens n"]:
    """States of a layer as the transform sees them, the channels of all heads of a token in a row."""
    for _, stage in codec.stages[:-1]:
        x = stage.forward(x, rope=rope)[0]  # type: ignore[call-arg]
    return x.transpose(0, 1).flatten(1)


def fit_groups(
    codecs: Mapping[Place, Codec], rows: Callable[[Place], Float[Tensor, "tokens n"]]
) -> dict[Place, Tables]:
    """Tables of all codecs, `<part>.<table>`; layers of a side share their bits as their quantizers have it.

    Args:
        rows: states of a place, as `joined` gives them, asked for once.

    Raises:
        ConfigError: as `grouped_parts`.
    """
    parts = {place: found for place, codec in codecs.items() if (found := grouped_parts(codec)) is not None}
    tables: dict[Place, Tables] = {}
    errors: dict[Place, Errors] = {}
    for place, (_, stage, quantizer) in parts.items():
        own = rows(place)
        tables[place] = stage.fit_rows(own)
        seen = own[:: max(1, len(own) // quantizer.tokens)][: quantizer.tokens].float()
        errors[place] = measured((seen - tables[place]["mean"]) @ tables[place]["basis"], quantizer.sizes)
    shared: dict[object, list[Place]] = {}
    for place, (_, _, quantizer) in parts.items():
        shared.setdefault(place[0] if quantizer.budget is Budget.side else place, []).append(place)
    out: dict[Place, Tables] = {}
    for places in shared.values():
        bits = sum(parts[place][2].bits * tables[place]["mean"].shape[1] for place in places)
        for place, groups in zip(places, planned([errors[place] for place in places], math.floor(bits)), strict=True):
            name, _, quantizer = parts[place]
            basis = tables[place]["basis"][:, : max(groups.used, 1)].contiguous()
            out[place] = {f"{name}.mean": tables[place]["mean"], f"{name}.basis": basis}
            out[place] |= {f"quantizer.{table}": found for table, found in quantizer.planned(groups).items()}
    return out
