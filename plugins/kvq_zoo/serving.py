"""What serving engines do beside common formats: one scale for a layer, queries in 8 bits, and TurboMind's integers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.codecs.calibrated import Calibrated, States, Tables
from kvq.codecs.packed import pack_parts
from kvq.codecs.quantizers import Parts, to_stored
from kvq.codecs.stages import Side, Stage
from kvq.codecs.uniform import UniformQuantizer
from kvq.errors import Unsupported, require
from kvq.methods.policies import Policy


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

    def __init__(self, divisor: float | int, per_head: bool = False) -> None:
        require(divisor > 0, "divisor", divisor, "above 0")
        self.divisor, self.per_head = divisor, per_head

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`scale`: the largest magnitude of the layer's states (or of each head's) over `divisor`; 1 if it is 0."""
        largest = x.abs().amax((1, 2) if self.per_head else (0, 1, 2)).float().view(-1, 1, 1)
        return {"scale": (largest / self.divisor).masked_fill(largest == 0, 1)}

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        """x over the table `scale`; nothing is stored."""
        return x / self.table("scale", x), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        """y times the table `scale`."""
        return y * self.table("scale", y)


class StaticChannelScale(LayerScale):
    """Divide each channel of each KV head by (largest magnitude on the calibration text) / `divisor`: 127 or 7.

    Table: `scale` `[heads, 1, dim]` in fp32; 1 where a channel is 0. Its bytes belong to the model, not to tokens.

    Source: ONNX Runtime's GroupQueryAttention with `k_quant_type` PER_CHANNEL (its pull request 28576).
    """

    version: ClassVar[int] = 1

    def __init__(self, divisor: float | int) -> None:
        super().__init__(divisor)

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`scale`, of one layer's keys or values."""
        largest = x.abs().amax(1, keepdim=True).float()
        return {"scale": (largest / self.divisor).masked_fill(largest == 0, 1)}


class SmoothedChannels(LayerScale):
    """Divide each channel of each KV head by the square root of its largest magnitude on the calibration text.

    Table: `scale` `[heads, 1, dim]` in fp32; 1 where a channel is 0. Queries are multiplied by it, so it takes no bits.

    Source: VecInfer (arXiv 2510.06175), equation 4, as allocators/vecinfer.py of rajveer43/VeloxQuant-MLX has it.
    """

    version: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__(divisor=1)

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`scale`, of one layer's keys."""
        largest = x.abs().amax(1, keepdim=True).double()
        return {"scale": largest.sqrt().masked_fill(largest == 0, 1).float()}


class TurboMindQuantizer(UniformQuantizer):
    """A grid per token and head in the 16 bits of the states, as LMDeploy's TurboMind computes it.

    Scale (max - min) / (2^b - 1) and min are rounded to bf16 for bf16 states, else to fp16. Code = round((x - min) (1 /
    scale)), halves to even, with each step rounded to the same dtype; x̂ = scale code + min. As there, the reciprocal of
    an fp16 scale below 1/65,504 is infinite: at 8 bits, all values of a token whose range is below .0039 get the
    largest code, but for the smallest value (infinity times 0), which gets code 0.

    Args:
        bits: bits per code, 1-8.

    Raises:
        Unsupported: other bits.

    Source: `warp_stats` and `ConvertKvCache` of LMDeploy's quantization.h.
    """

    version: ClassVar[int] = 1

    def __init__(self, bits: int) -> None:
        require(bits <= 8, "bits", bits, "TurboMind's grid has 1 to 8 bits", Unsupported)
        super().__init__(bits, "per_token")

    @property
    def is_affine(self) -> bool:
        """No: the dtype of the scales is not always fp16."""
        return False

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Codes (`codes.<plane>`), `scale` and `zero_point` `[..., heads, tokens, 1]` in the states' 16 bits."""
        own = dtype if dtype is torch.bfloat16 else torch.float16
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        scale, low = to_stored((high - low) * (1 / (2**self.bits - 1)), own), to_stored(low, own)
        steps = (to_stored(x, own) - low) * scale.float().reciprocal().to(own)
        codes = steps.float().nan_to_num_(0).round_().clamp_(0, (2**self.bits - 1))
        return pack_parts(codes, self.bits) | {"scale": scale, "zero_point": low}


class QueryCast(Policy):
    """Casts queries to e4m3 after RoPE, saturating, as engines do whose attention multiplies 8-bit floats.

    Their scale is 1, as a checkpoint without one has it. Nothing of it is stored.

    Source: `query_quant` of vLLM's `Attention`, for the backends with `supports_quant_query_input`.
    """

    version: ClassVar[int] = 1
    setting = "query_cast"
    does = "casts queries"
    excludes = frozenset({"codecs_alone", "own_tokens", "packed_attention"})

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """A `CastQueriesLayer` with the sides and the window of `like`; of a layer in full precision, `like` itself."""
        quantized = like.key.codec is not None or like.value.codec is not None
        return CastQueriesLayer(like.key, like.value, like.window) if quantized else like


class CastQueriesLayer(KVCacheLayer):
    """Keys and values of one layer whose queries are e4m3 numbers when attention reads them."""

    no_padding_reason = "casts the queries of all sequences at once"

    @property
    def observes(self) -> bool:
        return True

    def observe(self, attended: Attended) -> None:
        """Cast the queries in place, which attention is about to read."""
        query = attended.query
        query.copy_(query.clamp(-448, 448).to(torch.float8_e4m3fn))
