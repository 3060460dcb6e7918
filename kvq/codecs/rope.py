"""Rotary position embedding as data and stages: undone and redone around other steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.codecs.stages import Side, Stage


@dataclass(frozen=True)
class Rope:
    """The rotation of each token's channels: pure rotations of channel pairs, one per token and pair.

    Attributes:
        cos, sin: `[batch or 1, tokens, pairs]` (cut into blocks: `[batch or 1, blocks, 1, tokens, pairs]`), with
            cos² + sin² = 1: an attention factor (yarn, longrope) is left in the keys, where any norm absorbs it. Zero
            pairs: the model has no rotary embedding.
        interleaved: pairs are channels (2i, 2i+1) as in GPT-J, else (i, i + pairs) as in Llama. Channels from
            2 * pairs on are not rotated (partial rotary embeddings).
    """

    cos: Float[Tensor, "*lead tokens pairs"]
    sin: Float[Tensor, "*lead tokens pairs"]
    interleaved: bool = False

    @property
    def tokens(self) -> int:
        return self.cos.shape[-2]

    def narrow(self, start: int, length: int) -> Rope:
        """The rotations of `length` tokens from `start` on."""
        return replace(self, cos=self.cos.narrow(1, start, length), sin=self.sin.narrow(1, start, length))

    def at(self, positions: Int[Tensor, " chosen"]) -> Rope:
        """The rotations of the tokens at `positions`."""
        return replace(self, cos=self.cos[:, positions], sin=self.sin[:, positions])

    def to(self, device: torch.device | str) -> Rope:
        """The same on another device."""
        return replace(self, cos=self.cos.to(device), sin=self.sin.to(device))

    def blocks(self, length: int, number: int) -> Rope:
        """The rotations cut into blocks: `[batch or 1, number, 1, length, pairs]`, from `number * length` tokens."""
        shape = (number, 1, length)
        return replace(self, cos=self.cos.unflatten(1, shape), sin=self.sin.unflatten(1, shape))

    def rotate(
        self, x: Float[Tensor, "*lead tokens head_dim"], back: bool = False
    ) -> Float[Tensor, "*lead tokens dim"]:
        """Rotate the pairs of every token forward, or `back`."""
        pairs = self.cos.shape[-1]
        if not pairs:
            return x
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        away, towards = (1, -1) if back else (-1, 1)
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.split(pairs, -1)
        out = [(a * cos).addcmul_(b, sin, value=away), (b * cos).addcmul_(a, sin, value=towards)]
        if self.interleaved:
            out = [torch.stack(out, -1).flatten(-2)]
        return torch.cat([*out, rest], -1)


def rope_table(tokens: int, head_dim: int, base: float = 10000.0, start: int = 0) -> Rope:
    """The rotations of a plain rotary embedding at positions `start` to `start + tokens - 1` (arXiv 2104.09864)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(start, start + tokens, dtype=torch.float64)[:, None] * frequencies
    return Rope(angles.cos()[None], angles.sin()[None])


class _RopeStage(Stage):
    orthogonal = True
    uses_rope = True
    token_group = 1
    back: bool

    def __init__(self, before_values: bool = False) -> None:
        self.before_values = before_values

    def _rotate(self, x: Float[Tensor, "*lead heads tokens dim"], rope: Rope | None, back: bool) -> Tensor:
        assert rope is not None
        if not self.before_values:
            return rope.rotate(x, back)
        keys, values = x.chunk(2, -3)
        return torch.cat([rope.rotate(keys, back), values], -3)

    def forward(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Side]:
        return self._rotate(x, rope, self.back), {}

    def inverse(self, y: Tensor, side: Side, rope: Rope | None = None) -> Tensor:
        return self._rotate(y, rope, not self.back)


class UndoRope(_RopeStage):
    """Undo the rotary embedding of keys, which reach a cache after it.

    Needs the tokens' rotations: `Codec.encode(x, rope=...)`. A model without a rotary embedding has nothing to undo.

    Args:
        before_values: the second half of the heads are values (`StoredWithKeys`), which have no rotary embedding.
    """

    version: ClassVar[int] = 1
    back = True


class ApplyRope(_RopeStage):
    """The rotary embedding again, as a pure rotation; see `UndoRope`."""

    version: ClassVar[int] = 1
    back = False
