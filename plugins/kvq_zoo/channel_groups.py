"""Block-GTQ: channels of each head in groups, by the bits that pairs of channels are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Size, Tensor

from kvq.codecs.calibrated import Calibrated, Moments, States, Tables
from kvq.codecs.codec import Codec, check_nested
from kvq.codecs.lloyd_max import MAX_BITS
from kvq.codecs.quantizers import Parts, Quantizer, shared_group, with_prefix, without_prefix
from kvq.errors import Unsupported, require, within


class ChannelGroups(Calibrated, Quantizer):
    """Each channel of a KV head belongs to a group, and each group has a codec.

    Which channel belongs to which is a table of the calibration (`group` `[heads, 1, dim]`: numbers of groups, in the
    order of `codecs`) and takes no bits. Heads may have groups of other sizes, and none of some, so each head has parts
    of its own, `<head>.<group>.<name>` with one head. Subclasses fit the table. Where all heads have two groups of the
    same sizes, `kvq.codecs.CalibratedChannelSplit` does the same on all heads at once.

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

    def bind(self, tables: Mapping[str, Tensor] | None, heads: int, head_dim: int) -> Calibrated:
        """As `Calibrated.bind`: a copy for one layer with its own table of groups."""
        other = super().bind(tables, heads, head_dim)
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
            parts |= with_prefix(codec.encode_block(own, dtype=dtype), prefix)
        return parts

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        out = torch.empty(shape, dtype=dtype, device=next(iter(parts.values())).device)
        for head, prefix, channels, codec in self._each(out):
            size = Size((*shape[:-3], 1, shape[-2], len(channels)))
            own = codec.decode_block(without_prefix(parts, prefix), size, dtype)
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
        widths = torch.tensor([allocate_bits(head, self.bits, self.most) for head in (low + high).tolist()])
        return {"group": (widths.repeat(1, 2)[:, None] - 1).to(torch.uint8)}


def allocate_bits(energies: Sequence[float], mean: float | int, most: int) -> list[int]:
    """Choose the bits of each pair of channels: 1 to `most`, `mean` on average (rounded down in sum).

    All begin with 1 bit; the next bit goes to the pair of largest energy / 4^bits, of equal ones to the first.
    """
    widths = [1] * len(energies)
    for _ in range(int(len(energies) * mean) - len(energies)):
        _, pair = max((energies[i] / 4.0 ** widths[i], -i) for i in range(len(energies)) if widths[i] < most)
        widths[-pair] += 1
    return widths
