"""The released names of nsn's packed cache, over kvq's codec: what imports the package `nsn` runs with this module.

    import sys, kvq_zoo.nsn
    sys.modules["nsn"] = kvq_zoo.nsn
    from nsn import Int3AsymNsepPchanCache

nsn's companions LAB (bits for the states of state-space models) and SADP (a compiler that chooses between nsn and LAB
for hybrid models) are named in its README and are no part of kvq's sources: nothing here is made after them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar, Self

from jaxtyping import Float
from torch import Size, Tensor

from kvq.codecs import Codec, Packed
from kvq.methods.build import build_method
from kvq.tasks.steps import CompiledCodec


class Int3AsymNsepPchanCache:
    """Keys or values of one block in nsn's form: norms of tokens, and directions per channel in 3 bits.

    Source: Sato 2026 (doi 10.5281/zenodo.19724817), the package's README. `method=nsn` is the same codec in a cache.
    """

    bits: ClassVar[int] = 3

    def __init__(self, packed: Packed, shape: Size) -> None:
        """See `from_fp16`. `shape`: of what is given back."""
        self._packed, self._shape = packed, shape

    @classmethod
    def from_fp16(cls, x: Float[Tensor, "*lead tokens dim"]) -> Self:
        """Pack states of any float dtype; all tokens share the ranges of a channel."""
        codec, _ = _codecs(cls.bits, x.shape[-1])
        return cls(codec.encode(x.reshape(1, math.prod(x.shape[:-2]), *x.shape[-2:])), x.shape)

    def to_fp16(self) -> Float[Tensor, "*lead tokens dim"]:
        """The states decoded, in the dtype they came in."""
        return self._decoded(0)

    def to_fp16_compiled(self) -> Float[Tensor, "*lead tokens dim"]:
        """As `to_fp16`, by torch.compile, up to rounding; the first call takes seconds and needs a C++ compiler.

        Raises:
            Unsupported: torch.compile cannot here.
        """
        return self._decoded(1)

    def size_bytes(self) -> int:
        """Bytes of codes, scales, offsets and norms."""
        return self._packed.nbytes

    def _decoded(self, which: int) -> Tensor:
        return _codecs(self.bits, self._shape[-1])[which].decode(self._packed).reshape(self._shape)


@lru_cache(maxsize=16)
def _codecs(bits: int, head_dim: int) -> tuple[Codec, Codec]:
    """nsn's codec, and the same compiled."""
    codec = build_method("nsn", bits=bits, head_dim=head_dim).key
    assert codec is not None
    return codec, CompiledCodec(codec)
