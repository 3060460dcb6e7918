"""KVarN: deviations of both axes of a block evened out."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.quantizers import Axis, checked_choice
from kvq.codecs.stages import Side, Stage
from kvq.errors import at_least

_DEVIATIONS = (1e-3, 1e3)
"""Bounds of the deviations that enter a scale."""
_LOGS = (-0.3, 10.0)
"""Bounds of the logarithm of a scale: none is below 0.74, so what lies far below unit variance is hardly lifted."""
_LEAST = 1e-8
"""Deviations that divide are at least this."""
Imbalance = Literal["deviation", "variance"]
"""What the largest and the smallest are compared of: standard deviations (KVarN's code), variances (its paper)."""


class VarianceBalance(Stage):
    """Divide by the scales of one axis of a block, found by evening out the deviations of both axes in turn.

    Each iteration multiplies the kept scales, then those of the other axis, by the standard deviations (unbiased) of
    what is divided by all scales so far. Of the start and the iterations, the one of least imbalance is taken, the
    later one on a tie; the imbalance is largest over smallest deviation, summed over both axes.

    The scales of the other axis only steer the iteration. They belong to a quantizer that follows with groups along
    this axis: a uniform grid with its own scale and offset for each line has the same codes whatever the line is
    multiplied by, and stores scale and offset of the line as it is, which are KVarN's with its scales folded in.

    Args:
        kept: whose scales divide and are stored: `per_token` (before a quantizer per channel), or `per_channel`
            (before one per token).
        iterations: 0: no scales.
        imbalance: see `Imbalance`.

    Stores `scale`, one fp16 number per head and token of a block, or per head and channel.

    Raises:
        ConfigError: negative iterations, an unknown name.

    Source: KVarN (arXiv 2606.03458); bounds and order are those of its code (vLLM pull request 46812).
    """

    version: ClassVar[int] = 1

    def __init__(self, kept: Axis | str, iterations: int = 8, imbalance: Imbalance | str = "deviation") -> None:
        at_least("iterations", iterations, 0)
        self.kept: Axis = checked_choice(Axis, kept, "kept")
        self.iterations = iterations
        self.imbalance: Imbalance = checked_choice(Imbalance, imbalance, "imbalance")

    def scales(self, x: Float[Tensor, "*lead tokens dim"]) -> Tensor:
        """Scales of the axis `kept` that divide x, before rounding to fp16: `[..., tokens, 1]` or `[..., 1, dim]`."""
        along, across = (-1, -2) if self.kept == "per_token" else (-2, -1)
        own, other = (torch.zeros_like(_deviation(x, dim)) for dim in (along, across))
        best, least = own.exp(), self._imbalance(x)
        balanced = x
        for _ in range(self.iterations):
            own = own.add(_deviation(balanced, along).clamp(*_DEVIATIONS).log()).clamp(*_LOGS)
            balanced = x / own.exp() / other.exp()
            other = other.add(_deviation(balanced, across).clamp(*_DEVIATIONS).log()).clamp(*_LOGS)
            balanced = x / own.exp() / other.exp()
            found = self._imbalance(balanced)
            best = torch.where(found <= least, own.exp(), best)
            least = torch.minimum(found, least)
        return best

    def _imbalance(self, x: Float[Tensor, "*lead tokens dim"]) -> Float[Tensor, "*lead 1 1"]:
        """Largest over smallest standard deviation (or variance) of tokens, plus the same of channels; 2 at least."""
        ratios = []
        for dim in (-1, -2):
            deviation = _deviation(x, dim)
            ratios.append(deviation.amax((-1, -2), True) / deviation.amin((-1, -2), True).clamp_min(_LEAST))
        if self.imbalance == "variance":
            ratios = [ratio.square() for ratio in ratios]
        return ratios[0] + ratios[1]

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        """x over its scales, and `scale`."""
        scale = self.scales(x)
        return x / scale, {"scale": scale}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        """y times the stored `scale`."""
        return y * side["scale"]


def _deviation(x: Tensor, dim: int) -> Tensor:
    """Unbiased standard deviation along an axis; 0 of a single element."""
    return x.std(dim, correction=min(1, x.shape[dim] - 1), keepdim=True)
