"""One budget of bits for all layers and sides: each bit goes where it saves the most nats.

A part that shares bits says what each further bit of each of its components saves (`Demand`). Bits are given in the
order of what they save, until the budget is spent: the water level is what the last one saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvq.codecs import Codec, ComponentQuantizer, FisherTransform, JointMoments, Tables, Widths
from kvq.errors import ConfigError, Unsupported

Place = tuple[str, int]
"""A side and the index of a layer."""


@dataclass(frozen=True)
class Demand:
    """What bits save: `gains[i, b]` is what bit b + 1 of component i saves, in nats per token; `bits` is the budget."""

    gains: Float[Tensor, "components steps"]
    bits: float | int


def shared_out(demands: Sequence[Demand]) -> list[UInt8[Tensor, " components"]]:
    """Bits of every component, from one budget: the sum of those of all demands, rounded to a whole number.

    A bit never counts for more than the one before it. Of equal gains, lower bits come first, then earlier components.
    """
    steps = [demand.gains.double().cummin(1).values for demand in demands]
    most = max(own.shape[1] for own in steps)
    padded = [torch.nn.functional.pad(own, (0, most - own.shape[1]), value=-torch.inf) for own in steps]
    together = torch.cat(padded)
    ranked = together.T.flatten()  # bit after bit, so that a stable sort keeps their order
    budget = min(round(sum(demand.bits for demand in demands)), int(ranked.isfinite().sum()))
    chosen = torch.zeros(len(ranked), dtype=torch.uint8)
    chosen[ranked.argsort(descending=True, stable=True)[:budget]] = 1
    widths = chosen.view(most, -1).sum(0).to(torch.uint8)
    return list(widths.split([len(own) for own in steps]))


def joint_parts(codec: Codec | None) -> tuple[str, FisherTransform, ComponentQuantizer] | None:
    """Name of the transform, it, and the quantizer that shares bits; None: the codec has neither.

    Raises:
        ConfigError: one without the other, or something between them or before, other than stages of RoPE.
    """
    if codec is None:
        return None
    names = [name for name, stage in codec.stages if isinstance(stage, FisherTransform)]
    quantizer = codec.quantizer
    shares = isinstance(quantizer, ComponentQuantizer) and quantizer.widths is not Widths.equal
    if not names and not shares:
        return None
    before = [stage for _, stage in codec.stages[:-1]]
    if len(names) != 1 or not shares or codec.stages[-1][0] != names[0] or not all(s.uses_rope for s in before):
        raise ConfigError(
            "a FisherTransform stands last of its stages, behind none but those of RoPE, and its quantizer has "
            "widths=pooled or widths=own"
        )
    return names[0], cast(FisherTransform, codec.stages[-1][1]), cast(ComponentQuantizer, quantizer)


def fit_sharing(codecs: Mapping[Place, Codec], moments: Mapping[Place, JointMoments]) -> dict[Place, Tables]:
    """Tables of all codecs, `<part>.<table>`, which share their bits as their quantizers have it.

    Raises:
        ConfigError: as `joint_parts`.
        Unsupported: a number of heads that a transform cannot do.
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
    widths: dict[Place, Tensor] = {}
    pooled = [place for place, codec in codecs.items() if _quantizer(codec).widths is Widths.pooled]
    if pooled:
        widths |= dict(zip(pooled, shared_out([demands[place] for place in pooled]), strict=True))
    widths |= {place: shared_out([demands[place]])[0] for place in codecs if place not in widths}
    out: dict[Place, Tables] = {}
    for place, codec in codecs.items():
        own = FisherTransform.trimmed(found[place], int((widths[place] > 0).sum()))
        tables = _quantizer(codec).shared_out(own.pop("spectrum")[0], widths[place])
        out[place] = {f"{names[place]}.{name}": table for name, table in own.items()}
        out[place] |= {f"quantizer.{name}": table for name, table in tables.items()}
    return out


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
