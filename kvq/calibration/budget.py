"""One budget of bits for all layers and sides, from moments of states and gradients: each bit goes where it saves most.

Second moments of all KV heads of a token and of the loss's gradients at them are summed up without keeping states. A
part that shares bits says what each further bit of each of its components saves in nats (`Demand`). Bits are given in
the order of what they save, until the budget is spent: the water level is what the last one saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvq.cache.rotary import styles_of
from kvq.calibration.collect import Kept, drawn_positions, loss, made_once, ropes_of, text_name
from kvq.codecs import Codec, ComponentQuantizer, FisherTransform, JointMoments, Rope, Tables, Widths
from kvq.codecs.stages import Stage
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models import LoadedModel

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


Transform = TypeVar("Transform", bound=Stage)


def last_stage(codec: Codec | None, kind: type[Transform], shares: bool, said: str) -> tuple[str, Transform] | None:
    """The name of the transform of this kind that ends the stages of a codec, and it.

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
    """Name of the transform, it, and the quantizer that shares bits; None: the codec has neither.

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


@dataclass
class _Sums:
    """Sums over tokens of one side of a layer, in fp64."""

    heads: int = 0
    tokens: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0
    gradients: Tensor | float = 0.0
    label: str = field(default="")

    def see(self, x: Float[Tensor, "1 heads tokens dim"], rope: Rope | None, kept: Tensor) -> None:
        rows = self._rows(x, rope, kept, "state")
        self.heads, self.tokens = x.shape[1], self.tokens + len(rows)
        self.first, self.second = self.first + rows.sum(0), self.second + rows.mT @ rows

    def see_gradient(self, x: Float[Tensor, "1 heads tokens dim"], rope: Rope | None, kept: Tensor) -> None:
        rows = self._rows(x, rope, kept, "gradient")
        self.gradients = self.gradients + rows.mT @ rows

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
        mean = torch.as_tensor(self.first) / self.tokens
        covariance = torch.as_tensor(self.second) / self.tokens - torch.outer(mean, mean)
        return JointMoments(mean, covariance, torch.as_tensor(self.gradients) / self.tokens, self.heads, self.tokens)


def collect_joint(
    loaded: LoadedModel,
    windows: Int[Tensor, "samples length"],
    tokens: int | None = None,
    seed: int = 0,
    left_out: int = 1,
    before_rope: bool = True,
) -> dict[Place, JointMoments]:
    """Moments of keys and values of every layer that computes them, by one backward pass per window.

    Gradients are those of a window's loss summed over its tokens: what noise in one token's state costs all later
    tokens. Memory: the activations of one window, and 2 n² numbers in fp64 per layer and side.

    Args:
        tokens: number of tokens that count, at the same positions in every layer, drawn by `seed`; None: all.
        left_out: first tokens of a window that do not count.
        before_rope: keys and their gradients before RoPE, where the model has it.

    Raises:
        DataError: states or gradients that are not finite, windows without tokens that count.
        Unsupported: latents; a rotary embedding that cannot be undone; attentions that do not put their keys into the
            cache they are given.
    """
    if getattr(loaded.text_config, "kv_lora_rank", None):
        raise Unsupported("model: caches latents; a Fisher transform is of keys and values of heads")
    layers = len(styles_of(loaded.model))
    sums: dict[Place, _Sums] = {}
    for window, positions in drawn_positions(windows, tokens, seed):
        kept = positions[positions >= left_out]
        with ropes_of(loaded) as found:

            def see(
                index: int, key: Tensor, value: Tensor, kept: Tensor = kept, found: dict[int, Rope] = found
            ) -> tuple[Tensor, Tensor]:
                states = {"key": key, "value": value}
                for side, part in states.items():
                    rope = found.get(index) if before_rope and side == "key" else None
                    own = sums.setdefault((side, index), _Sums(label=f"layer {index} {side}s"))
                    own.see(part, rope, kept)
                    if not part.requires_grad:  # the first layer's: the weights are frozen
                        states[side] = part = part.detach().requires_grad_()
                    part.register_hook(partial(own.see_gradient, rope=rope, kept=kept))
                return states["key"], states["value"]

            loss(loaded, window, see, backward=True)
    if len(sums) != 2 * layers:
        raise Unsupported(f"model: {type(loaded.model).__name__} put keys of {len(sums) // 2} of {layers} layers away")
    if not all(own.tokens for own in sums.values()):
        raise DataError(
            f"calibration: windows of {windows.shape[1]} tokens, of which the first {left_out} are left out"
        )
    return {place: sums[place].moments for place in sorted(sums)}


_Collected = tuple[dict[Place, JointMoments], float]
_kept: Kept[dict[Place, JointMoments]] = {}


def moments_of(
    loaded: LoadedModel, windows: Tensor, settings: CalibrationConfig, left_out: int, before_rope: bool
) -> _Collected:
    """As `collect_joint`, once for the methods of a sweep; and the seconds it took, where it was not done just now."""
    return made_once(
        _kept,
        (*text_name(loaded, windows, settings), left_out, before_rope),
        lambda: collect_joint(loaded, windows, settings.tokens, settings.seed, left_out, before_rope),
    )
