"""Moments of keys, values and gradients over a calibration text, summed up on the way: no states are kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache.rotary import styles_of
from kvq.calibration.collect import Kept, Place, drawn_positions, loss, made_once, ropes_of, seen_gradient, text_name
from kvq.codecs import JointMoments, Rope
from kvq.config.method import CalibrationConfig
from kvq.errors import DataError, Unsupported
from kvq.models import LoadedModel


@dataclass
class Sums:
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

    def see(self, x: Float[Tensor, "1 heads tokens dim"], rope: Rope | None, kept: Int[Tensor, " kept"]) -> None:
        """Add the states of the tokens at `kept`, turned back by `rope`."""
        rows = self._rows(x, rope, kept, "state")
        self.heads, self.tokens = x.shape[1], self.tokens + len(rows)
        self.first, self.second = self.first + rows.sum(0), self.second + rows.mT @ rows
        if len(rows):
            self.origin = rows.mean(0) if self.origin is None else self.origin
            away = rows - self.origin
            squares = away.square().sum(1)
            self.third, self.fourth = self.third + squares @ away, self.fourth + float(squares @ squares)

    def see_gradient(
        self, x: Float[Tensor, "1 heads tokens dim"], rope: Rope | None, kept: Int[Tensor, " kept"]
    ) -> None:
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
        fisher, fourth = torch.as_tensor(self.gradients) / self.tokens, self._central(mean, covariance)
        return JointMoments(
            mean, covariance, fisher, self.heads, self.tokens, fourth, self.gradients_fourth / self.tokens
        )

    def _central(self, mean: Float[Tensor, " n"], covariance: Float[Tensor, "n n"]) -> float:
        """E |x - mean|⁴, by expanding |y - m|⁴ with m = mean - `origin`."""
        m = mean - torch.as_tensor(self.origin)
        far = float(m @ m)
        linear = float(m @ torch.as_tensor(self.third)) / self.tokens
        square = float(m @ covariance @ m)
        return self.fourth / self.tokens - 4 * linear + 4 * square + 2 * far * float(covariance.trace()) + 3 * far**2


BOTH = "both"


def collect_joint(
    loaded: LoadedModel,
    windows: Int[Tensor, "samples length"],
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
    sums: dict[Place, Sums] = {}
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
                    own = sums.setdefault((side, index), Sums(label=f"layer {index} {side}s"))
                    own.see(part, rope, kept)
                    states[side] = seen_gradient(part, partial(own.see_gradient, rope=rope, kept=kept))
                if both:
                    key, value = states[BOTH].split(key.shape[1], 1)
                    return key if turns is None else turns.rotate(key), value
                return states["key"], states["value"]

            loss(loaded, window, see, backward=True)
    if (seen := len({layer for _, layer in sums})) != layers:
        raise Unsupported(f"model: {type(loaded.model).__name__} put keys of {seen} of {layers} layers away")
    if not all(own.tokens for own in sums.values()):
        raise DataError(
            f"calibration: windows of {windows.shape[1]} tokens, of which the first {left_out} are left out"
        )
    return {place: sums[place].moments for place in sorted(sums)}


def moments_of(
    loaded: LoadedModel,
    windows: Tensor,
    settings: CalibrationConfig,
    how: tuple[int, bool, bool],
    kept: Kept[dict[Place, JointMoments]],
) -> tuple[dict[Place, JointMoments], float]:
    """As `collect_joint` (`how`: `left_out`, `before_rope`, `both`), `made_once` for runs that share what is `kept`."""
    make = partial(collect_joint, loaded, windows, settings.tokens, settings.seed, *how)
    return made_once(kept, (*text_name(loaded, windows, settings), *how), make)
