"""Outlier channels in a codec of their own: chosen in each block by energy, or by a calibration."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Size, Tensor
from typing_extensions import override

from kvq.codecs.calibrated import Calibrated, Tables
from kvq.codecs.codec import Codec
from kvq.codecs.packing import pack, unpack
from kvq.codecs.quantizers import Parts
from kvq.codecs.split import TwoWaySplit
from kvq.errors import Unsupported, at_least


class _TwoChannelGroups(TwoWaySplit):
    """`high` encodes the outlier channels, `low` the others."""

    axis = -1

    @property
    @override
    def indices(self) -> dict[str, int]:
        """Those of both groups, which have the tokens of the block."""
        groups = self.codecs.items()
        return {f"{group}.{name}": bits for group, codec in groups for name, bits in codec.quantizer.indices.items()}

    def _check_channels(self, outliers: int, head_dim: int) -> None:
        """Raises: Unsupported: a group without channels, or one whose number a codec cannot work on."""
        if not 0 < outliers < head_dim:
            raise Unsupported(f"outliers={outliers}: head_dim={head_dim} leaves no other channels")
        for name, codec, _, channels in self._groups((outliers, head_dim - outliers)):
            try:
                codec.check(channels)
            except Unsupported as error:
                raise Unsupported(f"{name} ({channels} of {head_dim} channels): {error}") from error


class ChannelSplit(_TwoChannelGroups):
    """Two codecs: one for the outlier channels of a block, one for the others.

    Outliers are the `outliers` channels with the largest sums of squares, chosen per head and block. The choice takes
    one bit per channel (`mask`), which is stored and counted.

    Args:
        outliers: channels per head in the first group.
        high: codec of the outlier channels (more bits).
        low: codec of the others.

    Raises:
        ConfigError: no channel in the first group.
        Unsupported: a codec that needs token positions or stores lists.

    Source: TurboQuant (arXiv 2504.19874), section 4.3, whose outlier channels have one more bit.
    """

    version: ClassVar[int] = 1

    def __init__(self, outliers: int, high: Codec, low: Codec) -> None:
        at_least("outliers", outliers, 1)
        super().__init__(high, low)
        self.outliers = outliers
        self.bits = low.quantizer.bits if hasattr(low.quantizer, "bits") else None

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a group without channels, or one whose number a codec cannot work on."""
        self._check_channels(self.outliers, head_dim)

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`mask` `[..., heads, 1, ceil(dim / 8)]` and the parts of both codecs."""
        chosen = x.square().sum(-2, keepdim=True).topk(self.outliers, -1).indices
        mask = torch.zeros_like(x[..., :1, :], dtype=torch.uint8).scatter_(-1, chosen, 1)
        return {"mask": pack(mask.mT, 1)[0].mT} | self._encode_mask(x, mask, self.outliers)

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """Both groups of channels, each channel in its own place."""
        return self._decode_mask(parts, unpack([parts["mask"].mT], 1, shape[-1]).mT, self.outliers, shape, dtype)


class CalibratedChannelSplit(Calibrated, _TwoChannelGroups):
    """As `ChannelSplit`, with the channels of largest variance on the calibration text, per layer and head.

    The choice is a table of the calibration and takes no bits.

    Args:
        high: codec of the outlier channels (more bits).
        low: codec of the others.
        outliers: channels per head in the first group; None: a quarter of the head's.

    Raises:
        ConfigError: no channel in the first group.
        Unsupported: a codec that needs token positions or stores lists.

    Source: KVQuant++ (`OutlierKVQuant`): a quarter of the channels at min(b + 1, 4) bits, the others at max(b - 1, 1).
    """

    version: ClassVar[int] = 1

    def __init__(self, high: Codec, low: Codec, outliers: int | None = None) -> None:
        at_least("outliers", outliers, 1)
        super().__init__(high, low)
        self.outliers = outliers

    def count(self, head_dim: int) -> int:
        """Outlier channels of a head."""
        return head_dim // 4 if self.outliers is None else self.outliers

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a group that cannot be, or another head dim than that of the calibration."""
        self._check_channels(self.count(head_dim), head_dim)
        self.check_shape(head_dim)

    @override
    def fit(
        self, x: Float[Tensor, "heads tokens dim"], gradients: Float[Tensor, "heads tokens dim"] | None, seed: int
    ) -> Tables:
        """`mask` `[heads, 1, dim]`: 1 for an outlier channel."""
        chosen = x.double().var(1, correction=0, keepdim=True).topk(self.count(x.shape[-1]), -1).indices
        return {"mask": torch.zeros_like(x[:, :1], dtype=torch.uint8).scatter_(-1, chosen, 1)}

    def _mask(self, like: Float[Tensor, "*lead heads tokens dim"]) -> Tensor:
        return self.table("mask", like).expand(*like.shape[:-2], 1, -1)

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """The parts of both codecs."""
        return self._encode_mask(x, self._mask(x), self.count(x.shape[-1]))

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """Both groups of channels, each channel in its own place."""
        like = torch.empty(*shape[:-2], 0, shape[-1], dtype=dtype, device=next(iter(parts.values())).device)
        return self._decode_mask(parts, self._mask(like), self.count(shape[-1]), shape, dtype)
