"""A codec for each KV head: heads of different bits, and heads that stay in full precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.codecs.calibrated import calibrated_parts
from kvq.codecs.codec import Codec
from kvq.codecs.quantizers import Parts, shared_group
from kvq.codecs.rope import Rope, rope_table
from kvq.errors import ConfigError, Unsupported

_WHOLE = "whole"


class HeadsCodec(Codec):
    """Encodes each head by a codec of its own; heads that share one are encoded together.

    Stores `heads<i>.<part>` of the i-th codec, in order of its first head, and `whole`, the states of heads without a
    codec in the dtype of the cache.

    Args:
        codecs: one for each head, equal objects for heads of equal settings; None: the head stays in full precision.

    Raises:
        ConfigError: no codec at all.
        Unsupported: heads in another number than codecs, when states are encoded.
    """

    version: ClassVar[int] = 1

    def __init__(self, codecs: Sequence[Codec | None]) -> None:
        own = {id(codec): codec for codec in codecs if codec is not None}
        if not own:
            raise ConfigError("HeadsCodec: no head has a codec; leave the layer in full precision")
        self.codecs, self._own = list(codecs), list(own.values())
        # Each codec's heads, as they follow one another in `_order`; those without a codec last.
        self._groups = [[head for head, one in enumerate(codecs) if one is codec] for codec in (*self._own, None)]
        order = [head for group in self._groups for head in group]
        self._order, self._back = order, sorted(range(len(order)), key=order.__getitem__)
        first = self._own[0]
        super().__init__(dict(first.stages), [name for name, _ in first.stages], first.quantizer)

    @property
    @override
    def uses_rope(self) -> bool:
        return any(codec.uses_rope for codec in self._own)

    @property
    @override
    def token_group(self) -> int | None:
        return shared_group([codec.token_group for codec in self._own])

    @override
    def with_more_bits(self, extra: int, most: int) -> Codec:
        raised = {id(codec): codec.with_more_bits(extra, most) for codec in self._own}
        return HeadsCodec([None if codec is None else raised[id(codec)] for codec in self.codecs])

    @override
    def check(self, head_dim: int) -> None:
        for codec in self._own:
            codec.check(head_dim)

    @override
    def encode_block(
        self,
        blocks: Float[Tensor, "*lead heads tokens head_dim"],
        rope: Rope | None = None,
        dtype: torch.dtype | None = None,
    ) -> Parts:
        *pieces, whole = self._split(blocks)
        parts = Parts()
        for i, (codec, piece) in enumerate(zip(self._own, pieces, strict=True)):
            parts |= {f"heads{i}.{name}": part for name, part in codec.encode_block(piece, rope, dtype).items()}
        return {**parts, _WHOLE: whole.to(dtype or blocks.dtype, copy=True)} if whole.shape[-3] else parts

    @override
    def decode_block(
        self, parts: Parts, shape: torch.Size, dtype: torch.dtype, rope: Rope | None = None
    ) -> Float[Tensor, "*lead heads tokens head_dim"]:
        out = []
        for i, codec in enumerate(self._own):
            prefix = f"heads{i}."
            own = {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
            heads = torch.Size([*shape[:-3], len(self._groups[i]), *shape[-2:]])
            out.append(codec.decode_block(own, heads, dtype, rope))
        return self._joined([*out, parts[_WHOLE].to(dtype)] if _WHOLE in parts else out)

    def _split(self, states: Tensor) -> tuple[Tensor, ...]:
        """The heads of each codec, then those without one."""
        if states.shape[-3] != len(self.codecs):
            raise Unsupported(
                f"bits of {len(self.codecs)} heads in a layer of {states.shape[-3]}; one for each KV head"
            )
        return states[..., self._order, :, :].split([len(group) for group in self._groups], -3)

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces, -3)[..., self._back, :, :]


def check_single_heads(codec: Codec, head_dim: int) -> None:
    """Raise `Unsupported` for a codec that does not store of one head alone what it stores of it among others.

    It is tried on drawn states.
    """
    together = "encodes heads together, or by a calibration; its heads have no bits of their own"
    if type(codec) is not Codec or codec.fits_first_tokens or codec.quantizer.variable_rows or calibrated_parts(codec):
        raise Unsupported(together)
    states = torch.randn(1, 2, 64, head_dim, generator=torch.Generator().manual_seed(0))
    rope = rope_table(64, head_dim)
    both, one = (codec.decode(codec.encode(part, rope=rope), rope) for part in (states, states[:, :1]))
    if not torch.equal(both[:, :1], one):
        raise Unsupported(together)
