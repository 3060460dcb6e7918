"""Bits shared by all layers and sides: one budget in nats, and the tables of the codecs that share it.

A part that shares bits says what each further bit of each of its components saves in nats (`Demand`). Bits are given in
the order of what they save, until the budget is spent: the water level is what the last one saves.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvq.calibration.collect import Kept, Place
from kvq.calibration.moments import moments_of
from kvq.codecs import Codec, ComponentQuantizer, FisherTransform, JointMoments, Tables
from kvq.codecs.quantizers import with_prefix
from kvq.codecs.stages import Stage
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models import LoadedModel


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
    """
    stages = [] if codec is None else codec.stages
    names = [name for name, stage in stages if isinstance(stage, kind)]
    if not names and not shares:
        return None
    if len(names) != 1 or not shares or stages[-1][0] != names[0] or not all(s.uses_rope for _, s in stages[:-1]):
        raise ConfigError(said)
    return names[0], cast(Transform, stages[-1][1])


def joint_parts(codec: Codec | None) -> tuple[str, FisherTransform, ComponentQuantizer] | None:
    """Name and object of the Fisher transform, and the quantizer that shares bits; None: the codec has neither."""
    quantizer = None if codec is None else codec.quantizer
    shares = isinstance(quantizer, ComponentQuantizer) and quantizer.widths != "equal"
    said = (
        "a FisherTransform stands last of its stages, behind none but those of RoPE, and its quantizer has "
        "widths=pooled or widths=own"
    )
    found = last_stage(codec, FisherTransform, shares, said)
    return None if found is None else (*found, cast(ComponentQuantizer, quantizer))


def fit_sharing(codecs: Mapping[Place, Codec], moments: Mapping[Place, JointMoments]) -> dict[Place, Tables]:
    """Tables of all codecs, `<part>.<table>`, which share their bits as their quantizers have it."""
    parts: dict[Place, tuple[str, FisherTransform, ComponentQuantizer]] = {}
    for place, codec in codecs.items():
        joint = joint_parts(codec)
        assert joint is not None
        parts[place] = joint
    quantizers = {place: quantizer for place, (_, _, quantizer) in parts.items()}
    found = {place: stage.fit_joint(moments[place]) for place, (_, stage, _) in parts.items()}
    widths = _widths(quantizers, found)
    rounding = {place: stage for place, (_, stage, _) in parts.items() if stage.rounds}
    if rounding:  # then their components are others than those of exact matrices
        found |= {
            place: stage.round_tables(found[place], moments[place], widths[place]) for place, stage in rounding.items()
        }
        widths = _widths(quantizers, found)
    out: dict[Place, Tables] = {}
    for place, (name, stage, quantizer) in parts.items():
        own = stage.trim_tables(found[place], int((widths[place] > 0).sum()))
        tables = quantizer.width_tables(own.pop("spectrum")[0], widths[place])
        out[place] = with_prefix(own, f"{name}.") | with_prefix(tables, "quantizer.")
    return out


def _widths(quantizers: Mapping[Place, ComponentQuantizer], found: Mapping[Place, Tables]) -> dict[Place, Tensor]:
    """The widths of all components, those of pooled quantizers shared out together."""
    demands = {place: demand_of(quantizer, found[place]["spectrum"][0]) for place, quantizer in quantizers.items()}
    pooled = [place for place, quantizer in quantizers.items() if quantizer.widths == "pooled"]
    widths = dict(zip(pooled, shared_out([demands[place] for place in pooled]), strict=True)) if pooled else {}
    return widths | {place: shared_out([demands[place]])[0] for place in quantizers if place not in widths}


def demand_of(quantizer: ComponentQuantizer, spectrum: Float[Tensor, " components"]) -> Demand:
    """What bits save: half of λ times the fall of the error."""
    errors = torch.tensor(quantizer.errors, dtype=torch.float64)
    saved = errors[:-1] - errors[1:]
    return Demand(spectrum.double()[:, None] * saved / 2, quantizer.bits * len(spectrum))


def predicted(quantizer: ComponentQuantizer, spectrum: Tensor, widths: Tensor) -> float:
    """Second-order loss in nats per token of components with these widths: half of Σ λ D."""
    errors = torch.tensor(quantizer.errors, dtype=torch.float64)
    if int(widths.max()) >= len(errors):
        raise Unsupported(f"width {int(widths.max())}: {type(quantizer).__name__} has up to {len(errors) - 1} bits")
    return float((spectrum.double() * errors[widths.long()]).sum() / 2)


FEW = 4
"""Observations for each number that is fitted (tokens for each channel), below which there is a warning."""

_kept: Kept[dict[Place, JointMoments]] = {}


def fit_components(
    loaded: LoadedModel,
    codecs: Mapping[Place, Codec],
    windows: Int[Tensor, "samples length"],
    settings: CalibrationConfig,
    both: bool = False,
) -> tuple[dict[Place, Tables], float]:
    """Tables of all codecs, `<part>.<table>`, and the seconds that earlier methods of a sweep spent on their moments.

    Args:
        both: codecs of keys take values as further heads (`Method.joins_sides`).
    """
    if not codecs:
        return {}, 0.0
    stages = [found[1] for codec in codecs.values() if (found := joint_parts(codec)) is not None]
    left_out = {stage.left_out for stage in stages}
    if len(left_out) > 1:
        raise ConfigError(f"left_out: keys and values leave out {sorted(left_out)} first tokens; the same number")
    folded = any(stage.folded for stage in stages)
    if folded and (norms := [name for name, _ in loaded.model.named_modules() if name.endswith("k_norm")]):
        raise Unsupported(f"folded=true: {norms[0]} stands between W_K and the keys; the components need matrices")
    how = (left_out.pop(), any(codec.uses_rope for codec in codecs.values()), both)
    moments, earlier = moments_of(loaded, windows, settings, how, _kept)
    moments = {("key", at): one for (_, at), one in moments.items()} if both else moments
    _check_tokens(windows, settings, codecs, moments)
    return fit_sharing(codecs, moments), earlier


def _check_tokens(
    windows: Tensor,
    settings: CalibrationConfig,
    codecs: Mapping[Place, Codec],
    moments: Mapping[Place, JointMoments],
) -> None:
    """Warn of few tokens for the channels that share a transform."""
    channels, tokens = 0, 0
    for place, codec in codecs.items():
        parts, own = joint_parts(codec), moments[place]
        assert parts is not None
        together = min((parts[1].heads_together or own.heads) * (2 if parts[1].with_values else 1), own.heads)
        channels, tokens = max(channels, len(own.mean) // own.heads * together), own.tokens
    given = f"calibration.samples={len(windows)}, length={windows.shape[1]}"
    given += "" if settings.tokens is None else f", tokens={settings.tokens}"
    said = f"{given}: {tokens} tokens for transforms of {channels} channels"
    check_enough(said, tokens, channels, f"at least as many tokens as channels, better {FEW} times as many")


def check_enough(said: str, seen: int, fitted: int, refused: str) -> None:
    """Refuse a fit to fewer observations than the numbers that are fitted, and warn of few."""
    if seen < fitted:
        raise DataError(f"{said}; {refused}")
    if seen < FEW * fitted:
        warnings.warn(f"{said}; with fewer than {FEW} times as many, a method loses far more", stacklevel=3)
