"""Points of a lattice for 8 channels with one scale per head and token (NexusQuant)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Size, Tensor
from typing_extensions import override

from kvq.codecs.packing import pack_parts, unpack_parts
from kvq.codecs.quantizers import Parts, Quantizer, to_stored
from kvq.errors import Unsupported

DIM = 8
_CHUNK = 16


class LatticeQuantizer(Quantizer):
    """8 neighbouring channels as the nearer of an integer point with an even sum and a half-integer point.

    A token of a head is divided by its largest magnitude over 2^(bits-1), and points are cut to that range. As in the
    released code, half-integer points have no parity, so the set is larger than E8; what a cut leaves may lie in
    neither part. A point is stored as one number: which of the two parts, and 8 digits of 2^bits + 1 values.

    Args:
        bits: 2 to 4. A point takes 20, 27 or 34 bits: 2.5, 3.375 or 4.25 per channel, without the scale.

    Stores `codes.<i>.<plane>` `[..., heads, tokens, head_dim / 8]`, 16 bits of the number each, and `scale`
    `[..., heads, tokens, 1]` in fp16.

    Raises:
        Unsupported: other bits.

    Source: the code of jagmarques/nexusquant (core/e8_lattice.py, `quantize_perhead`).
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(self, bits: int) -> None:
        if not 2 <= bits <= 4:
            raise Unsupported(f"bits={bits}: LatticeQuantizer takes 2, 3 or 4")
        self.bits = bits

    @property
    def point_bits(self) -> int:
        """Bits of the number of a point."""
        return math.ceil(math.log2(2 * self._values**DIM))

    @property
    def _values(self) -> int:
        return int(2**self.bits + 1)

    @property
    @override
    def indices(self) -> dict[str, int]:
        widths = [min(_CHUNK, self.point_bits - start) for start in range(0, self.point_bits, _CHUNK)]
        return {f"codes.{place}": width for place, width in enumerate(widths)}

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a head dim that is no multiple of 8."""
        if head_dim % DIM:
            raise Unsupported(f"head_dim={head_dim}: lattice points are of {DIM} channels")

    def _points(self, x: Float[Tensor, "*lead 8"]) -> tuple[Tensor, Tensor]:
        """The nearest point of each part of the set, integers first, before they are cut."""
        whole = x.round()
        gap = x - whole
        odd = whole.sum(-1, keepdim=True) % 2 != 0
        worst = gap.abs().argmin(-1, keepdim=True)  # as released: the coordinate nearest to an integer moves
        step = torch.where(gap.gather(-1, worst) >= 0, 1.0, -1.0).to(x.dtype)
        whole = torch.where(odd, whole.scatter_add(-1, worst, step), whole)
        return whole, (x - 0.5).round() + 0.5

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        self.check(x.shape[-1])
        top = 2 ** (self.bits - 1)
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / top
        vectors = (x / scale).unflatten(-1, (-1, DIM))
        whole, half = self._points(vectors)
        nearer = (vectors - half).square().sum(-1) < (vectors - whole).square().sum(-1)
        cut = torch.where(nearer[..., None], half, whole).clamp(-top, top)
        # Digits: an integer point -top to top; a half-integer point counts its values up, the cut ones as the last.
        digits = torch.where(nearer[..., None], (cut + top - 0.5).ceil(), cut + top).long()
        number = nearer.long()
        for place in range(DIM):
            number = number * self._values + digits[..., place]
        parts: Parts = {"scale": to_stored(scale, torch.float16)}
        for place, (name, width) in enumerate(self.indices.items()):
            parts |= pack_parts((number >> (_CHUNK * place)) & ((1 << width) - 1), width, name)
        return parts

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        chunks = [unpack_parts(parts, width, shape[-2], name).long() for name, width in self.indices.items()]
        number = sum((chunk << (_CHUNK * place) for place, chunk in enumerate(chunks)), torch.zeros_like(chunks[0]))
        digits = []
        for _ in range(DIM):
            digits.append(number % self._values)
            number = number // self._values
        top, found = 2 ** (self.bits - 1), torch.stack(digits[::-1], -1).to(dtype)
        half = (found - top + 0.5).clamp(-top, top)
        cut = torch.where((number == 1)[..., None], half, found - top)
        return cut.flatten(-2) * parts["scale"].to(dtype)
