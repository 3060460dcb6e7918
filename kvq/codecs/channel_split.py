"""Some channels in a codec of their own: outliers of a block or of a calibration, or the first ones."""

from __future__ import annotations

import enum
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Size, Tensor
from typing_extensions import override

from kvq.codecs.calibrated import Calibrated, Tables
from kvq.codecs.codec import Codec
from kvq.codecs.packing import pack, unpack
from kvq.codecs.quantizers import Parts, choice
from kvq.codecs.split import TwoWaySplit
from kvq.errors import ConfigError, Unsupported, at_least

_BYTE = 255


class Criterion(enum.Enum):
    """What ranks the channels of a block: the sum of their squares, or their mean magnitude (Kitty)."""

    energy = "energy"
    mean_abs = "mean_abs"


class Choice(enum.Enum):
    """How the choice of a block is stored: `mask`, a bit for each channel, or `byte`, as Kitty's code does.

    The byte of an outlier channel is its place among them, that of another channel the number of outliers.
    """

    mask = "mask"
    byte = "byte"


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

    Outliers are the `outliers` largest channels, chosen per head and block. The choice is stored and counted.

    Args:
        outliers: channels per head in the first group.
        high: codec of the outlier channels (more bits).
        low: codec of the others.
        criterion: see `Criterion`.
        stored: see `Choice`.

    Raises:
        ConfigError: no channel in the first group, or too many for a byte; an unknown name.
        Unsupported: a codec that needs token positions or stores lists.

    Source: TurboQuant (arXiv 2504.19874), section 4.3, whose outlier channels have one more bit; Kitty (arXiv
    2511.18643), whose boosted channels have 4 bits instead of 2.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        outliers: int,
        high: Codec,
        low: Codec,
        criterion: Criterion | str = Criterion.energy,
        stored: Choice | str = Choice.mask,
    ) -> None:
        at_least("outliers", outliers, 1)
        super().__init__(high, low)
        self.outliers = outliers
        self.criterion, self.stored = choice(Criterion, criterion, "criterion"), choice(Choice, stored, "stored")
        if self.stored is Choice.byte and outliers > _BYTE:
            raise ConfigError(f"outliers={outliers}: at most {_BYTE} with stored=byte")
        self.bits = low.quantizer.bits if hasattr(low.quantizer, "bits") else None

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a group without channels, or one whose number a codec cannot work on."""
        self._check_channels(self.outliers, head_dim)

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`mask` `[..., heads, 1, ceil(dim / 8)]`, or `place` `[..., heads, 1, dim]`, and the parts of both codecs."""
        by_energy = self.criterion is Criterion.energy
        size = x.square().sum(-2, keepdim=True) if by_energy else x.abs().mean(-2, keepdim=True)
        chosen = size.topk(self.outliers, -1).indices
        mask = torch.zeros_like(x[..., :1, :], dtype=torch.uint8).scatter_(-1, chosen, 1)
        if self.stored is Choice.mask:
            kept = {"mask": pack(mask.mT, 1)[0].mT}
        else:
            place = torch.where(mask == 1, mask.cumsum(-1) - 1, self.outliers)
            kept = {"place": place.to(torch.uint8)}
        return kept | self._encode_mask(x, mask, self.outliers, dtype)

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """Both groups of channels, each channel in its own place."""
        if self.stored is Choice.mask:
            mask = unpack([parts["mask"].mT], 1, shape[-1]).mT
        else:
            mask = (parts["place"] < self.outliers).to(torch.uint8)
        return self._decode_mask(parts, mask, self.outliers, shape, dtype)


class CalibratedChannelSplit(Calibrated, _TwoChannelGroups):
    """As `ChannelSplit`, with the channels of largest variance on the calibration text, per layer and head.

    The choice is a table of the calibration and takes no bits.

    Args:
        high: codec of the outlier channels (more bits).
        low: codec of the others.
        outliers: channels per head in the first group; None: a quarter of the head's.
        differences: variances are those of the differences of consecutive tokens, for codecs of deltas.

    Raises:
        ConfigError: no channel in the first group.
        Unsupported: a codec that needs token positions or stores lists.

    Source: KVQuant++ (`OutlierKVQuant`): a quarter of the channels at min(b + 1, 4) bits, the others at max(b - 1, 1);
    section 3.2 for differences.
    """

    version: ClassVar[int] = 1

    def __init__(self, high: Codec, low: Codec, outliers: int | None = None, differences: bool = False) -> None:
        at_least("outliers", outliers, 1)
        super().__init__(high, low)
        self.outliers, self.differences = outliers, differences

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
        spread = x.double().diff(dim=1) if self.differences and x.shape[1] > 1 else x.double()
        chosen = spread.var(1, correction=0, keepdim=True).topk(self.count(x.shape[-1]), -1).indices
        return {"mask": torch.zeros_like(x[:, :1], dtype=torch.uint8).scatter_(-1, chosen, 1)}

    def _mask(self, like: Float[Tensor, "*lead heads tokens dim"]) -> Tensor:
        return self.table("mask", like).expand(*like.shape[:-2], 1, -1)

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """The parts of both codecs."""
        return self._encode_mask(x, self._mask(x), self.count(x.shape[-1]), dtype)

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """Both groups of channels, each channel in its own place."""
        like = torch.empty(*shape[:-2], 0, shape[-1], dtype=dtype, device=next(iter(parts.values())).device)
        return self._decode_mask(parts, self._mask(like), self.count(shape[-1]), shape, dtype)


class LeadingChannels(_TwoChannelGroups):
    """Two codecs: one for the first channels of a head, one for the others.

    Args:
        first: channels per head in the first group.
        high: codec of the first channels.
        low: codec of the others.

    Raises:
        ConfigError: no channel in the first group.
        Unsupported: a codec that needs token positions or stores lists.

    Source: rocm_octave.py in vLLM's pull request 59774, whose channels with rotary embeddings have a bit more.
    """

    version: ClassVar[int] = 1

    def __init__(self, first: int, high: Codec, low: Codec) -> None:
        at_least("first", first, 1)
        super().__init__(high, low)
        self.first, self.token_group = first, 1 if {high.token_group, low.token_group} == {1} else None

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a group without channels, or one whose number a codec cannot work on."""
        self._check_channels(self.first, head_dim)

    def _mask(self, like: Tensor, dim: int) -> Tensor:
        mask = torch.arange(dim, device=like.device) < self.first
        return mask.to(torch.uint8).expand(*like.shape[:-2], 1, -1)

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """The parts of both codecs."""
        return self._encode_mask(x, self._mask(x, x.shape[-1]), self.first, dtype)

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """Both groups of channels, each channel in its own place."""
        mask = self._mask(next(iter(parts.values())), shape[-1])
        return self._decode_mask(parts, mask, self.first, shape, dtype)
