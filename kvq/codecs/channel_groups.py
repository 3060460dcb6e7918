"""Channels in groups with a codec each: outliers of a block or of a calibration, the first ones, or groups by head."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, Moments, States, Tables
from kvq.codecs.codec import Codec, check_nested
from kvq.codecs.lloyd_max import MAX_BITS
from kvq.codecs.packed import pack, unpack
from kvq.codecs.quantizers import Parts, Quantizer, choice, prefixed, shared_group, under
from kvq.codecs.split import TwoWaySplit
from kvq.errors import ConfigError, Unsupported, at_least, require, within


class ChannelGroups(Calibrated, Quantizer):
    """Each channel of a KV head belongs to a group, and each group has a codec.

    Which channel belongs to which is a table of the calibration (`group` `[heads, 1, dim]`: numbers of groups, in the
    order of `codecs`) and takes no bits. Heads may have groups of other sizes, and none of some, so each head has parts
    of its own, `<head>.<group>.<name>` with one head. Subclasses fit the table. Where all heads have two groups of the
    same sizes, `CalibratedChannelSplit` does the same on all heads at once.

    Args:
        codecs: codec by the name of its group.

    Raises:
        Unsupported: a codec that needs token positions, stores lists or is calibrated.
    """

    version: ClassVar[int] = 1

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        for codec in codecs.values():
            check_nested(codec, "group of channels")
        self.codecs = dict(codecs)
        self._channels: dict[torch.device, list[dict[str, Int[Tensor, " size"]]]] = {}

    def bound(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        other = super().bound(tables, heads, head_dim)
        assert isinstance(other, ChannelGroups)
        other._channels = {}
        return other

    @property
    def token_group(self) -> int | None:  # type: ignore[override]
        """Tokens that share side information in some group."""
        return shared_group(codec.token_group for codec in self.codecs.values())

    def channels(self, like: Shaped[Tensor, "*lead heads tokens dim"]) -> list[dict[str, Int[Tensor, " size"]]]:
        """For each head, the channels of its groups, ascending; a group without channels is left out.

        Raises:
            Unsupported: as `table`.
        """
        group = self.table("group", like)
        if like.device not in self._channels:
            names = list(self.codecs)
            self._channels[like.device] = [
                {names[int(number)]: (head == number).nonzero()[:, 0] for number in head.unique()}
                for head in group[:, 0]
            ]
        return self._channels[like.device]

    def _each(self, like: Tensor) -> Iterator[tuple[int, str, Int[Tensor, " size"], Codec]]:
        """Head, prefix of the parts, channels and codec of each group of each head."""
        for head, groups in enumerate(self.channels(like)):
            for name, channels in groups.items():
                yield head, f"{head}.{name}.", channels, self.codecs[name]

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`<head>.<group>.<name>` for every part of every codec."""
        parts: Parts = {}
        for head, prefix, channels, codec in self._each(x):
            own = x.narrow(-3, head, 1).index_select(-1, channels)
            parts |= prefixed(codec.encode_block(own, dtype=dtype), prefix)
        return parts

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        out = torch.empty(shape, dtype=dtype, device=next(iter(parts.values())).device)
        for head, prefix, channels, codec in self._each(out):
            size = Size((*shape[:-3], 1, shape[-2], len(channels)))
            own = codec.decode_block(under(parts, prefix), size, dtype)
            out.narrow(-3, head, 1).index_copy_(-1, channels, own)
        return out


class PairWidths(ChannelGroups):
    """Pairs of channels (i, i + head_dim/2) in groups by the bits that each is given for its energy.

    The energy of a pair is the mean of |q_i|² and |k_i|² over the calibration tokens, and for queries over the query
    heads of the KV head; a rotary embedding of these pairs does not change it, so the diagonal of the queries' second
    moments after RoPE is enough. Every pair begins with 1 bit. The next bit goes to the pair of largest energy / 4^bits
    with less than `most`, until the mean is reached.

    Args:
        codec: of pairs with 1 bit; those of b bits are encoded by this codec with b - 1 bits more.
        bits: mean bits of a channel's codes.
        most: bits of a pair at most.

    Raises:
        ConfigError: `most` outside of 1 to 8, `bits` outside of 1 to `most`.
        Unsupported: an odd head dim; as `ChannelGroups`.

    Source: Block-GTQ (arXiv 2606.24033), section 3, and its code (allocator.py, freq_analysis.py).
    """

    version: ClassVar[int] = 1
    wants_moments = True
    wants_pairs = True

    def __init__(self, codec: Codec, bits: float | int, most: int = MAX_BITS) -> None:
        within("most", most, 1, MAX_BITS)
        require(1 <= bits <= most, "bits", bits, f"a mean of at least 1 and at most {most} (most)")
        super().__init__({f"bits{width}": codec.with_more_bits(width - 1, most) for width in range(1, most + 1)})
        self.bits, self.most = bits, most

    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: an odd head dim, or another than that of the calibration."""
        require(head_dim % 2 == 0, "head_dim", head_dim, "an odd number of channels has no pairs", Unsupported)
        super().check(head_dim)

    def fit(self, x: States, gradients: States | None, seed: int, moments: Moments | None = None) -> Tables:
        """`group` `[heads, 1, dim]`: the bits of a channel, less 1."""
        assert moments is not None
        means = (x.double().square().mean(1) + moments.diagonal(dim1=-2, dim2=-1)) / 2
        low, high = means.chunk(2, -1)
        widths = torch.tensor([allocated(head, self.bits, self.most) for head in (low + high).tolist()])
        return {"group": (widths.repeat(1, 2)[:, None] - 1).to(torch.uint8)}


def allocated(energies: Sequence[float], mean: float | int, most: int) -> list[int]:
    """Bits of each pair, of which the pair of largest energy / 4^bits gets the next; of equal ones, the first."""
    widths = [1] * len(energies)
    for _ in range(int(len(energies) * mean) - len(energies)):
        _, pair = max((energies[i] / 4.0 ** widths[i], -i) for i in range(len(energies)) if widths[i] < most)
        widths[-pair] += 1
    return widths


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
        """Raises: Unsupported: a group without channels, or one whose number a codec cannot work on."""
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

    def count(self, head_dim: int) -> int:
        return self.outliers

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

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
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
        return head_dim // 4 if self.outliers is None else self.outliers

    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: a group that cannot be, or another head dim than that of the calibration."""
        _TwoChannelGroups.check(self, head_dim)
        super().check(head_dim)

    def fit(self, x: States, gradients: States | None, seed: int) -> Tables:
        """`mask` `[heads, 1, dim]`: 1 for an outlier channel."""
        spread = x.double().diff(dim=1) if self.differences and x.shape[1] > 1 else x.double()
        chosen = spread.var(1, correction=0, keepdim=True).topk(self.count(x.shape[-1]), -1).indices
        return {"mask": torch.zeros_like(x[:, :1], dtype=torch.uint8).scatter_(-1, chosen, 1)}

    def _mask(self, like: Shaped[Tensor, "*lead heads tokens dim"]) -> Tensor:
        return self.table("mask", like).expand(*like.shape[:-2], 1, -1)


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

    def count(self, head_dim: int) -> int:
        return self.first

    def _mask(self, like: Shaped[Tensor, "*lead heads tokens dim"]) -> Tensor:
        mask = torch.arange(like.shape[-1], device=like.device) < self.first
        return mask.to(torch.uint8).expand(*like.shape[:-2], 1, -1)
