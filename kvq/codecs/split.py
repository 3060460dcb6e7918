"""Two codecs over a split of a block's channels or tokens by a mask."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Shaped
from torch import Size, Tensor

from kvq.codecs.codec import Codec, check_nested
from kvq.codecs.quantizers import Parts, Quantizer
from kvq.errors import Unsupported


class Split(Quantizer):
    """`high` encodes the channels or tokens of a mask, `low` the others; parts are `high.<name>` and `low.<name>`.

    Attributes:
        axis: the axis that is split, -1 (channels) or -2 (tokens).

    Raises:
        Unsupported: a codec that needs token positions or stores lists.
    """

    axis: int

    def __init__(self, high: Codec, low: Codec) -> None:
        for codec in (high, low):
            check_nested(codec, "split")
        self.high, self.low = high, low

    @property
    def _indices_of_groups(self) -> dict[str, int]:
        """`Quantizer.indices` of a split of the channels, whose groups have the tokens of the block."""
        both = (("high", self.high), ("low", self.low))
        return {f"{side}.{name}": bits for side, codec in both for name, bits in codec.quantizer.indices.items()}

    def _groups(self, count: int, length: int) -> Iterator[tuple[str, Codec, int, int]]:
        """Name, codec, first index and size of the two groups, of `length` in all, `count` of them in the mask."""
        yield "high", self.high, 0, count
        yield "low", self.low, count, length - count

    def _check_channels(self, outliers: int, head_dim: int) -> None:
        """Raises: Unsupported: a group without channels, or one whose number a codec cannot work on."""
        if not 0 < outliers < head_dim:
            raise Unsupported(f"outliers={outliers}: head_dim={head_dim} leaves no other channels")
        for name, codec, _, channels in self._groups(outliers, head_dim):
            try:
                codec.check(channels)
            except Unsupported as error:
                raise Unsupported(f"{name} ({channels} of {head_dim} channels): {error}") from error

    def _encode_groups(self, x: Tensor, mask: Shaped[Tensor, ...], count: int) -> Parts:
        """Parts of both codecs. `mask`: 1 at `count` places along `axis`; broadcasts to the shape of `x`."""
        parts: Parts = {}
        length = x.shape[self.axis]
        ordered = x.gather(self.axis, self._order(mask).expand(x.shape))
        for name, codec, start, size in self._groups(count, length):
            # An empty group gets the usual parts with zero rows, so that blocks concatenate.
            found = codec.encode_block(ordered.narrow(self.axis, min(start, length - 1), max(size, 1)))
            parts |= {f"{name}.{key}": part if size else part[..., :0, :] for key, part in found.items()}
        return parts

    def _decode_groups(
        self, parts: Parts, mask: Shaped[Tensor, ...], count: int, shape: Size, dtype: torch.dtype
    ) -> Tensor:
        """Both groups decoded, every channel or token in its own place."""
        pieces = []
        for name, codec, _, size in self._groups(count, shape[self.axis]):
            if size:
                own = {key.removeprefix(f"{name}."): part for key, part in parts.items() if key.startswith(f"{name}.")}
                group = list(shape)
                group[self.axis] = size
                pieces.append(codec.decode_block(own, Size(group), dtype))
        order = self._order(mask).expand(shape)
        out = torch.empty(shape, dtype=dtype, device=mask.device)
        return out.scatter_(self.axis, order, torch.cat(pieces, self.axis))

    def _order(self, mask: Tensor) -> Tensor:
        """Indices along `axis`: those of the mask, ascending, then the others, ascending."""
        return mask.to(torch.uint8).sort(dim=self.axis, descending=True, stable=True).indices
