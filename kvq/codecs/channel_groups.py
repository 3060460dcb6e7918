"""Channels in groups with a codec each: outliers of a block or of a calibration."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, States, Tables
from kvq.codecs.codec import Codec
from kvq.codecs.packed import pack, unpack
from kvq.codecs.quantizers import Parts, checked_choice
from kvq.codecs.split import TwoWaySplit
from kvq.errors import ConfigError, Unsupported, at_least

_BYTE = 255
Criterion = Literal["energy", "mean_abs"]
"""What ranks the channels of a block: the sum of their squares, or their mean magnitude (Kitty)."""
Choice = Literal["mask", "byte"]
"""How the choice of a block is stored: `mask`, a bit for each channel, or `byte`, as Kitty's code does.

The byte of an outlier channel is its place among them, that of another channel the number of outliers.
"""


class TwoChannelGroups(TwoWaySplit):
    """`high` encodes the outlier channels, `count` per head, and `low` the others.

    Subclasses whose outlier channels do not depend on the block define `_mask`; others override encode and decode.
    """

    axis = -1
    counted = "outliers"  # the setting that `count` comes of

    def count(self, head_dim: int) -> int:
        """Number of outlier channels in a head of `head_dim` channels."""
        raise NotImplementedError

    def _mask(self, like: Shaped[Tensor, "*lead heads tokens dim"]) -> Tensor:
        """1 for each outlier channel, else 0, `[..., heads, 1, dim]`, on the device of `like`."""
        raise NotImplementedError

    def check(self, head_dim: int) -> None:
        outliers = self.count(head_dim)
        if not 0 < outliers < head_dim:
            raise Unsupported(f"{self.counted}={outliers}: head_dim={head_dim} leaves no other channels")
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
    def index_bits(self) -> dict[str, int]:
        """Bits of a code by part, `high.<part>` and `low.<part>`; each group has a row of codes per token."""
        groups = self.codecs.items()
        return {f"{group}.{name}": bits for group, codec in groups for name, bits in codec.quantizer.index_bits.items()}


class ChannelSplit(TwoChannelGroups):
    """Two codecs: one for the outlier channels of a block, one for the others.

    Outliers are the `outliers` largest channels, chosen per head and block. The choice is stored and counted.

    Args:
        outliers: channels per head in the first group.
        high: codec of the outlier channels (more bits).
        low: codec of the others.
        criterion: see `Criterion`.
        stored: see `Choice`.

    Source: TurboQuant (arXiv 2504.19874), section 4.3, whose outlier channels have one more bit; Kitty (arXiv
    2511.18643), whose boosted channels have 4 bits instead of 2.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        outliers: int,
        high: Codec,
        low: Codec,
        criterion: Criterion | str = "energy",
        stored: Choice | str = "mask",
    ) -> None:
        at_least("outliers", outliers, 1)
        super().__init__(high, low)
        self.outliers = outliers
        self.criterion: Criterion = checked_choice(Criterion, criterion, "criterion")
        self.stored: Choice = checked_choice(Choice, stored, "stored")
        if self.stored == "byte" and outliers > _BYTE:
            raise ConfigError(f"outliers={outliers}: at most {_BYTE} with stored=byte")

    @property
    def bits(self) -> float | int | None:
        """Bits per code of the channels that are no outliers; None: their quantizer has no attribute `bits`."""
        return getattr(self.low.quantizer, "bits", None)

    def count(self, head_dim: int) -> int:
        return self.outliers

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`mask` `[..., heads, 1, ceil(dim / 8)]`, or `place` `[..., heads, 1, dim]`, and the parts of both codecs."""
        by_energy = self.criterion == "energy"
        size = x.square().sum(-2, keepdim=True) if by_energy else x.abs().mean(-2, keepdim=True)
        chosen = size.topk(self.outliers, -1).indices
        mask = torch.zeros_like(x[..., :1, :], dtype=torch.uint8).scatter_(-1, chosen, 1)
        if self.stored == "mask":
            kept = {"mask": pack(mask.mT, 1)[0].mT}
        else:
            place = torch.where(mask == 1, mask.cumsum(-1) - 1, self.outliers)
            kept = {"place": place.to(torch.uint8)}
        return kept | self._encode_mask(x, mask, self.outliers, dtype)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        if self.stored == "mask":
            mask = unpack([parts["mask"].mT], 1, shape[-1]).mT
        else:
            mask = (parts["place"] < self.outliers).to(torch.uint8)
        return self._decode_mask(parts, mask, self.outliers, shape, dtype)


class CalibratedChannelSplit(Calibrated, TwoChannelGroups):
    """Two codecs: one for the channels of largest variance on a calibration text, per layer and head, one for the rest.

    The choice is a table of the calibration and takes no bits.

    Args:
        high: codec of the outlier channels (more bits).
        low: codec of the others.
        outliers: channels per head in the first group; None: a quarter of the head's.
        differences: variances are those of the differences of consecutive tokens, for codecs of deltas.

    Source: KVQuant++ (`OutlierKVQuant`): a quarter of the channels at min(b + 1, 4) bits, the others at max(b - 1, 1).
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
