"""One number per layer, or per KV head, that every value of it is divided by, taken from the calibration text."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs.calibrated import Calibrated, Tables
from kvq.codecs.stages import Side, Stage
from kvq.errors import ConfigError


class LayerScale(Calibrated, Stage):
    """Divide by (largest magnitude on the calibration text) / `divisor`, as checkpoints with static scales do.

    Args:
        divisor: 127 (int8), 448 (e4m3), 6 · 448 = 2688 (NVFP4), or 100 and 200 (the run-time estimates of older vLLM).
        per_head: a number for each KV head instead of one for the layer.

    Table: `scale` `[1 or heads, 1, 1]` in fp32; 1 where all states are 0. Its bytes belong to the model, not to tokens.

    Raises:
        ConfigError: a divisor that is not positive.

    Source: ModelOpt's `nvfp4_tensor`, vLLM's `quantized_kvcache.md`, TensorRT-LLM's reference on precision.
    """

    version: ClassVar[int] = 1

    token_group = 1

    def __init__(self, divisor: float, per_head: bool = False) -> None:
        if not divisor > 0:
            raise ConfigError(f"divisor={divisor}: above 0")
        self.divisor, self.per_head = divisor, per_head

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: another head dim than that of the calibration."""
        self.check_shape(head_dim)

    @override
    def fit(
        self, x: Float[Tensor, "heads tokens dim"], gradients: Float[Tensor, "heads tokens dim"] | None, seed: int
    ) -> Tables:
        """`scale` of the states' largest magnitude."""
        largest = x.abs().amax((1, 2) if self.per_head else (0, 1, 2)).float().view(-1, 1, 1)
        return {"scale": (largest / self.divisor).masked_fill(largest == 0, 1)}

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return x / self.table("scale", x), {}

    @override
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y * self.table("scale", y)
