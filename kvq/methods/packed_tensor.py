"""One tensor of keys or values in packed form, without a model: the API of the `nsn` package, for every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, Packed
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.method import Method


class PackedTensor:
    """Keys or values of one layer, `[batch, heads, tokens, head_dim]`, packed once; each decoding is computed anew.

    Source: the `nsn` package's cache of one tensor (Sato 2026, doi 10.5281/zenodo.19724817), for every method.
    """

    def __init__(self, codec: Codec, packed: Packed) -> None:
        self.codec, self.packed = codec, packed

    @classmethod
    def from_full_precision(
        cls,
        x: Float[Tensor, "batch heads tokens head_dim"],
        method: str | Method = "nsn",
        bits: Any = 3,
        side: str = "key",
        overrides: Sequence[str] = (),
    ) -> PackedTensor:
        """Pack all tokens of `x` as one block.

        Args:
            x: keys or values in any floating-point dtype.
            method: a name and its `bits` and `overrides` as in `kvq.build_method`, or a built method.
            side: whose codec, `key` or `value`.

        Raises:
            ConfigError: an unknown side, method, setting or value.
            Unsupported: bits or a head dim that the method cannot do; a side in full precision; a codec that needs
                token positions.
        """
        if side not in ("key", "value"):
            raise ConfigError(f"side={side}: key or value")
        if isinstance(method, str):
            method = build_method(method, bits, x.shape[-1], overrides)
        if method.by_layer:
            raise Unsupported("method.bits_by_layer: a tensor has no layer; give `bits`")
        codec = getattr(method, side)
        if codec is None:
            raise Unsupported(f"method={method.name}: its {side}s stay in full precision")
        codec.check(x.shape[-1])
        return cls(codec, codec.encode(x))

    @property
    def nbytes(self) -> int:
        """Bytes of every stored tensor."""
        return self.packed.nbytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, measured."""
        return self.packed.bits_per_element

    def to_full_precision(self) -> Float[Tensor, "batch heads tokens head_dim"]:
        """The reconstruction, in the dtype that was packed."""
        return self.codec.decode(self.packed)

    def to_full_precision_compiled(self) -> Float[Tensor, "batch heads tokens head_dim"]:
        """The same through `torch.compile`, equal up to rounding; the first call of a shape compiles for seconds."""
        return _compiled()(self.codec, self.packed)


def _decode(codec: Codec, packed: Packed) -> Tensor:
    return codec.decode(packed)


_COMPILED: list[Callable[[Codec, Packed], Tensor]] = []


def _compiled() -> Callable[[Codec, Packed], Tensor]:
    """`_decode` compiled, one for all tensors so that graphs are shared."""
    if not _COMPILED:
        _COMPILED.append(torch.compile(_decode, dynamic=False))
    return _COMPILED[0]
