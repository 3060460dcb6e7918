"""Encoding in one pass: rotate, divide by norms, find ranges, round and pack, into the parts that a codec makes.

Stored parts are those of `Codec.encode`, tensor by tensor. A code may differ where a value is within rounding of the
middle between two, because sums are made in another order; nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs import Codec, Rope
from kvq.codecs.quantizers import Parts
from kvq.kernels.attention import HAS_NUMBA, HAS_TRITON
from kvq.kernels.chain import Chain, chain_of

COMPUTED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of states that are encoded in fp32; fp64 ones are a codec's own."""
Encoder = Callable[[Chain, Tensor], Parts]


class FusedCodec(Codec):
    """A codec that encodes as another does, in one pass where there is one for its chain and its blocks."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer
        self.chain = chain_of(codec)

    @override
    def encode_block(self, blocks: Float[Tensor, "*lead heads tokens head_dim"], rope: Rope | None = None) -> Parts:
        encoder = None if self.chain is None else encoder_for(self.chain, blocks)
        if encoder is None:
            return super().encode_block(blocks, rope)
        assert self.chain is not None
        return encoder(self.chain, blocks)


def fused(codec: Codec) -> Codec:
    """The codec, encoding in one pass where that is possible."""
    return FusedCodec(codec) if type(codec) is Codec else codec


def encoder_for(chain: Chain, blocks: Float[Tensor, "batch blocks heads tokens head_dim"]) -> Encoder | None:
    """Triton on CUDA, numba on a CPU, where installed and fit for such blocks; None: the codec's own."""
    if blocks.dtype not in COMPUTED:
        return None
    if blocks.device.type == "cuda" and HAS_TRITON:
        from kvq.kernels import encode_gpu

        return encode_gpu.encode if encode_gpu.fits(chain, blocks) else None
    if blocks.device.type == "cpu" and HAS_NUMBA:
        from kvq.kernels import encode_cpu

        return encode_cpu.encode
    return None
