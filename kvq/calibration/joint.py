"""Second moments of all KV heads of a token and of the loss's gradients at them, summed up without keeping states."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache.rotary import styles_of
from kvq.calibration.budget import Place
from kvq.calibration.collect import Kept, drawn_positions, loss, made_once, ropes_of, text_name
from kvq.codecs import JointMoments, Rope
from kvq.config.method import CalibrationConfig
from kvq.errors import DataError, Unsupported
from kvq.models import LoadedModel


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
            wide = rope.turn(wide, back=True)
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
