"""Several codecs over the groups into which a block's channels or tokens are divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Shaped
from torch import Size, Tensor

from kvq.codecs.codec import Codec, check_nested
from kvq.codecs.quantizers import Parts, Quantizer


class Split(Quantizer):
    """Each codec encodes its own group of channels or tokens; parts are `<group>.<name>`.

    Attributes:
        axis: the axis that is divided, -1 (channels) or -2 (tokens).
        codecs: codec by the name of its group, in the order of the groups' numbers.

    Raises:
        Unsupported: a codec that needs token positions or stores lists.
    """

    axis: int

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        for codec in codecs.values():
            check_nested(codec, "split")
        self.codecs = dict(codecs)

    def _groups(self, sizes: Sequence[int]) -> Iterator[tuple[str, Codec, int, int]]:
        """Name, codec, first index and size of each group, the groups one after the other."""
        for number, (name, codec) in enumerate(self.codecs.items()):
            yield name, codec, sum(sizes[:number]), sizes[number]

    def _encode_groups(self, x: Tensor, group: Shaped[Tensor, ...], sizes: Sequence[int], dtype: torch.dtype) -> Parts:
        """Parts of all codecs, for states of `dtype`.

        `group`: a number for each place along `axis`; broadcasts to the shape of `x`.
        """
        parts: Parts = {}
        length = x.shape[self.axis]
        ordered = x.gather(self.axis, self._order(group).expand(x.shape))
        for name, codec, start, size in self._groups(sizes):
            # An empty group gets the usual parts with zero rows, so that blocks concatenate.
            own = ordered.narrow(self.axis, min(start, length - 1), max(size, 1))
            found = codec.encode_block(own, dtype=dtype)
            parts |= {f"{name}.{key}": part if size else part[..., :0, :] for key, part in found.items()}
        return parts

    def _decode_groups(
        self, parts: Parts, group: Shaped[Tensor, ...], sizes: Sequence[int], shape: Size, dtype: torch.dtype
    ) -> Tensor:
        """All groups decoded, every channel or token in its own place."""
        pieces = []
        for name, codec, _, size in self._groups(sizes):
            if size:
                own = {key.removeprefix(f"{name}."): part for key, part in parts.items() if key.startswith(f"{name}.")}
                held = list(shape)
                held[self.axis] = size
                pieces.append(codec.decode_block(own, Size(held), dtype))
        order = self._order(group).expand(shape)
        out = torch.empty(shape, dtype=dtype, device=group.device)
        return out.scatter_(self.axis, order, torch.cat(pieces, self.axis))

    def _order(self, group: Tensor) -> Tensor:
        """Indices along `axis`: those of the first group, ascending, then those of the next."""
        return group.to(torch.uint8).sort(dim=self.axis, stable=True).indices


class TwoWaySplit(Split):
    """`high` encodes the channels or tokens of a mask, `low` the others."""

    def __init__(self, high: Codec, low: Codec) -> None:
        super().__init__({"high": high, "low": low})
        self.high, self.low = high, low

    def _encode_mask(self, x: Tensor, mask: Shaped[Tensor, ...], count: int, dtype: torch.dtype) -> Parts:
        """Parts of both codecs, for states of `dtype`. `mask`: 1 at `count` places along `axis`."""
        return self._encode_groups(x, 1 - mask.to(torch.uint8), (count, x.shape[self.axis] - count), dtype)

    def _decode_mask(
        self, parts: Parts, mask: Shaped[Tensor, ...], count: int, shape: Size, dtype: torch.dtype
    ) -> Tensor:
        """Inverse of `_encode_mask`."""
        return self._decode_groups(parts, 1 - mask, (count, shape[self.axis] - count), shape, dtype)
