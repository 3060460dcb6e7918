"""Channels in groups with a codec each: outliers of a block or of a calibration."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, States, Tables
from kvq.codecs.codec import Codec
from kvq.codecs.packed import pack, unpack
from kvq.codecs.quantizers import Parts
from kvq.codecs.split import TwoWaySplit
from kvq.errors import Unsupported, at_least


class TwoChannelGroups(TwoWaySplit):
    """`high` encodes the outlier channels, of which a head has `count`, and `low` the others.

    Subclasses whose outlier channels follow from the layer and the head dim say which they are (`_mask`).
    """

    axis = -1

    def count(self, head_dim: int) -> int:
        """Outlier channels of a head."""
        raise NotImplementedError

    def _mask(self, like: Shaped[Tensor, "*lead heads tokens dim"]) -> Tensor:
        """1 for each outlier channel, `[..., heads, 1, dim]`."""
        raise NotImplementedError

    def check(self, head_dim: int) -> None:
        outliers = self.count(head_dim)
        if not 0 < outliers < head_dim:
            raise Unsupported(f"outliers={outliers}: head_dim={head_dim} leaves no other channels")
        for name, codec, _, channels in self._groups((outliers, head_dim - outliers)):
            try:
                codec.check(channels)
            except Unsupported as error:
                raise Unsupported(f"{name} ({channels} of {head_dim} channels): {error}") from error

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        return self._encode_mask(x, self._mask(x), self.count(x.shape[-1]), dtype)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        like = torch.empty(*shape[:-2], 0, shape[-1], dtype=dtype, device=next(iter(parts.values())).device)
        return self._decode_mask(parts, self._mask(like), self.count(shape[-1]), shape, dtype)

    @property
    def indices(self) -> dict[str, int]:
        """Those of both groups, which have the tokens of the block."""
        groups = self.codecs.items()
        return {f"{group}.{name}": bits for group, codec in groups for name, bits in codec.quantizer.indices.items()}


class ChannelSplit(TwoChannelGroups):
    """Two codecs: one for the outlier channels of a block, one for the others.

    Outliers are the `outliers` channels with the largest sums of squares, chosen per head and block. The choice is
    stored, a bit for each channel, and counted.

    Args:
        outliers: channels per head in the first group.
        high: codec of the outlier channels (more bits).
        low: codec of the others.

    Source: TurboQuant (arXiv 2504.19874), section 4.3, whose outlier channels have one more bit.
    """

    version: ClassVar[int] = 1

    def __init__(self, outliers: int, high: Codec, low: Codec) -> None:
        at_least("outliers", outliers, 1)
        super().__init__(high, low)
        self.outliers = outliers

    @property
    def bits(self) -> float | None:
        """Bits per code for the channels that are no outliers; None: their quantizer has none."""
        return getattr(self.low.quantizer, "bits", None)

    def count(self, head_dim: int) -> int:
        return self.outliers

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """The stored mask (`store_mask`) and the parts of both codecs."""
        chosen = self.rank(x).topk(self.outliers, -1).indices
        mask = torch.zeros_like(x[..., :1, :], dtype=torch.uint8).scatter_(-1, chosen, 1)
        return self.store_mask(mask) | self._encode_mask(x, mask, self.outliers, dtype)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        return self._decode_mask(parts, self.read_mask(parts, shape[-1]), self.outliers, shape, dtype)

    def rank(self, x: Float[Tensor, "*lead heads tokens dim"]) -> Float[Tensor, "*lead heads 1 dim"]:
        """What is largest in the outlier channels of a block."""
        return x.square().sum(-2, keepdim=True)

    def store_mask(self, mask: Shaped[Tensor, "*lead heads 1 dim"]) -> Parts:
        """`mask` `[..., heads, 1, ceil(dim / 8)]`, from one with 1 for an outlier channel."""
        return {"mask": pack(mask.mT, 1)[0].mT}

    def read_mask(self, parts: Parts, head_dim: int) -> Shaped[Tensor, "*lead heads 1 dim"]:
        """Inverse of `store_mask`."""
        return unpack([parts["mask"].mT], 1, head_dim).mT


class CalibratedChannelSplit(Calibrated, TwoChannelGroups):
    """As `ChannelSplit`, with the channels of largest variance on the calibration text, per layer and head.

    The choice is a table of the calibration and takes no bits.

    Args:
        high: codec of the outlier channels (more bits).
        low: codec of the others.
        outliers: channels per head in the first group; None: a quarter of the head's.
        differences: variances are those of the differences of consecutive tokens, for codecs of deltas.

    Source: KVQuant++ (`OutlierKVQuant`): a quarter of the channels at min(b + 1, 4) bits, the others at max(b - 1, 1);
    section 3.2 for differences.
    """

    version: ClassVar[int] = 1

    def __init__(self, high: Codec, low: Codec, outliers: int | None = None, differences: bool = False) -> None:
        at_least("outliers", outliers, 1)
        super().__init__(high, low)
        self.outliers, self.differences = outliers, differences

    def count(self, head_dim: int) -> int:
        return head_dim // 4 if self.outliers is None else self.outliers

    def check(self, head_dim: int) -> None:
        TwoChannelGroups.check(self, head_dim)
        super().check(head_dim)

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`mask` `[heads, 1, dim]`: 1 for an outlier channel."""
        spread = x.double().diff(dim=1) if self.differences and x.shape[1] > 1 else x.double()
        chosen = spread.var(1, correction=0, keepdim=True).topk(self.count(x.shape[-1]), -1).indices
        return {"mask": torch.zeros_like(x[:, :1], dtype=torch.uint8).scatter_(-1, chosen, 1)}

    def _mask(self, like: Shaped[Tensor, "*lead heads tokens dim"]) -> Tensor:
        return self.table("mask", like).expand(*like.shape[:-2], 1, -1)
