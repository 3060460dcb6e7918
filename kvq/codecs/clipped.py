"""Round to nearest per token with a clip ratio that depends on the bits, as in RotateKV."""

from __future__ import annotations

import enum
from typing import ClassVar

from typing_extensions import override

from kvq.codecs.quantizers import Axis, UniformQuantizer, ZeroPoint, choice
from kvq.errors import ConfigError


class Step(enum.Enum):
    """The divisor of the range: the number of steps between codes, 2^b - 1, or RotateKV's b² - 1 (released code)."""

    levels = "levels"
    squared_bits = "squared_bits"


class ClippedQuantizer(UniformQuantizer):
    """Asymmetric per token in groups of channels, with `clip_at_2` of the range at 2 bits, else all of it.

    Args:
        bits: bits per code.
        group_size: channels that share statistics; None = the whole head_dim.
        clip_at_2: ratio applied to both ends of the range at 2 bits.
        zero_point: as `UniformQuantizer`.
        step: `squared_bits` has the codes of `levels` at 2 and 4 bits; at 3 bits its 8 codes span 7/8 of the range.

    Raises:
        ConfigError, Unsupported: as `UniformQuantizer`; `squared_bits` at other bits than 2, 3 and 4, or with a zero
            point that is not rounded.

    Source: RotateKV (arXiv 2501.16383); `squared_bits` follows its released code.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        bits: int,
        group_size: int | None = 128,
        clip_at_2: float = 0.8,
        zero_point: ZeroPoint | str = ZeroPoint.float,
        step: Step | str = Step.levels,
    ) -> None:
        clip = clip_at_2 if bits == 2 else 1.0
        super().__init__(bits, Axis.per_token, group_size, zero_point=zero_point, clip=clip)
        self.step = choice(Step, step, "step")
        if self.step is Step.squared_bits and (bits not in (2, 3, 4) or self.zero_point is not ZeroPoint.integer):
            raise ConfigError(
                f"step=squared_bits: with 2, 3 or 4 bits and zero_point=integer, as released; given bits={bits}, "
                f"zero_point={self.zero_point.name}"
            )

    @property
    @override
    def _divisor(self) -> int:
        return self.bits**2 - 1 if self.step is Step.squared_bits else super()._divisor
