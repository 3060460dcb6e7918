"""Which kernel reads packed keys and values, and codecs that encode in one pass, by device and method.

Encoding rotates, divides by norms, finds ranges, rounds and packs into the parts that a codec makes, tensor by tensor,
except that a code may differ where a value is halfway between two codes up to rounding, because sums are computed in
another order. NSNQuant's chains run stage by stage, with a compiled search of the codebook.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, Rope, VectorQuantizer
from kvq.codecs.codec import isolated
from kvq.codecs.quantizers import Parts
from kvq.codecs.trellis import Loops
from kvq.kernels import PackedStates
from kvq_kernels.uniform_chain import ROWS, UniformChain, uniform_chain_of

HAS_NUMBA, HAS_TRITON = (importlib.util.find_spec(name) is not None for name in ("numba", "triton"))


def attention_for(
    query: Tensor, keys: PackedStates, values: PackedStates, softcap: float | None = None
) -> tuple[str, Callable[..., Tensor]] | None:
    """Name and function of the attention kernel, `gpu` (Triton) or `cpu` (numba); None: none can read these states."""
    if query.device.type == "cuda" and HAS_TRITON and query.dtype is not torch.float64:
        from kvq_kernels import gpu

        alike = keys.shape == values.shape  # one program reads both
        if alike and gpu.unfit_reason(keys) is None and gpu.unfit_reason(values) is None:
            return "gpu", gpu.attend
    if query.device.type == "cpu" and HAS_NUMBA and query.dtype is not torch.float64 and softcap is None:
        from kvq_kernels import cpu

        if cpu.unfit_reason(keys) is None and cpu.unfit_reason(values) is None:
            return "cpu", cpu.attend
    return None


def trellis_loops(device: str) -> Loops | None:
    """Compiled search and decoding of trellis codes on a type of device: by numba or Triton; None: not installed."""
    if device == "cuda" and HAS_TRITON:
        from kvq_kernels import encode_gpu

        return encode_gpu
    if device == "cpu" and HAS_NUMBA:
        from kvq_kernels import trellis_cpu

        return trellis_cpu
    return None


def fuse(codec: Codec) -> Codec:
    """The codec as a `FusedCodec`; subclasses of `Codec` are returned unchanged."""
    return FusedCodec(codec) if type(codec) is Codec else codec


COMPUTED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of states that are encoded in fp32; the codec itself encodes fp64 ones."""
Encoder = Callable[[UniformChain, Tensor], Parts]
Searcher = Callable[[VectorQuantizer, Tensor], tuple[Parts, Tensor | None]]


class FusedCodec(Codec):
    """A codec with the parts of `codec` that encodes in one pass where a kernel supports chain and blocks."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer
        self.chain = uniform_chain_of(codec)

    def encode_block(
        self,
        blocks: Float[Tensor, "*lead heads tokens head_dim"],
        rope: Rope | None = None,
        dtype: torch.dtype | None = None,
    ) -> Parts:
        """As `Codec.encode_block`: in one pass, or with a compiled codebook search, where a kernel supports it."""
        encoder = None if self.chain is None else encoder_for(self.chain, blocks)
        if encoder is not None:
            assert self.chain is not None
            return encoder(self.chain, blocks)
        if searcher_for(self, blocks) is None or blocks.device.type != "cpu":
            return super().encode_block(blocks, rope, dtype)
        return in_slices(super().encode_block, blocks, rope)

    def _quantize(self, y: Tensor, dtype: torch.dtype) -> tuple[Parts, Float[Tensor, "*lead tokens 1"] | None]:
        """As `Codec._quantize`, with a compiled codebook search where there is one."""
        search = searcher_for(self, y)
        if search is None:
            return super()._quantize(y, dtype)
        assert isinstance(self.quantizer, VectorQuantizer)
        return search(self.quantizer, y)


def searcher_for(codec: Codec, states: Tensor) -> Searcher | None:
    """The compiled nearest-entry search of a `VectorQuantizer` (not e8p), by device; None: the codec's own."""
    quantizer = codec.quantizer
    if type(quantizer) is not VectorQuantizer or quantizer.codebook == "e8p" or states.dtype not in COMPUTED:
        return None
    if states.device.type == "cuda" and HAS_TRITON:
        from kvq_kernels import encode_gpu

        return encode_gpu.search
    if states.device.type == "cpu" and HAS_NUMBA:
        from kvq_kernels import encode_cpu

        return encode_cpu.search
    return None


def encoder_for(chain: UniformChain, blocks: Float[Tensor, "batch blocks heads tokens head_dim"]) -> Encoder | None:
    """The encoder for such blocks: Triton on CUDA, numba on a CPU, where installed; None: the codec's own."""
    if blocks.dtype not in COMPUTED:
        return None
    if blocks.device.type == "cuda" and HAS_TRITON:
        from kvq_kernels import encode_gpu

        return encode_gpu.encode if encode_gpu.fits(chain, blocks) else None
    if blocks.device.type == "cpu" and HAS_NUMBA:
        from kvq_kernels import encode_cpu

        return encode_cpu.encode
    return None


def in_slices(
    encode: Callable[[Tensor, Rope | None], Parts],
    blocks: Float[Tensor, "batch blocks heads tokens head_dim"],
    rope: Rope | None,
) -> Parts:
    """The parts that `encode` makes of the blocks, in slices on the pool's threads that fit the processor's cache.

    `encode` runs in several threads at once.
    """
    from kvq_kernels.cpu import pool

    heads, tokens = blocks.shape[2:4]
    step = max(1, ROWS // (heads * tokens))
    slices = [slice(start, start + step) for start in range(0, blocks.shape[1], step)]

    @isolated()  # threads of a pool have settings of their own
    def one(some: slice) -> Parts:
        turned = None if rope is None else replace(rope, cos=rope.cos[:, some], sin=rope.sin[:, some])
        return encode(blocks[:, some], turned)

    threads = min(torch.get_num_threads(), len(slices))
    encoded = [one(some) for some in slices] if threads == 1 else list(pool(threads).map(one, slices))
    return {name: torch.cat([parts[name] for parts in encoded], 1) for name in encoded[0]}
