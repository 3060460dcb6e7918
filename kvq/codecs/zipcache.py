"""Two codecs over a split of a block's tokens (salient and other), and ZipCache's scale per channel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Size, Tensor
from typing_extensions import override

from kvq.codecs.codec import Codec
from kvq.codecs.packing import pack, unpack
from kvq.codecs.quantizers import Parts, Quantizer
from kvq.codecs.rope import Rope
from kvq.codecs.stages import Side, Stage
from kvq.errors import ConfigError, Unsupported


class TokenSplit(Quantizer):
    """One codec for the salient tokens of a block, another for the others; the split is stored as one bit per token.

    A policy chooses the salient tokens (`PlannedCodec.planned`). Without one, as where a codec is applied to a tensor
    alone, they are spread evenly over the block. Parts are `high.<name>`, `low.<name>` and `mask`.

    Args:
        share: fraction of a block's tokens that are salient, rounded to whole tokens.
        high: codec of the salient tokens (more bits).
        low: codec of the others.
        per_head: every KV head has its own salient tokens and mask (ZipCache's released code); else all heads of a
            layer share one.

    Raises:
        ConfigError: a share outside 0 to 1.
        Unsupported: a codec that needs token positions.

    Source: ZipCache (arXiv 2405.14256), section 4.
    """

    version: ClassVar[int] = 1

    def __init__(self, share: float | int, high: Codec, low: Codec, per_head: bool = False) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"share={share}: of the tokens, 0 to 1")
        if high.uses_rope or low.uses_rope:
            raise Unsupported("a split over tokens: put undo_rope and apply_rope around it")
        self.share, self.high, self.low, self.per_head = share, high, low, per_head
        self.mask: Bool[Tensor, "*lead masks tokens"] | None = None
        """What a plan says of the blocks being encoded."""

    @override
    def check(self, head_dim: int) -> None:
        """Raises: Unsupported: one of the codecs cannot work on the head dim."""
        self.high.check(head_dim)
        self.low.check(head_dim)

    def count(self, tokens: int) -> int:
        """Salient tokens of a block."""
        return round(self.share * tokens)

    def salient(self, scores: Float[Tensor, "*lead tokens"]) -> Bool[Tensor, "*lead tokens"]:
        """The tokens of highest score, as many as are salient."""
        chosen = scores.topk(self.count(scores.shape[-1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)

    def _spread(self, x: Tensor) -> Tensor:
        tokens, count = x.shape[-2], self.count(x.shape[-2])
        mask = torch.zeros(tokens, dtype=torch.bool, device=x.device)
        mask[torch.arange(count, device=x.device) * tokens // max(count, 1)] = True
        return mask.expand(*x.shape[:-3], x.shape[-3] if self.per_head else 1, tokens)

    def _sizes(self, tokens: int) -> list[tuple[str, Codec, int, int]]:
        count = self.count(tokens)
        return [("high", self.high, 0, count), ("low", self.low, count, tokens - count)]

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`mask` `[..., heads or 1, ceil(tokens / 8), 1]` and the parts of both codecs."""
        mask = (self._spread(x) if self.mask is None else self.mask).unsqueeze(-1)
        sorted_ = x.gather(-2, _order(mask).expand(x.shape))
        parts = {"mask": pack(mask.to(torch.uint8), 1)[0]}
        for name, codec, start, length in self._sizes(x.shape[-2]):
            # An empty group gets the usual parts with zero rows, so that blocks concatenate.
            found = codec.encode_block(sorted_.narrow(-2, min(start, x.shape[-2] - 1), max(length, 1)))
            parts |= {f"{name}.{key}": part if length else part[..., :0, :] for key, part in found.items()}
        return parts

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """Both groups, every token back in its place."""
        mask = unpack([parts["mask"]], 1, shape[-2])
        out = []
        for name, codec, _, length in self._sizes(shape[-2]):
            own = {key.removeprefix(f"{name}."): part for key, part in parts.items() if key.startswith(f"{name}.")}
            if length:
                out.append(codec.decode_block(own, Size((*shape[:-2], length, shape[-1])), dtype))
        order = _order(mask).expand(shape)
        return torch.empty(shape, dtype=dtype, device=mask.device).scatter_(-2, order, torch.cat(out, -2))


def _order(mask: Tensor) -> Tensor:
    """Token indices `[..., tokens, 1]`: those of the mask, ascending, then the others, ascending."""
    return mask.to(torch.uint8).sort(dim=-2, descending=True, stable=True).indices


class PlannedCodec(Codec):
    """A codec over a `TokenSplit` whose salient tokens a policy can choose."""

    version: ClassVar[int] = 1

    _mask: Tensor | None = None
    _at = 0

    @contextlib.contextmanager
    def planned(self, mask: Bool[Tensor, "batch masks tokens"]) -> Iterator[None]:
        """Within the context, blocks are encoded with the salient tokens of `mask`, in order."""
        self._mask, self._at = mask, 0
        try:
            yield
        finally:
            self._mask = None

    @override
    def encode_block(self, blocks: Float[Tensor, "*lead heads tokens head_dim"], rope: Rope | None = None) -> Parts:
        """As `Codec.encode_block`, with the salient tokens of `planned` where it is active."""
        if self._mask is None or not isinstance(self.quantizer, TokenSplit):
            return super().encode_block(blocks, rope)
        number, length = blocks.shape[1], blocks.shape[-2]
        piece = self._mask.narrow(2, self._at, number * length)
        self._at += number * length
        self.quantizer.mask = piece.unflatten(2, (number, length)).transpose(1, 2)
        try:
            return super().encode_block(blocks, rope)
        finally:
            self.quantizer.mask = None


class ChannelRoot(Stage):
    """Divide each channel of a block by the square root of its largest magnitude (ZipCache, section 4.2)."""

    version: ClassVar[int] = 1

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        scale = x.abs().amax(-2, keepdim=True).sqrt()
        return x / scale.masked_fill(scale == 0, 1), {"scale": scale}

    @override
    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y * side["scale"]
