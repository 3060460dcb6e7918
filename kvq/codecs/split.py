"""Several codecs over the groups into which a block's heads, channels or tokens are divided."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Size, Tensor

from kvq.codecs.calibrated import calibrated_parts
from kvq.codecs.codec import Blocks, Codec, check_nested
from kvq.codecs.packed import pack, unpack
from kvq.codecs.quantizers import Parts, Quantizer, shared_group, with_prefix, without_prefix
from kvq.codecs.stages import Rope, Stage, rope_table
from kvq.errors import ConfigError, Unsupported, require

TIER_BITS = 2
"""Stored bits of a token's tier."""
_WHOLE = "whole"  # the part that holds heads without a codec


class Split(Quantizer):
    """Each codec encodes its own group of channels or tokens; parts are `<group>.<name>`.

    Attributes:
        axis: the axis that is divided, -1 (channels) or -2 (tokens).
        codecs: codec by the name of its group, in the order of the groups' numbers.
    """

    axis: int

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        for codec in codecs.values():
            check_nested(codec, "split")
        self.codecs = dict(codecs)

    def with_more_bits(self, extra: int, most: int) -> Quantizer:
        other = copy.copy(self)
        other.codecs = {name: codec.with_more_bits(extra, most) for name, codec in self.codecs.items()}
        return other

    def check(self, head_dim: int) -> None:
        for codec in self.codecs.values():
            codec.check(head_dim)

    def _groups(self, sizes: Sequence[int]) -> Iterator[tuple[str, Codec, int, int]]:
        """Yield name, codec, first index and size of each group, the groups one after the other along the axis."""
        for number, (name, codec) in enumerate(self.codecs.items()):
            yield name, codec, sum(sizes[:number]), sizes[number]

    def _encode_groups(self, x: Tensor, group: Shaped[Tensor, ...], sizes: Sequence[int], dtype: torch.dtype) -> Parts:
        """Encode each group by its codec; returns the parts of all. `dtype`: of the cache's states.

        `group`: number of the group of each index along `axis`, broadcast to `x`; `sizes`: indices in each group.
        """
        parts: Parts = {}
        length = x.shape[self.axis]
        ordered = x.gather(self.axis, self._order(group).expand(x.shape))
        for name, codec, start, size in self._groups(sizes):
            # An empty group gets the usual parts with zero rows, so that blocks concatenate.
            states = ordered.narrow(self.axis, min(start, length - 1), max(size, 1))
            group_parts = codec.encode_block(states, dtype=dtype)
            parts |= {f"{name}.{key}": part if size else part[..., :0, :] for key, part in group_parts.items()}
        return parts

    def _decode_groups(
        self, parts: Parts, group: Shaped[Tensor, ...], sizes: Sequence[int], shape: Size, dtype: torch.dtype
    ) -> Tensor:
        """Inverse of `_encode_groups`: every channel or token at its index along `axis`."""
        pieces = []
        for name, codec, _, size in self._groups(sizes):
            if size:
                group_shape = list(shape)
                group_shape[self.axis] = size
                pieces.append(codec.decode_block(without_prefix(parts, f"{name}."), Size(group_shape), dtype))
        order = self._order(group).expand(shape)
        out = torch.empty(shape, dtype=dtype, device=group.device)
        return out.scatter_(self.axis, order, torch.cat(pieces, self.axis))

    def _order(self, group: Tensor) -> Tensor:
        """Indices along `axis` sorted by group number: the first group's, ascending, then the next one's."""
        return group.to(torch.uint8).sort(dim=self.axis, stable=True).indices


class TwoWaySplit(Split):
    """`high` encodes the channels or tokens of a mask, `low` the others."""

    def __init__(self, high: Codec, low: Codec) -> None:
        super().__init__({"high": high, "low": low})

    @property
    def high(self) -> Codec:
        """The codec of the channels or tokens in the mask."""
        return self.codecs["high"]

    @property
    def low(self) -> Codec:
        """The codec of the other channels or tokens."""
        return self.codecs["low"]

    def _encode_mask(self, x: Tensor, mask: Shaped[Tensor, ...], count: int, dtype: torch.dtype) -> Parts:
        """Parts of both codecs. `mask`: 1 at `count` indices along `axis`; `dtype`: of the cache's states."""
        return self._encode_groups(x, 1 - mask.to(torch.uint8), (count, x.shape[self.axis] - count), dtype)

    def _decode_mask(self, parts: Parts, mask: Tensor, count: int, shape: Size, dtype: torch.dtype) -> Tensor:
        """Inverse of `_encode_mask`."""
        return self._decode_groups(parts, 1 - mask, (count, shape[self.axis] - count), shape, dtype)


