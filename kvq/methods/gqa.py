"""More bits where query heads share keys and values: the error of one KV head enters the outputs of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvq.codecs import Codec

MOST = 8


@dataclass(frozen=True)
class GqaCompensation:
    """Raises the bits of codecs by ceil(log4 g) for g query heads of each KV head, up to 8 bits.

    Source: KVQuant++ (`gqa`), +⌈log₄ g⌉ bits, cap 8.
    """

    version: ClassVar[int] = 1

    def extra(self, config: Any) -> int:
        """Bits that are added in a model: 0 for one query head, 1 up to 4, 2 up to 16."""
        heads = int(config.num_attention_heads)
        shared, bits = heads // int(getattr(config, "num_key_value_heads", None) or heads), 0
        while 4**bits < shared:
            bits += 1
        return bits

    def codec(self, codec: Codec | None, config: Any) -> Codec | None:
        """The codec with its bits raised. Raises: Unsupported: one without bits to raise."""
        return None if codec is None else codec.with_more_bits(self.extra(config), MOST)

    def check(self, codec: Codec | None) -> None:
        """Raises: Unsupported: a codec without bits to raise."""
        if codec is not None:
            codec.with_more_bits(0, MOST)
