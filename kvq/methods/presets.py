"""`kvq.quantize`: the caches of a model are quantized ones while a `with` statement lasts; `kvq.method_for`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from kvq.cache import KVCache
from kvq.cache.hooks import named_arguments, stacks
from kvq.errors import ConfigError, require
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.methods.policies import check_unrotated
from kvq.models.layers import head_dims_of
from kvq.models.load import unwrapped


def method_for(model: nn.Module, name: str, bits: Any = 3, overrides: Sequence[str] = ()) -> Method:
    """Build a method by name, adapted to a model (channel order of RoPE) and checked for its head dims.

    Args:
        model: a causal LM of transformers.
        name, bits, overrides: as `kvq.build_method`.

    Raises:
        ConfigError, Unsupported: as `kvq.build_method`, for any of the model's head dims.
    """
    config = unwrapped(model).config.get_text_config(decoder=True)
    method = build_method(name, bits, list(dict.fromkeys(head_dims_of(config))), overrides)
    return method.for_model(config)


class _Caches:
    """Makes the caches of model calls within `quantize` and records which were read. `settings`: of `KVCache`."""

    def __init__(self, model: Any, method: Method, **settings: Any) -> None:
        self._model, self._method, self._settings = model, method, settings
        self._starts: list[set[bool]] = []

    def make(self) -> Cache:
        """A new cache."""
        cache = KVCache(self._model, self._method, **self._settings)
        self._starts.append(cache.starts)
        return EncoderDecoderCache(cache, DynamicCache()) if self._model.config.is_encoder_decoder else cache

    def _note_use(self, *asked: bool | None) -> bool:
        """Whether a call uses a cache: the first of `asked` that is not None, else True. Records calls without one."""
        used = next((one for one in asked if one is not None), True)
        if not used:
            self._starts.append({False})
        return used

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook that adds a cache where none is given."""
        call = named_arguments(module, args, kwargs)
        default = getattr(self._model.config.get_text_config(), "use_cache", None)
        if call.get("past_key_values") is not None or not self._note_use(call.get("use_cache"), default):
            return None
        return (), call | {"past_key_values": self.make()}

    def wrap_generate(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` that adds a cache where none is given."""

        def generate(*args: Any, **kwargs: Any) -> Any:
            configs = (args[1] if len(args) > 1 else kwargs.get("generation_config"), self._model.generation_config)
            asked = (getattr(config, "use_cache", None) for config in configs)
            if kwargs.get("past_key_values") is None and self._note_use(kwargs.get("use_cache"), *asked):
                kwargs["past_key_values"] = self.make()
            return plain(*args, **kwargs)

        return generate

    def warn_of_unread(self) -> None:
        """Warn of calls that read no quantized token."""
        if {False} not in self._starts or self._method.is_full_precision:
            return
        warnings.warn(
            "kvq.quantize: a call read no quantized token, so its loss and logits are of full precision: one forward "
            "attends before it stores (task=ppl scores a text), and use_cache=False stores nothing",
            stacklevel=4,
        )


@contextmanager
def quantize(
    model: nn.Module,
    method: str | Method,
    bits: Any = 3,
    *,
    overrides: Sequence[str] = (),
    attention: str = "dense",
    dtype: torch.dtype | None = None,
) -> Iterator[Method]:
    """`with kvq.quantize(model, "kivi", bits=2): model.generate(**inputs)`: caches made inside are quantized.

    A call of the model or of its `generate` without a cache gets a new `KVCache` (in an encoder-decoder, for decoder
    self-attention); a cache that is passed is used unchanged. In nested statements the innermost applies. Afterwards
    the model is restored, with weights that a method rotates. It warns of calls that read no quantized token: a single
    forward, such as for a loss, attends in full precision before it stores, and `use_cache=False` stores nothing.

    Args:
        model: a causal LM of transformers (docs/models.md).
        method: a name, or a built method, such as one with its calibration (`kvq.calibrate`, `kvq.bind_calibration`),
            for which `overrides` must be empty.
        bits, overrides: as `kvq.build_method`.
        attention, dtype: as `KVCache`.

    Yields:
        The method.

    Raises:
        ConfigError, Unsupported: as `kvq.build_method` and `KVCache`, such as for a calibrated method without tables.
    """
    require(isinstance(method, str | Method), "method", method, "a name, or a method of kvq.build_method")
    if overrides and not isinstance(method, str):
        raise ConfigError("quantize: overrides belong to a method by name, not to one that is built")
    chosen = method_for(model, method, bits, overrides) if isinstance(method, str) else method
    plain = unwrapped(model)
    check_unrotated(plain.config.get_text_config())
    settings: Any = {"attention": attention, "dtype": dtype}
    caches = _Caches(plain, chosen, **settings)
    parts = {plain, *stacks(plain)} if not plain.config.is_encoder_decoder else {plain}
    with ExitStack() as undo:
        if chosen.merged is not None:
            undo.enter_context(chosen.merged.in_weights(plain))
        KVCache(plain, chosen, **settings)  # what cannot work is refused here, not at the first token
        if hasattr(plain, "generate"):
            undo.enter_context(patch.object(plain, "generate", caches.wrap_generate(plain.generate)))
        for part in parts:
            hook = part.register_forward_pre_hook(caches.before_call, prepend=True, with_kwargs=True)
            undo.callback(hook.remove)
        yield chosen
    caches.warn_of_unread()
