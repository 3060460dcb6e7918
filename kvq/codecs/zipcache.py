"""ZipCache: two codecs over a split of a block's tokens (salient and other), and a scale per channel."""

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
from kvq.codecs.quantizers import Parts
from kvq.codecs.rope import Rope
from kvq.codecs.split import Split
from kvq.codecs.stages import Side, Stage
from kvq.errors import ConfigError


class TokenSplit(Split):
    """One codec for the salient tokens of a block, another for the others; the split is stored as one bit per token.

    A policy chooses the salient tokens (`PlannedCodec.planned`). Where a codec is applied to a tensor alone there is no
    policy, and they are spread evenly over the block.

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

    axis = -2

    def __init__(self, share: float | int, high: Codec, low: Codec, per_head: bool = False) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"share={share}: of the tokens, 0 to 1")
        super().__init__(high, low)
        self.share, self.per_head = share, per_head
        self.mask: Bool[Tensor, "*lead masks tokens"] | None = None
        """The salient tokens of the blocks that are being encoded, from a policy; None: there is none."""

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

    @override
    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`mask` `[..., heads or 1, ceil(tokens / 8), 1]` and the parts of both codecs."""
        mask = (self._spread(x) if self.mask is None else self.mask).unsqueeze(-1)
        return {"mask": pack(mask.to(torch.uint8), 1)[0]} | self._encode_groups(x, mask, self.count(x.shape[-2]))

    @override
    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        """Both groups of tokens, each token in its own place."""
        mask = unpack([parts["mask"]], 1, shape[-2])
        return self._decode_groups(parts, mask, self.count(shape[-2]), shape, dtype)


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
