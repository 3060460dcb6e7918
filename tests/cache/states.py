"""Random states, and a cache side that recomputes everything from the tokens it has seen."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvq.codecs import Codec
from tests.presets import preset


@functools.cache
def nearest_bits(name: str) -> int:
    """3 bits, or the nearest that the method can do."""
    method = preset(name, "bits=2")
    if name == "quanto":
        return 2
    lowest, highest = method.bits_range or (3, 3)
    return min(max(3, lowest), highest)


@functools.cache
def quantizes(name: str) -> bool:
    """The method has codecs; the others keep or evict tokens as they are."""
    method = preset(name, "bits=2")
    return method.key is not None or method.value is not None


def states(tokens: int, batch: int = 1, heads: int = 2, dim: int = 32, seed: int = 0) -> Tensor:
    """Random keys or values `[batch, heads, tokens, dim]` with channel offsets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, dim, generator=generator)
    return x + 2 * torch.randn(1, heads, 1, dim, generator=generator)


class NaiveSide:
    """The residual policies word by word: a list of encoded blocks and a list of tokens still in full precision."""

    def __init__(self, codec: Codec, policy: str, size: int, whole: bool, group: int = 1) -> None:
        """`group`: tokens that leave a sliding residual together."""
        self.codec, self.policy, self.size, self.whole, self.group = codec, policy, size, whole, group
        self.decoded: list[Tensor] = []
        self.waiting: list[Tensor] = []
        self.packed_bytes = 0

    def append(self, chunk: Tensor) -> Tensor:
        """What attention reads."""
        first = not self.decoded and not self.waiting
        self.waiting += chunk.split(1, 2)
        if self.policy == "none":
            while self.waiting:
                self._encode(len(self.waiting) if self.whole else self.size)
            return self._read()
        seen = self._read()
        self._flush(first)
        return seen

    def _flush(self, first: bool) -> None:
        if self.policy == "sliding":
            ready = len(self.waiting) - self.size
            if first and self.whole and ready >= self.group:
                self._encode(ready)
            while len(self.waiting) - self.size >= self.group:
                self._encode(self.group)
            return
        if first and self.whole and len(self.waiting) >= self.size:
            self._encode(len(self.waiting))
        while len(self.waiting) >= self.size:
            self._encode(self.size)

    def _encode(self, count: int) -> None:
        packed = self.codec.encode(torch.cat(self.waiting[:count], 2))
        self.waiting = self.waiting[count:]
        self.decoded.append(self.codec.decode(packed))
        self.packed_bytes += packed.nbytes

    def _read(self) -> Tensor:
        return torch.cat(self.decoded + self.waiting, 2)

    @property
    def residual_bytes(self) -> int:
        return sum(token.numel() * token.element_size() for token in self.waiting)
