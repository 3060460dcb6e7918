"""Attention as an engine's: queries in 8 bits, as llama.cpp's CPU kernels have them, and the states that it stored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvq.cache.hooks import attentions, layer_number
from kvq.cache.observe import INTERFACE, Hooked, hook_interface
from kvq.codecs import Axis, Codec, UniformQuantizer

Q8_0 = UniformQuantizer(8, Axis.per_token, 32, symmetric=True, reciprocal=True)
"""ggml's 8-bit blocks of 32 channels as its vector kernels round them, halves to the even code."""

States = tuple[Float[Tensor, "heads tokens dim"], Float[Tensor, "heads tokens dim"]]
"""Keys and values of a layer."""


def unstaged(codec: Codec, y: Float[Tensor, "*lead tokens dim"]) -> Float[Tensor, "*lead tokens dim"]:
    """States before the stages of a codec (orders and rotations alone), from those after them."""
    for _, stage in reversed(codec.stages):
        y = stage.inverse(y, {})
    return y


class _Changed(Hooked):
    """Attention functions that read other queries, keys and values than they are given."""

    def __init__(self, functions: Any, key: Codec | None, stored: Sequence[States] | None) -> None:
        super().__init__(functions, lambda *_: None)
        self._key, self._stored = None if key is None else key.rebuilt(key.stages, Q8_0), stored

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found = self._functions.get_interface(name, default)

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._stored is not None:
                held = self._stored[layer_number(module, kwargs)]
                key, value = (own[None].to(query) for own in held)
            if self._key is not None:
                query = self._key.decode(self._key.encode(query))
            return found(module, query, key, value, *args, **kwargs)

        return attend


@contextmanager
def engine_attention(model: nn.Module, key: Codec | None, stored: Sequence[States] | None = None) -> Iterator[None]:
    """All attentions of a model read what an engine's read while the context lasts.

    Args:
        key: codec of the keys, whose stages precede the rounding of queries to 8 bits; None: queries as they are.
        stored: keys and values of each layer, in the place of the model's; None: the model's.

    Raises:
        Unsupported: attention that does not go through transformers' attention interface.
    """
    source = sys.modules[type(attentions(model)[0]).__module__]
    undo = hook_interface(attentions(model)[0], lambda *_: None)
    setattr(source, INTERFACE, _Changed(getattr(source, INTERFACE)._functions, key, stored))
    try:
        yield
    finally:
        undo()


@contextmanager
def rounding_error(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Token embeddings are off by a unit in the last place of fp32 (normal, relative) while the context lasts."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        noise = torch.randn(out.shape, generator=generator).to(out.device)
        return out * (1 + torch.finfo(torch.float32).eps * noise).to(out.dtype)

    handle = model.get_input_embeddings().register_forward_hook(nudge)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()
