"""A model whose caches are quantized while a `with` statement lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from kvq.cache import KVCache
from kvq.errors import ConfigError
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.models.layers import head_dims_of


def method_for(model: nn.Module, name: str, bits: Any = 3, overrides: Sequence[str] = ()) -> Method:
    """A method by name, checked against the head dims and the order of channels of a model.

    Args:
        model: a causal LM of transformers.
        name, bits, overrides: as `kvq.build_method`.

    Raises:
        ConfigError, Unsupported: as `kvq.build_method`, for any of the model's head dims.
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    method = build_method(name, bits, list(dict.fromkeys(head_dims_of(config))), overrides)
    return method.in_order_of(config) if method.asks_for_order else method


@dataclass(frozen=True)
class Preset:
    """A method with settings of its own, not yet built for a model; `kvq.quantize` takes it.

    Attributes:
        name: of the method's file, such as `"kivi"`.
        bits: as `kvq.build_method`.
        overrides: what departs from the file, as `kvq.build_method` takes it.
    """

    name: str
    bits: Any = 3
    overrides: tuple[str, ...] = ()

    def build(self, head_dim: int = 128) -> Method:
        """The method for heads of `head_dim` channels. Raises: as `kvq.build_method`."""
        return build_method(self.name, self.bits, head_dim, self.overrides)

    def build_for(self, model: nn.Module) -> Method:
        """The method for a model of transformers. Raises: as `kvq.method_for`."""
        return method_for(model, self.name, self.bits, self.overrides)


@contextmanager
def quantize(
    model: nn.Module,
    method: str | Preset | Method,
    bits: Any = 3,
    *,
    overrides: Sequence[str] = (),
    attention: str = "dense",
    dtype: torch.dtype | None = None,
) -> Iterator[Method]:
    """`with kvq.quantize(model, "kivi", bits=2): model.generate(**inputs)`: caches made inside are quantized.

    A call of the model or of its `generate` that is given no cache gets a new `KVCache`; a cache that is given is left
    alone. After the statement the model is as it was, and so are weights that a method rotates.

    Args:
        model: a causal LM of transformers (docs/models.md).
        method: a name; a call of a method (`kvq.methods.KIVI(bits=2)`), which has its own bits; or a method that is
            built, such as one with its calibration (`kvq.calibrate`, `kvq.bind_calibration`). The last two come without
            `overrides`.
        bits, overrides: as `kvq.build_method`.
        attention, dtype: as `KVCache`.

    Yields:
        The method.

    Raises:
        ConfigError, Unsupported: as `kvq.build_method` and `KVCache`, such as for a calibrated method without tables.
    """
    if overrides and not isinstance(method, str):
        raise ConfigError("quantize: overrides belong to a method by name, not to a call or to one that is built")
    if isinstance(method, str):
        method = Preset(method, bits, tuple(overrides))
    chosen = method.build_for(model) if isinstance(method, Preset) else method
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    make = partial(KVCache, model, chosen, attention=attention, dtype=dtype)
    make()  # what cannot work is refused here, not at the first token

    def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        asked = kwargs.get("use_cache")
        wanted = config.use_cache if asked is None else asked
        return args, kwargs | ({"past_key_values": make()} if wanted and kwargs.get("past_key_values") is None else {})

    def generate(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("past_key_values", None)
        return plain(*args, past_key_values=make() if given is None else given, **kwargs)

    plain: Any = model.generate
    hook = model.register_forward_pre_hook(give, with_kwargs=True)
    merged = nullcontext() if chosen.merged is None else chosen.merged.in_weights(model)
    try:
        with merged, patch.object(model, "generate", generate):
            yield chosen
    finally:
        hook.remove()
