"""Extended RaBitQ: the grid point with the largest cosine to a rotated token, by an exact search over rescalings."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Size, Tensor

from kvq.codecs.packed import pack_parts, unpack_parts
from kvq.codecs.quantizers import CodeQuantizer, Gain, Parts, checked_choice
from kvq.errors import Unsupported, require


class RabitqQuantizer(CodeQuantizer):
    """The point of a grid whose direction is nearest to that of a token.

    The grid has the half-integers (2 code - 2^b + 1) / 2 in each coordinate. Decoding gives them over 2^(b-1) √D, so a
    codec's gain makes the length: `parallel` is RaBitQ's unbiased scale <x, x> / <x, c>, `l2` the one of least squared
    error. Over random rotations <q, x̂> is then an unbiased estimate of <q, x>. With 1 bit a code is a sign. Expects
    tokens of random direction (a rotation).

    Args:
        bits: bits per code, 1-8.
        gain: see `Gain`; folds into the token norm before this quantizer.

    Source: Extended RaBitQ (arXiv 2409.09913), for 1 bit RaBitQ (arXiv 2405.12497); grid and scales (delta_mode 1 and
    0): quantizer_standalone.cu of VectorDB-NTU/RabitQ_TurboQuant_KV_Comparison.
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(self, bits: int, gain: Gain | str = "parallel") -> None:
        require(1 <= bits <= 8, "bits", bits, "RaBitQ's grid has 1 to 8 bits", Unsupported)
        self.bits, self.gain = bits, checked_choice(Gain, gain, "gain")

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`codes.<plane>`: the point's index in each coordinate."""
        half = 2 ** (self.bits - 1)
        size = max(1, 2**20 // (half * x.shape[-1]))  # that are sorted together
        rows = x.abs().reshape(-1, x.shape[-1])
        steps = torch.cat([best_steps(some, half) for some in rows.split(size)]).view(x.shape)
        return pack_parts(torch.where(x < 0, half - 1 - steps, half + steps), self.bits)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The grid's points, without their lengths."""
        half = 2 ** (self.bits - 1)
        codes = unpack_parts(parts, self.bits, shape[-2]).to(dtype)
        return (codes + 0.5 - half) / (half * shape[-1] ** 0.5)


def best_steps(sizes: Float[Tensor, "rows dim"], count: int) -> UInt8[Tensor, "rows dim"]:
    """The steps k, 0 to count - 1, for which k + 1/2 has the largest cosine to the magnitudes of each row.

    A rescaling t gives the steps floor(t sizes), at most count - 1, and the best point is among these. They change at
    t = k / size alone (in fp32 here), where the product with the row grows by k / t and the squared length by 2 k.
    """
    steps = torch.arange(1, count, device=sizes.device)
    at = sizes.new_empty(*sizes.shape, count - 1, dtype=torch.float32).copy_(steps / sizes[..., None])  # of a zero: inf
    keys = ((at.view(torch.int32).long() << 32) + steps).flatten(1)  # positive floats are in the order of their bits
    on_cpu = keys.device.type == "cpu"  # there NumPy takes a twentieth of the time of torch
    keys = torch.from_numpy(np.sort(keys.numpy(), -1)) if on_cpu else keys.sort(-1).values
    times, grown = (keys >> 32).int().view(torch.float32), (keys & 255).to(sizes.dtype)
    product = torch.cat([sizes.sum(-1, keepdim=True) / 2, grown / times], 1).cumsum(-1)
    square = torch.cat([torch.full_like(product[:, :1], sizes.shape[-1] / 4), 2 * grown], 1).cumsum(-1)
    best = (product / square.sqrt()).argmax(-1, keepdim=True)
    ends = torch.cat([times.new_zeros(len(times), 1), times], 1).gather(1, best)
    return (at <= ends[..., None]).sum(-1, dtype=torch.uint8)
