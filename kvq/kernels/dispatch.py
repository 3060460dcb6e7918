"""Attention on packed codes, by a fused kernel of a plugin that can read them, else in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec
from kvq.codecs.codec import isolated
from kvq.config.plugins import import_modules
from kvq.errors import Unsupported
from kvq.kernels import eager
from kvq.kernels.linear_chain import PackedStates

_WATCH: ContextVar[eager.Step | None] = ContextVar("_WATCH", default=None)


@runtime_checkable
class Kernels(Protocol):
    """A module that a plugin registers for the extension point `kernels`: fused attention and encoding."""

    def attention_for(
        self, query: Tensor, keys: PackedStates, values: PackedStates, softcap: float | None
    ) -> tuple[str, Callable[..., Tensor]] | None:
        """Name and function of a kernel that reads these keys and values; None: there is none.

        The function takes what `kvq.kernels.eager.attend` takes and agrees with it up to rounding.
        """

    def fuse(self, codec: Codec) -> Codec:
        """A codec that makes the same parts faster where it can.

        A code may differ where a value is halfway between two codes up to rounding, as sums have another order.
        """


@functools.cache
def load_kernels() -> Sequence[Kernels]:
    """The kernels of the plugins in use."""
    return cast("list[Any]", import_modules("kernels"))


@contextmanager
def time_steps(step: eager.Step) -> Iterator[None]:
    """Within the context, attention runs in PyTorch, each of its steps within `step(name)`, which times it.

    All steps together run within `step("attention")`.
    """
    token = _WATCH.set(step)
    try:
        yield
    finally:
        _WATCH.reset(token)


def choose_kernel(
    query: Tensor, keys: PackedStates, values: PackedStates, softcap: float | None = None
) -> tuple[str, Callable[..., Tensor]]:
    """Name and function of the first plugin's kernel that reads these keys and values, else `eager` in PyTorch."""
    offered = (kernels.attention_for(query, keys, values, softcap) for kernels in load_kernels())
    return next((kernel for kernel in offered if kernel is not None), ("eager", eager.attend))


@isolated()
def attend(
    query: Float[Tensor, "batch heads 1 dim"],
    keys: PackedStates,
    values: PackedStates,
    scaling: float,
    first: int = 0,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads 1 _dim"]:
    """`eager.attend` by the kernel that `choose_kernel` names; sinks count among the tokens before `first`."""
    if keys.sinks or values.sinks:
        if (keys.sinks, keys.packed_tokens) != (values.sinks, values.packed_tokens):
            raise Unsupported("cache.attention=packed: first tokens in full precision need keys and values in step")
        hidden = min(first, keys.sinks)
        keys, values, first = keys.without_sinks(hidden), values.without_sinks(hidden), first - hidden
    if (step := _WATCH.get()) is not None:
        with step("attention"):
            return eager.attend(query, keys, values, scaling, first, softcap, step)
    return choose_kernel(query, keys, values, softcap)[1](query, keys, values, scaling, first, softcap)


def fuse_codec(codec: Codec) -> Codec:
    """The codec, or one of a plugin that makes the same parts faster."""
    return functools.reduce(lambda made, kernels: kernels.fuse(made), load_kernels(), codec)
