"""TurboQuant's inner-product form: signs of a random sketch of the error of scalar codes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs.lloyd_max import MAX_BITS, LloydMaxQuantizer, Marginal
from kvq.codecs.packed import pack, unpack
from kvq.codecs.quantizers import CodeQuantizer, Parts, Quantizer, checked_choice, more_bits, to_stored
from kvq.codecs.rotations import per_block, rotation
from kvq.errors import Unsupported

Sketch = Literal["gaussian", "orthogonal", "identity"]
"""Rows of the sketch: independent Gaussians (QJL, TurboQuant), or orthogonal directions of the same length.

`identity`: no sketch. A sign stands for the coordinate of the error itself, of its root mean square (LMDeploy).
"""


class InnerProductQuantizer(CodeQuantizer):
    """TurboQuant-prod: b-1 bits of `LloydMaxQuantizer`, one sign bit per coordinate of S·r for the error r, and |r|.

    Decoding adds |r| / (D c) · Sᵀ sign(S r), where c = E|s·u| for a unit vector u: √(2/π) for Gaussian rows. Over draws
    of S, <q, x̂> is an unbiased estimate of <q, x>; for one S, keys that share a mean share an error. Without a sketch
    (`identity`) decoding adds |r| / √D · sign(r), and |r| / √D is stored: a smaller error, and no unbiased estimate.

    Args:
        bits: bits per element, 2-8: b-1 for the codes, 1 for the signs.
        sketch: `gaussian`, `orthogonal` rows of length √D, or `identity`.
        seed: seed of S, independent of data seeds and of the seed of a rotation before it.
        extra_bits: added to `bits`, for codecs of tokens or channels with more or fewer bits than others.
        marginal: of the codes, as `LloydMaxQuantizer`.

    Stores `codes.<plane>`, `signs` (one bit per coordinate) and `rest` (|r|, fp16). No gain: that would bias it.

    Source: TurboQuant (arXiv 2504.19874), algorithm 2; QJL (arXiv 2406.03482), definition 3.1.
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(
        self,
        bits: int,
        sketch: Sketch | str = "gaussian",
        seed: int = 1,
        extra_bits: int = 0,
        marginal: Marginal | str = "sphere",
    ) -> None:
        self.bits, self.seed = bits + extra_bits, seed
        if not 2 <= self.bits <= MAX_BITS:
            raise Unsupported(
                f"bits={self.bits}: the inner-product form has 2 to {MAX_BITS} bits, one of them for signs"
            )
        self.sketch: Sketch = checked_choice(Sketch, sketch, "sketch")
        self._codes = LloydMaxQuantizer(self.bits - 1, marginal=marginal)

    @property
    def indices(self) -> dict[str, int]:
        return self._codes.indices

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        bits = more_bits(self, extra, most).bits
        return InnerProductQuantizer(bits, self.sketch, self.seed, marginal=self._codes.marginal)

    def check(self, head_dim: int) -> None:
        self._codes.check(head_dim)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`codes.<plane>`, `signs` and `rest` `[..., heads, tokens, 1]`."""
        parts = self._codes.encode(x, dtype)
        rest = x - self._codes.decode(parts, x.shape, x.dtype)
        norm = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        if self.sketch == "identity":
            negative, norm = rest < 0, norm / x.shape[-1] ** 0.5
        else:
            negative = per_block(rest, sketch_matrix(self.sketch, x.shape[-1], self.seed, x.dtype, x.device).mT) < 0
        return parts | {"signs": pack(negative.to(torch.uint8), 1)[0], "rest": to_stored(norm, torch.float16)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        x = self._codes.decode({k: part for k, part in parts.items() if k.startswith("codes.")}, shape, dtype)
        signs = unpack([parts["signs"]], 1, shape[-2]).to(dtype).mul_(-2).add_(1)
        if self.sketch == "identity":
            return torch.addcmul(x, signs, parts["rest"].to(dtype))
        estimate = per_block(signs, sketch_matrix(self.sketch, shape[-1], self.seed, dtype, signs.device))
        scale = parts["rest"].to(dtype) / (shape[-1] * sketch_constant(self.sketch, shape[-1]))
        return torch.addcmul(x, estimate, scale)


@lru_cache(maxsize=64)
def sketch_matrix(
    sketch: Sketch, dim: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "dim dim"]:
    """S, one direction per row."""
    if sketch == "orthogonal":
        return (rotation(dim, seed, torch.float64, torch.device("cpu")) * dim**0.5).to(device, dtype)
    matrix = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix.to(device, dtype)


def sketch_constant(sketch: Sketch, dim: int) -> float:
    """E|s·u| of a row s and a unit vector u: √(2/π); for rows of length √D, √D times E|coordinate of the sphere|."""
    if sketch == "gaussian":
        return math.sqrt(2 / math.pi)
    return math.sqrt(dim / math.pi) * math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2))
