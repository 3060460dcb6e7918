"""Coupled quantization (CQ): neighbouring channels share one index into their group's centroids."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from typing_extensions import override

from kvq.codecs.calibrated import Calibrated, Tables
from kvq.codecs.kmeans import codebooks, nearest
from kvq.codecs.packing import MAX_BITS, pack_parts, unpack_parts
from kvq.codecs.quantizers import Parts, Quantizer
from kvq.errors import Unsupported, at_least


class GroupedIndices:
    """Mixin of quantizers whose `channels` contiguous channels share one `code_bits`-bit index into centroids."""

    channels: int
    code_bits: int

    @staticmethod
    def check_indices(channels: int, code_bits: int) -> None:
        """Raises: ConfigError: a number below 1. Unsupported: an index of more than 16 bits."""
        at_least("channels", channels, 1)
        at_least("code_bits", code_bits, 1)
        if code_bits > MAX_BITS:
            raise Unsupported(f"code_bits={code_bits}: an index of coupled channels has 1 to {MAX_BITS} bits")

    def check_groups(self, head_dim: int) -> None:
        """Raises: Unsupported: a head dim that is no multiple of `channels`."""
        if head_dim % self.channels:
            raise Unsupported(f"head_dim={head_dim}: {self.channels} channels are coupled at a time")

    def grouped(self, x: Tensor) -> Float[Tensor, "*lead heads groups tokens channels"]:
        """The groups of channels of `[..., heads, tokens, dim]`."""
        return x.unflatten(-1, (-1, self.channels)).transpose(-3, -2)

    def indices_of(
        self, x: Float[Tensor, "*lead heads tokens dim"], centroids: Float[Tensor, "heads groups count channels"]
    ) -> Integer[Tensor, "*lead heads tokens groups"]:
        """Index of the nearest centroid of every group of channels."""
        points, sets = self.grouped(x), centroids.flatten(0, 1)
        lead = points.shape[:-4]
        blocks = points.reshape(-1, sets.shape[0], *points.shape[-2:])
        # One search per block, so that its indices do not depend on how many blocks are encoded together.
        codes = torch.stack([nearest(block, sets) for block in blocks])
        return codes.view(*lead, *points.shape[-4:-1]).transpose(-2, -1).contiguous()

    def centroids_of(
        self, codes: Integer[Tensor, "*lead heads tokens groups"], centroids: Float[Tensor, "heads groups count c"]
    ) -> Float[Tensor, "*lead heads tokens dim"]:
        """The centroids of indices."""
        heads, groups, count, _ = centroids.shape
        sets = torch.arange(heads * groups, device=codes.device).view(heads, 1, -1)
        found = centroids.flatten(0, 2).index_select(0, (codes.long() + sets * count).flatten())
        return found.view(*codes.shape[:-1], -1)

    def packed(self, codes: Integer[Tensor, "*lead heads tokens groups"]) -> Parts:
        """Indices as stored."""
        return pack_parts(codes, self.code_bits)

    def unpacked(self, parts: Parts, tokens: int) -> Integer[Tensor, "*lead heads tokens groups"]:
        """Inverse of `packed`."""
        return unpack_parts(parts, self.code_bits, tokens)


class CoupledQuantizer(GroupedIndices, Calibrated, Quantizer):
    """`channels` contiguous channels of a head share one `code_bits`-bit index: 4 and 9 give 2.25 bits, 8 and 10 1.25.

    Args:
        channels: channels that are coupled.
        code_bits: bits of an index, 1-16.
        iterations: Lloyd's iterations, at most.

    Stores `codes.<plane>` `[..., heads, tokens, head_dim / channels]`. The centroids, one set for each layer, head and
    group of channels, are fp16 tables of the calibration.

    Raises:
        ConfigError: a number below 1.
        Unsupported: an index of more than 16 bits.

    Source: CQ (arXiv 2405.03917): k-means weighted by the sum of squared gradients of the coupled channels; the
    nearest centroid by plain L2.
    """

    version: ClassVar[int] = 1

    token_group = 1
    wants_gradients = True

    def __init__(self, channels: int, code_bits: int, iterations: int = 25) -> None:
        self.check_indices(channels, code_bits)
        at_least("iterations", iterations, 1)
        self.channels, self.code_bits, self.iterations = channels, code_bits, iterations

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a head dim that is no multiple of `channels`, or not that of the calibration."""
        self.check_groups(head_dim)
        self.check_shape(head_dim)

    @property
    @override
    def indices(self) -> dict[str, int]:
        return {"codes": self.code_bits}

    @override
    def fit(
        self, x: Float[Tensor, "heads tokens dim"], gradients: Float[Tensor, "heads tokens dim"] | None, seed: int
    ) -> Tables:
        """`centroids` `[heads, groups, 2^code_bits, channels]` in fp16."""
        points = self.grouped(x.float()).flatten(0, 1).contiguous()
        weights = torch.ones_like(points) if gradients is None else self.grouped(gradients.float()).flatten(0, 1)
        mass = weights.square().sum(-1)
        found = codebooks(points, mass, 2**self.code_bits, self.iterations, seed)
        limit = torch.finfo(torch.float16).max
        return {"centroids": found.clamp(-limit, limit).half().unflatten(0, (x.shape[0], -1))}

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """Indices of the nearest centroids."""
        return self.packed(self.indices_of(x, self.table("centroids", x)))

    @override
    def decode(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """The centroids."""
        codes = self.unpacked(parts, shape[-2])
        like = torch.empty(shape[-3], 0, shape[-1], dtype=dtype, device=codes.device)
        return self.centroids_of(codes, self.table("centroids", like))
