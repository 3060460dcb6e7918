"""NSNQuant's stages over the channels of a block: centering (Shift) and scaling by the standard deviation."""

from __future__ import annotations

import enum
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs.double_quant import DoubleQuant
from kvq.codecs.quantizers import choice
from kvq.codecs.stages import Side, Stage, restored, stored_side

WEISZFELD_STEPS = 32
"""On blocks of 64 normalized tokens the 32nd step moves the centre by less than fp16 resolves."""


class Center(enum.Enum):
    """The vector that is subtracted: the mean of the tokens, or their geometric median."""

    mean = "mean"
    median = "median"


class ChannelShift(Stage):
    """Subtract one vector per head and block, so that the channels are centered.

    Args:
        center: `mean` (NSNQuant, section 3.2), or `median`: the geometric median (appendix D.1).
        double_quant: store the vector in a few bits; the decoded vector is subtracted. None = fp16.

    Raises:
        ConfigError: unknown center.
    """

    version: ClassVar[int] = 1

    def __init__(self, center: Center | str = Center.mean, double_quant: DoubleQuant | None = None) -> None:
        self.center = choice(Center, center, "center")
        self.double_quant = double_quant

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        offset = x.mean(-2, keepdim=True)
        if self.center is Center.median:
            offset = geometric_median(x, offset)
        side = stored_side("offset", offset, self.double_quant)
        if self.double_quant is not None:
            offset = restored("offset", side, self.double_quant, 1, x.shape[-1], x.dtype)
        return x - offset, side

    @override
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y + restored("offset", side, self.double_quant, 1, y.shape[-1], y.dtype)


def geometric_median(
    x: Float[Tensor, "*lead tokens dim"], start: Float[Tensor, "*lead 1 dim"]
) -> Float[Tensor, "*lead 1 dim"]:
    """The point with the least sum of distances to the tokens, by Weiszfeld's iteration from `start`."""
    point = start
    for _ in range(WEISZFELD_STEPS):
        distance = torch.linalg.vector_norm(x - point, dim=-1, keepdim=True)
        # A token on the point would have infinite weight; a tiny distance lets it dominate without a division by zero.
        weight = 1 / distance.clamp_min(torch.finfo(x.dtype).eps)
        point = (x * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True)
    return point


class ChannelScale(Stage):
    """Divide each channel by its sample standard deviation over the tokens of the block (NSNQuant, appendix D.2).

    Stored in fp16, one number per head, channel and block. A constant channel stores 0 and decodes to 0, so this stage
    is for use after a `ChannelShift`, which makes such a channel 0.
    """

    version: ClassVar[int] = 1

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        free = max(x.shape[-2] - 1, 1)
        deviation = ((x - x.mean(-2, keepdim=True)).square().sum(-2, keepdim=True) / free).sqrt()
        return x / deviation.masked_fill(deviation == 0, 1), {"scale": deviation}

    @override
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y * side["scale"]