class TokenSplit(TwoWaySplit):
    """One codec for the salient tokens of a block, another for the others; the split is stored as one bit per token.

    A policy chooses the salient tokens (`PlannedCodec.planned`). Where a codec is applied to a tensor alone there is no
    policy, and they are spread evenly over the block.

    Args:
        share: fraction of a block's tokens that are salient, rounded to whole tokens.
        high: codec of the salient tokens (more bits).
        low: codec of the others.
        per_head: every KV head has its own salient tokens and mask (ZipCache's released code); else a layer has one.

    Source: ZipCache (arXiv 2405.14256), section 4; kvquant-plus-plus, section 3.1 (half of the tokens at one bit more,
    half at one bit less).
    """

    version: ClassVar[int] = 1
    axis = -2

    def __init__(self, share: float | int, high: Codec, low: Codec, per_head: bool = False) -> None:
        require(0 <= share <= 1, "share", share, "of the tokens, 0 to 1")
        super().__init__(high, low)
        self.share, self.per_head = share, per_head
        self.mask: Bool[Tensor, "*lead masks tokens"] | None = None
        """The salient tokens of the blocks that are being encoded, from a policy; None: there is none."""

    @property
    def bits(self) -> float | int | None:
        """Mean bits per code over the tokens of both codecs; None: a quantizer of them has no attribute `bits`."""
        more, fewer = (getattr(codec.quantizer, "bits", None) for codec in (self.high, self.low))
        return None if more is None or fewer is None else self.share * more + (1 - self.share) * fewer

    def count(self, tokens: int) -> int:
        """Number of salient tokens in a block of `tokens` tokens."""
        return round(self.share * tokens)

    def salient(self, scores: Float[Tensor, "*lead tokens"]) -> Bool[Tensor, "*lead tokens"]:
        """Mask of the `count` tokens of highest score."""
        chosen = scores.topk(self.count(scores.shape[-1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`mask` `[..., heads or 1, ceil(tokens / 8), 1]` and the parts of both codecs."""
        tokens, count, mask = x.shape[-2], self.count(x.shape[-2]), self.mask
        if mask is None:
            mask = torch.zeros(tokens, dtype=torch.bool, device=x.device)
            mask[torch.arange(count, device=x.device) * tokens // max(count, 1)] = True
            mask = mask.expand(*x.shape[:-3], x.shape[-3] if self.per_head else 1, tokens)
        mask = mask.unsqueeze(-1)
        return {"mask": pack(mask.to(torch.uint8), 1)[0]} | self._encode_mask(x, mask, count, dtype)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        mask = unpack([parts["mask"]], 1, shape[-2])
        return self._decode_mask(parts, mask, self.count(shape[-2]), shape, dtype)


class TokenTiers(Split):
    """A codec for each tier of tokens, the first tier's with the most bits; each token's tier takes 2 stored bits.

    Tiers are a policy's choice (`kvq.methods.tiers.AdaptiveTiers`), which also moves tokens from one to another. Where
    a codec is applied to a tensor alone there is no policy, and token t of a block has tier t modulo their number.

    Args:
        tiers: 2 to 4 codecs that encode each token on its own.

    Source: kvquant-plus-plus, section 3.3.
    """

    version: ClassVar[int] = 1
    axis = -2

    def __init__(self, tiers: Sequence[Codec]) -> None:
        if not 2 <= len(tiers) <= 4:
            raise ConfigError(f"tiers: {len(tiers)} codecs; 2 to 4")
        for number, codec in enumerate(tiers):
            if codec.token_group != 1:
                raise Unsupported(f"tiers.{number}: its tokens share statistics, but move to other tiers one by one")
        super().__init__({f"tier{number}": codec for number, codec in enumerate(tiers)})

    def _tiers_in_turn(self, x: Tensor, tokens: int) -> tuple[Tensor, list[int]]:
        """Default tiers of a block, token index modulo the number of tiers, `[1, tokens, 1]`; and tokens per tier."""
        tiers = torch.arange(tokens, device=x.device) % len(self.codecs)
        return tiers[None, :, None].to(torch.uint8), tiers.bincount(minlength=len(self.codecs)).tolist()

    def encode(self, x: Float[Tensor, "*lead heads tokens dim"], dtype: torch.dtype) -> Parts:
        """`tier` `[..., 1, ceil(tokens / 4), 1]` and the parts of all codecs."""
        tiers, sizes = self._tiers_in_turn(x, x.shape[-2])
        stored = pack(tiers.expand(*x.shape[:-3], 1, -1, 1), TIER_BITS)[0]
        return {"tier": stored} | self._encode_groups(x, tiers, sizes, dtype)

    def decode(self, parts: Parts, shape: Size, dtype: torch.dtype) -> Float[Tensor, "*lead heads tokens dim"]:
        tiers = unpack([parts["tier"]], TIER_BITS, shape[-2])
        _, sizes = self._tiers_in_turn(tiers, shape[-2])
        return self._decode_groups(parts, tiers, sizes, shape, dtype)


class PlannedCodec(Codec):
    """A codec over a `TokenSplit` whose salient tokens a policy can choose."""

    version: ClassVar[int] = 1

    _mask: Tensor | None = None
    _at = 0

    @contextlib.contextmanager
    def planned(self, mask: Bool[Tensor, "batch masks tokens"]) -> Iterator[None]:
        """A context in which successive blocks take their salient tokens from `mask`, one mask per head or for all."""
        self._mask, self._at = mask, 0
        try:
            yield
        finally:
            self._mask = None

    def encode_block(self, blocks: Blocks, rope: Rope | None = None, dtype: torch.dtype | None = None) -> Parts:
        if self._mask is None or not isinstance(self.quantizer, TokenSplit):
            return super().encode_block(blocks, rope, dtype)
        number, length = blocks.shape[1], blocks.shape[-2]
        piece = self._mask.narrow(2, self._at, number * length)
        self._at += number * length
        self.quantizer.mask = piece.unflatten(2, (number, length)).transpose(1, 2)
        try:
            return super().encode_block(blocks, rope, dtype)
        finally:
            self.quantizer.mask = None


class HeadsCodec(Codec):
    """Encodes each KV head of a layer by the codec that `codecs` has for it; heads with the same codec go together.

    Stores `heads<i>.<part>` of the i-th codec, in order of its first head, and `whole`, states of heads without one.

    Args:
        codecs: one per head, the same object for heads to encode together; None: the head stays in full precision.
    """

    version: ClassVar[int] = 1

    def __init__(self, codecs: Sequence[Codec | None]) -> None:
        distinct = {id(codec): codec for codec in codecs if codec is not None}
        if not distinct:
            raise ConfigError("HeadsCodec: no head has a codec; leave the layer in full precision")
        self.codecs, self._distinct = list(codecs), list(distinct.values())
        # Each codec's heads, as they follow one another in `_order`; those without a codec last.
        self._groups = [[head for head, one in enumerate(codecs) if one is codec] for codec in (*self._distinct, None)]
        order = [head for group in self._groups for head in group]
        self._order, self._back = order, sorted(range(len(order)), key=order.__getitem__)
        first = self._distinct[0]
        super().__init__(dict(first.stages), [name for name, _ in first.stages], first.quantizer)

    @property
    def uses_rope(self) -> bool:
        return any(codec.uses_rope for codec in self._distinct)

    @property
    def token_group(self) -> int | None:
        """Least common multiple of the codecs' token groups; None: some codec's tokens share statistics of a block."""
        return shared_group([codec.token_group for codec in self._distinct])

    def with_stages(self, stages: Iterable[tuple[str, Stage]], quantizer: Quantizer | None = None) -> Codec:
        raise Unsupported("method.bits_by_layer: heads with bits of their own have stages of their own")

    def with_more_bits(self, extra: int, most: int) -> Codec:
        raised = {id(codec): codec.with_more_bits(extra, most) for codec in self._distinct}
        return HeadsCodec([None if codec is None else raised[id(codec)] for codec in self.codecs])

    def check(self, head_dim: int) -> None:
        for codec in self._distinct:
            codec.check(head_dim)

    def encode_block(self, blocks: Blocks, rope: Rope | None = None, dtype: torch.dtype | None = None) -> Parts:
        *pieces, whole = self._split(blocks)
        parts = Parts()
        for i, (codec, piece) in enumerate(zip(self._distinct, pieces, strict=True)):
            parts |= with_prefix(codec.encode_block(piece, rope, dtype), f"heads{i}.")
        return {**parts, _WHOLE: whole.to(dtype or blocks.dtype, copy=True)} if whole.shape[-3] else parts

    def decode_block(self, parts: Parts, shape: Size, dtype: torch.dtype, rope: Rope | None = None) -> Blocks:
        out = []
        for i, codec in enumerate(self._distinct):
            heads = Size([*shape[:-3], len(self._groups[i]), *shape[-2:]])
            out.append(codec.decode_block(without_prefix(parts, f"heads{i}."), heads, dtype, rope))
        if _WHOLE in parts:
            out.append(parts[_WHOLE].to(dtype))
        return torch.cat(out, -3)[..., self._back, :, :]

    def _split(self, states: Tensor) -> tuple[Tensor, ...]:
        """`[..., heads, tokens, dim]` split along heads: those of each codec, then those without one."""
        if states.shape[-3] != len(self.codecs):
            raise Unsupported(f"bits of {len(self.codecs)} heads in a layer of {states.shape[-3]}; one for each head")
        return states[..., self._order, :, :].split([len(group) for group in self._groups], -3)


def check_single_heads(codec: Codec, head_dim: int) -> None:
    """Raise `Unsupported` for a codec whose reconstruction of a head depends on the other heads.

    Also for calibrated codecs and subclasses of `Codec`; others run on random states, with and without a second head.
    """
    together = "encodes heads together, or by a calibration; its heads have no bits of their own"
    if type(codec) is not Codec or codec.fits_first_tokens or codec.quantizer.variable_rows or calibrated_parts(codec):
        raise Unsupported(together)
    states = torch.randn(1, 2, 64, head_dim, generator=torch.Generator().manual_seed(0))
    rope = rope_table(64, head_dim)
    both, one = (codec.decode(codec.encode(part, rope=rope), rope) for part in (states, states[:, :1]))
    if not torch.equal(both[:, :1], one):
        raise Unsupported(together)
