"""Bits shared by all layers and sides: one budget in nats, and the tables of the codecs that share it.

A part that shares bits says what each further bit of each of its components saves in nats (`Demand`). Bits are given in
the order of what they save, until the budget is spent: the water level is what the last one saves.
Gains come from moments of keys, values and gradients over a calibration text, summed up on the way: no states are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvq.cache.rotary import styles_of
from kvq.calibration.collect import (
    Kept,
    Place,
    TextWindows,
    compute_loss,
    drawn_positions,
    made_once,
    ropes_of,
    seen_gradient,
    text_name,
)
from kvq.codecs import Codec, ComponentQuantizer, FisherTransform, JointMoments, Rope, Tables
from kvq.codecs.quantizers import with_prefix
from kvq.codecs.stages import Stage
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.load import LoadedModel

States = Float[Tensor, "1 heads tokens dim"]
BOTH = "both"  # the side of keys and values together
Transform = TypeVar("Transform", bound=Stage)
FEW = 4
"""Observations for each number that is fitted (tokens for each channel), below which there is a warning."""
_kept: Kept[dict[Place, JointMoments]] = {}


@dataclass
class MomentSums:
    """Sums over tokens of one side of a layer, in fp64.

    `fourth` and `third` are Σ |y|⁴ and Σ |y|² y of y = x - `origin`, the mean of the first tokens seen, from which the
    fourth moment about the mean follows without cancellation where means are large.
    """

    heads: int = 0
    tokens: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0
    gradients: Tensor | float = 0.0
    origin: Tensor | None = None
    third: Tensor | float = 0.0
    fourth: float = 0.0
    gradients_fourth: float = 0.0
    label: str = ""

    def see(self, x: States, rope: Rope | None, kept: Int[Tensor, " kept"]) -> None:
        """Add the states of the tokens at `kept`, turned back by `rope`."""
        rows = self._rows(x, rope, kept, "state")
        self.heads, self.tokens = x.shape[1], self.tokens + len(rows)
        self.first, self.second = self.first + rows.sum(0), self.second + rows.mT @ rows
        if len(rows):
            self.origin = rows.mean(0) if self.origin is None else self.origin
            away = rows - self.origin
            squares = away.square().sum(1)
            self.third, self.fourth = self.third + squares @ away, self.fourth + float(squares @ squares)

    def see_gradient(self, x: States, rope: Rope | None, kept: Int[Tensor, " kept"]) -> None:
        """Add the gradients at these tokens."""
        rows = self._rows(x, rope, kept, "gradient")
        self.gradients = self.gradients + rows.mT @ rows
        self.gradients_fourth += float(rows.square().sum(1).square().sum())

    @torch.no_grad()
    def _rows(self, x: Tensor, rope: Rope | None, kept: Tensor, what: str) -> Float[Tensor, "kept n"]:
        wide = x.detach().cpu().double()
        if rope is not None:
            wide = rope.rotate(wide, back=True)
        if not bool(torch.isfinite(wide).all()):
            raise DataError(f"calibration: {self.label}: a {what} is NaN or infinite; model.dtype=float32")
        return wide[0].transpose(0, 1).flatten(1).index_select(0, kept)

    @property
    def moments(self) -> JointMoments:
        """Means over the tokens."""
        mean = torch.as_tensor(self.first) / self.tokens
        covariance = torch.as_tensor(self.second) / self.tokens - torch.outer(mean, mean)
        fisher, m = torch.as_tensor(self.gradients) / self.tokens, mean - torch.as_tensor(self.origin)
        far, linear = float(m @ m), float(m @ torch.as_tensor(self.third)) / self.tokens
        # E |x - mean|⁴, by expanding |y - m|⁴.
        fourth = self.fourth / self.tokens - 4 * linear + 4 * float(m @ covariance @ m)
        fourth += 2 * far * float(covariance.trace()) + 3 * far**2
        return JointMoments(
            mean, covariance, fisher, self.heads, self.tokens, fourth, self.gradients_fourth / self.tokens
        )


def collect_joint(
    loaded: LoadedModel,
    windows: TextWindows,
    tokens: int | None = None,
    seed: int = 0,
    left_out: int = 1,
    before_rope: bool = True,
    both: bool = False,
) -> dict[Place, JointMoments]:
    """Moments of keys and values of every layer that computes them, by one backward pass per window.

    Gradients are those of a window's loss summed over its tokens: what noise in one token's state costs all later
    tokens. Memory: the activations of one window, and 2 n² numbers in fp64 per layer and side.

    Args:
        tokens: number of tokens that count, at the same positions in every layer, drawn by `seed`; None: all.
        left_out: first tokens of a window that do not count.
        before_rope: keys and their gradients before RoPE, where the model has it.
        both: of a token's keys and values in a row, as heads of one side, `both`.
    """
    if getattr(loaded.text_config, "kv_lora_rank", None):
        raise Unsupported("model: caches latents; a Fisher transform is of keys and values of heads")
    layers = len(styles_of(loaded.model))
    sums: dict[Place, MomentSums] = {}
    for window, positions in drawn_positions(windows, tokens, seed):
        kept = positions[positions >= left_out]
        with ropes_of(loaded) as found:

            def see(
                index: int, key: Tensor, value: Tensor, kept: Tensor = kept, found: dict[int, Rope] = found
            ) -> tuple[Tensor, Tensor]:
                turns = found.get(index) if before_rope else None
                turns = turns.to(key.device) if both and turns is not None else turns
                states = {"key": key, "value": value}
                if both and key.shape != value.shape:
                    raise Unsupported(f"model: keys of {key.shape[-1]} channels a head, values of {value.shape[-1]}")
                if both:
                    states = {BOTH: torch.cat([key if turns is None else turns.rotate(key, back=True), value], 1)}
                for side, part in states.items():
                    rope = turns if side == "key" else None
                    own = sums.setdefault((side, index), MomentSums(label=f"layer {index} {side}s"))
                    own.see(part, rope, kept)
                    states[side] = seen_gradient(part, partial(own.see_gradient, rope=rope, kept=kept))
                if both:
                    key, value = states[BOTH].split(key.shape[1], 1)
                    return key if turns is None else turns.rotate(key), value
                return states["key"], states["value"]

            compute_loss(loaded, window, see, backward=True)
    if (seen := len({layer for _, layer in sums})) != layers:
        raise Unsupported(f"model: {type(loaded.model).__name__} put keys of {seen} of {layers} layers away")
    if not all(own.tokens for own in sums.values()):
        raise DataError(f"calibration: windows of {windows.shape[1]} tokens, the first {left_out} of them left out")
    return {place: sums[place].moments for place in sorted(sums)}


def moments_of(
    loaded: LoadedModel,
    windows: TextWindows,
    settings: CalibrationConfig,
    how: tuple[int, bool, bool],
    kept: Kept[dict[Place, JointMoments]],
) -> tuple[dict[Place, JointMoments], float]:
    """As `collect_joint` (`how`: `left_out`, `before_rope`, `both`), `made_once` for runs that share what is `kept`."""
    make = partial(collect_joint, loaded, windows, settings.tokens, settings.seed, *how)
    return made_once(kept, (*text_name(loaded, windows, settings), *how), make)


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


def last_stage(codec: Codec | None, kind: type[Transform], shares: bool, refusal: str) -> tuple[str, Transform] | None:
    """The name and the object of the transform of this kind that is the last stage of a codec.

    None: the codec has neither it nor a quantizer that `shares` bits over components. Raises: ConfigError (`refusal`):
    one without the other, or a transform that is not last, not alone, or behind other stages than RoPE's.
    """
    stages = [] if codec is None else codec.stages
    names = [name for name, stage in stages if isinstance(stage, kind)]
    if not names and not shares:
        return None
    if len(names) != 1 or not shares or stages[-1][0] != names[0] or not all(s.uses_rope for _, s in stages[:-1]):
        raise ConfigError(refusal)
    return names[0], cast(Transform, stages[-1][1])


def joint_parts(codec: Codec | None) -> tuple[str, FisherTransform, ComponentQuantizer] | None:
    """Name and object of the Fisher transform, and the quantizer that shares bits; None: the codec has neither."""
    quantizer = None if codec is None else codec.quantizer
    shares = isinstance(quantizer, ComponentQuantizer) and quantizer.widths != "equal"
    refusal = (
        "a FisherTransform stands last of its stages, behind none but those of RoPE, and its quantizer has "
        "widths=pooled or widths=own"
    )
    found = last_stage(codec, FisherTransform, shares, refusal)
    return None if found is None else (*found, cast(ComponentQuantizer, quantizer))


def fit_sharing(codecs: Mapping[Place, Codec], moments: Mapping[Place, JointMoments]) -> dict[Place, Tables]:
    """Tables of all codecs, `<part>.<table>`, which share their bits as their quantizers have it."""
    parts = {place: joint for place, codec in codecs.items() if (joint := joint_parts(codec)) is not None}
    quantizers = {place: quantizer for place, (_, _, quantizer) in parts.items()}
    found = {place: stage.fit_joint(moments[place]) for place, (_, stage, _) in parts.items()}
    widths = _widths(quantizers, found)
    for place, (_, stage, _) in parts.items():
        if stage.rounds:  # then components are others than those of exact matrices
            found[place] = stage.round_tables(found[place], moments[place], widths[place])
    widths = _widths(quantizers, found)
    out: dict[Place, Tables] = {}
    for place, (name, stage, _) in parts.items():
        own = stage.trim_tables(found[place], int((widths[place] > 0).sum()))
        tables = {"widths": widths[place], "weights": own.pop("spectrum")[0].float()}
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


def fit_components(
    loaded: LoadedModel,
    codecs: Mapping[Place, Codec],
    windows: TextWindows,
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
    windows: TextWindows,
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
    counts = f"{given}: {tokens} tokens for transforms of {channels} channels"
    check_enough(counts, tokens, channels, f"at least as many tokens as channels, better {FEW} times as many")


def check_enough(counts: str, seen: int, fitted: int, refused: str) -> None:
    """Refuse a fit to fewer observations than the numbers that are fitted, and warn of few."""
    if seen < fitted:
        raise DataError(f"{counts}; {refused}")
    if seen < FEW * fitted:
        warnings.warn(f"{counts}; with fewer than {FEW} times as many, a method loses far more", stacklevel=3)
