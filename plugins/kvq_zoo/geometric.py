"""Small groups of channels as a radius and angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs.levels import Array, fixed_point, look_up, nearest_level
from kvq.codecs.packed import pack_parts, unpack_parts
from kvq.codecs.quantizers import Parts, Quantizer, to_stored
from kvq.errors import ConfigError, Unsupported

_ANGLE_BITS = 8
_ANGLE_NODES, _ANGLE_WEIGHTS = np.polynomial.legendre.leggauss(64)


@lru_cache(maxsize=64)
def angle_levels(bits: int, level: int) -> tuple[float, ...]:
    """The 2^bits angles, in radians and ascending, of least squared error at a level of the transform.

    Level 1 holds the angle of two coordinates, uniform on [0, 2π): the middles of equal arcs. Level l >= 2 holds the
    angle of two radii of 2^(l-1) Gaussian coordinates each, on [0, π/2] with density ∝ sin^(2^(l-1) - 1)(2θ); means of
    cells by Gauss-Legendre quadrature.

    Source: PolarQuant (arXiv 2502.02617), Lemma 2 and section 4.1.
    """
    count = 2**bits
    if level == 1:
        return tuple((np.arange(count) + 0.5) * 2 * math.pi / count)

    def centroids(levels: Array) -> Array:
        ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [math.pi / 2]])
        half = np.diff(ends)[:, None] / 2
        at = ends[:-1, None] + half * (1 + _ANGLE_NODES)
        weight = np.sin(2 * at) ** (2 ** (level - 1) - 1) * _ANGLE_WEIGHTS
        means: Array = (at * weight).sum(-1) / weight.sum(-1)
        return means

    return tuple(fixed_point(centroids, (np.arange(count) + 0.5) * math.pi / 2 / count))


@lru_cache(maxsize=64)
def _angle_table(
    bits: int, level: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, " levels"], Float[Tensor, " middles"], Float[Tensor, "levels 2"]]:
    """Angles, the midpoints of neighbouring angles, and cosine and sine of the angles."""
    levels = torch.tensor(angle_levels(bits, level), dtype=torch.float64)
    turned = torch.stack([levels.cos(), levels.sin()], -1)
    found = (levels, (levels[1:] + levels[:-1]) / 2, turned)
    return tuple(part.to(device, dtype) for part in found)  # type: ignore[return-value]


class PolarQuantizer(Quantizer):
    """Groups of 2^L channels as a radius and 2^L - 1 angles: those of pairs, of pairs of their radii, and so on.

    Args:
        angle_bits: bits of the angles of each of the L levels. 4/2/2/2 is 62 bits for 16 channels, radius included.

    Stores `codes.<level>.<plane>` (`[..., heads, tokens, head_dim / 2^level]` angles) and `radius`
    `[..., heads, tokens, head_dim / 2^L]` in fp16. Expects vectors of random direction (a rotation before it).

    Source: PolarQuant (arXiv 2502.02617), section 4; its codebooks found ahead of time.
    """

    version: ClassVar[int] = 1
    token_group = 1

    def __init__(self, angle_bits: Sequence[int] = (4, 2, 2, 2)) -> None:
        if not angle_bits or any(not isinstance(bits, int) or not 1 <= bits <= _ANGLE_BITS for bits in angle_bits):
            raise ConfigError(f"angle_bits={list(angle_bits)}: one number of bits per level, each 1 to {_ANGLE_BITS}")
        self.angle_bits = tuple(angle_bits)

    @property
    def index_bits(self) -> dict[str, int]:
        """Bits of an angle code at each level, by part name; see `Quantizer.index_bits`."""
        return {f"codes.{level}": bits for level, bits in enumerate(self.angle_bits, 1)}

    @property
    def channels(self) -> int:
        """Channels that share a radius."""
        return int(2 ** len(self.angle_bits))

    def check(self, head_dim: int) -> None:
        if head_dim % self.channels:
            raise Unsupported(
                f"head_dim={head_dim}: {len(self.angle_bits)} levels take {self.channels} channels at a time"
            )

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        self.check(x.shape[-1])
        parts: Parts = {}
        radius = x
        for level, bits in enumerate(self.angle_bits, 1):
            first, second = radius.unflatten(-1, (-1, 2)).unbind(-1)
            angle = torch.atan2(second, first)
            if level == 1:
                angle = torch.where(angle < 0, angle + 2 * math.pi, angle)
            middles = _angle_table(bits, level, x.dtype, x.device)[1]
            parts |= pack_parts(nearest_level(angle, middles), bits, f"codes.{level}")
            radius = torch.hypot(first, second)
        return parts | {"radius": to_stored(radius, torch.float16)}

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        radius = parts["radius"].to(dtype)
        for level in range(len(self.angle_bits), 0, -1):
            bits = self.angle_bits[level - 1]
            codes = unpack_parts(parts, bits, shape[-2], f"codes.{level}")
            turned = look_up(_angle_table(bits, level, dtype, codes.device)[2], codes)
            radius = (radius.unsqueeze(-1) * turned).flatten(-2)
        return radius
