"""Regimes: ways in which a decoded token reads a packed past, compared by `task=latency task.regimes=[...]`.

nsn (Sato 2026) times its dequantization in three ways: head by head in a Python loop, a layer at once, and compiled.
kvq adds two that its users can choose: keep the decoded past, and attend to the codes without decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from kvq.cache import KVCache
from kvq.codecs import Codec, Packed, Rope
from kvq.codecs.quantizers import Parts
from kvq.config.speed import Regime
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.models import LoadedModel


class PerHeadCodec(Codec):
    """Decodes each head of each sequence on its own, in a Python loop."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer

    @override
    def decode(self, packed: Packed, rope: Rope | None = None) -> Float[Tensor, "batch heads tokens head_dim"]:
        decode = super().decode
        sequences = []
        for b in range(packed.batch):
            heads = [decode(_head(packed, b, h), rope) for h in range(packed.heads)]
            sequences.append(torch.cat(heads, 1))
        return torch.cat(sequences)


def _head(packed: Packed, b: int, h: int) -> Packed:
    parts = {name: part[b : b + 1, min(h, part.shape[1] - 1)][:, None] for name, part in packed.parts.items()}
    return dataclasses.replace(packed, parts=parts, batch=1, heads=1)


class CompiledCodec(Codec):
    """Decodes a layer at once, by `torch.compile`; the first call compiles."""

    def __init__(self, codec: Codec) -> None:
        self.stages, self.quantizer = codec.stages, codec.quantizer
        self._decode: Callable[..., Tensor] = torch.compile(super().decode_block, dynamic=True)

    @override
    def decode_block(
        self, parts: Parts, shape: torch.Size, dtype: torch.dtype, rope: Rope | None = None
    ) -> Float[Tensor, "*lead heads tokens head_dim"]:
        try:
            return self._decode(parts, shape, dtype, rope)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise Unsupported(f"task.regimes: compiled: torch.compile cannot, {reason}") from error


CODECS: dict[Regime, type[PerHeadCodec | CompiledCodec]] = {
    Regime.per_head: PerHeadCodec,
    Regime.compiled: CompiledCodec,
}


def check_regimes(method: Method, regimes: list[Regime]) -> None:
    """Raise `Unsupported`, in one line, for a method with more than two codecs and a residual."""
    for name in ("backend", "plan", "eviction", "first_layers", "by_layer", "is_calibrated"):
        if regimes and getattr(method, name):
            raise Unsupported(
                f"task.regimes: method={method.name} ({name}) has no past that can be decoded in each way"
            )
    if Regime.packed in regimes and not method.is_full_precision:
        method.check_packed()


def cache_maker(regime: Regime, loaded: LoadedModel, method: Method) -> Callable[[], Any]:
    """A function that makes an empty cache of `regime`."""
    wrap = CODECS.get(regime)
    if wrap is not None:
        key, value = (None if codec is None else wrap(codec) for codec in (method.key, method.value))
        method = dataclasses.replace(method, key=key, value=value)
    kept, attention = regime is Regime.kept, "packed" if regime is Regime.packed else "dense"
    return lambda: KVCache(loaded, method, keep_decoded=kept, attention=attention)
