"""Hooks on a model's forward: they tell the cache of padding and let the cache extend the mask of each attention.

Expanded keys and values of multi-head latent attention are handed over by a hook too: transformers' attentions give the
latent and the rotated part of the keys to the cache, and expand what it returns (`expand_kv`). An `Expansion` in that
place expands new tokens for the cache, and gives what the cache read where the attention would expand.
"""

from __future__ import annotations

import abc
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvq.cache.chunk_masks import SourceColumns
from kvq.cache.observe import Attended, hook_interface
from kvq.errors import Unsupported
from kvq.models.layers import window_of
from kvq.models.placing import base_of

_CACHE_NAMES = ("past_key_values", "layer_past")
_MASKED = ("eager", "sdpa", "kvq_eager", "kvq_sdpa")
"""Attention implementations that take any mask."""


class WatchfulCache(Cache, abc.ABC):
    """A cache whose `before_attention` runs before each attention (a forward pre-hook)."""

    wants_hidden = False
    """`receive_hidden` is to be called."""
    recording = False
    """Each forward can be undone; its last tokens may be candidates, which attend as if fed one by one."""

    @abc.abstractmethod
    def receive_logits_to_keep(self, logits: Any) -> None:
        """Receive `logits_to_keep` of the next forward; None: not given."""

    @abc.abstractmethod
    def before_attention(self, module: nn.Module, arguments: dict[str, Any], hidden: Tensor) -> SourceColumns | None:
        """The columns that this attention will read; None: each token once, as it is.

        Args:
            arguments: of the module's forward, by name.
            hidden: `[batch, tokens, channels]` of the new tokens.
        """

    @abc.abstractmethod
    def receive_tokens(self, input_ids: Tensor | None, padding: Sequence[int] | None) -> None:
        """Receive the token ids of a forward of the model before any layer runs; None: the model gets embeddings.

        `padding`: columns before the first token of each sequence; None: none.
        """

    @abc.abstractmethod
    def receive_hidden(self, index: int, hidden: Tensor) -> None:
        """Receive the states `[batch, tokens, channels]` that enter layer `index`, before its norm and attention."""

    @abc.abstractmethod
    def observes(self, index: int) -> bool:
        """Whether `observe` is to be called with the queries and keys of the coming attention of a layer."""

    @abc.abstractmethod
    def observe(self, index: int, attended: Attended) -> None:
        """Receive the queries of an attention and the keys that they read."""


def watch(model: nn.Module) -> list[nn.Module]:
    """Register the hooks on a model and its attentions, once; they ignore other caches. Returns the attentions."""
    base: nn.Module = base_of(model)  # also called where the output embedding is left out
    hooks: list[tuple[nn.Module, Any]] = [(model, _tell_logits_to_keep), (base, _tell_tokens)]
    found = attentions(base)
    hooks += [(module, _tell_attention) for module in found]
    hooks += [(module, _tell_hidden) for module in base.modules() if any(child in found for child in module.children())]
    for module, hook in hooks:
        if hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hook, with_kwargs=True)
    return found


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attentions of a model: the innermost modules that take a mask and a cache and have a `layer_idx`.

    Those with a convolution are left out: they keep a state (Zamba 2).
    """
    found = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and _takes_cache(type(module)) and not _convolves(module)
    ]
    outer = {other for module in found for other in found if other is not module and _within(module, other)}
    return [module for module in found if module not in outer]


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv1d) for part in module.modules())


def _within(module: nn.Module, other: nn.Module) -> bool:
    return any(part is module for part in other.modules())


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def _takes_cache(kind: Any) -> bool:
    parameters = inspect.signature(kind.forward).parameters
    return "attention_mask" in parameters and any(name in parameters for name in _CACHE_NAMES)


def named_arguments(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module`, by name."""
    given = _signature(type(module).forward).bind(module, *args, **kwargs).arguments
    del given["self"]
    return {**given, **given.pop("kwargs", {})}


@contextmanager
def told_before(modules: Sequence[nn.Module], tell: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Within the context, call `tell(module, arguments by name)` before each of these modules runs."""

    def show(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tell(module, named_arguments(module, args, kwargs))

    hooks = [module.register_forward_pre_hook(show, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> WatchfulCache | None:
    return next((item for item in (*kwargs.values(), *args) if isinstance(item, WatchfulCache)), None)


def _tell_hidden(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _cache_of(args, kwargs)
    if cache is not None and cache.wants_hidden:
        attention = next(child for child in layer.children() if hasattr(child, "layer_idx"))
        given = named_arguments(layer, args, kwargs)
        cache.receive_hidden(layer_number(attention, given), given["hidden_states"])


def _tell_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    cache = _cache_of(args, kwargs)
    if cache is None:
        return None
    given = named_arguments(module, args, kwargs)
    columns = cache.before_attention(module, given, given["hidden_states"])
    if cache.observes(index := layer_number(module, given)):
        _observe(module, cache, index)
    if columns is None and not cache.recording:
        return None
    reason = unmasked(module)
    if reason is not None:
        raise Unsupported(f"model: {reason}")
    if given.get("position_bias") is not None:
        raise Unsupported(f"model: {type(module).__name__} adds a position_bias, which no mask can follow")
    if columns is None:
        return None
    given["attention_mask"] = columns.mask(given["attention_mask"])
    if given.get("alibi") is not None:
        given["alibi"] = torch.cat([given["alibi"], given["alibi"].index_select(-1, columns.copies)], -1)
    return (), given


def unmasked(module: nn.Module) -> str | None:
    """The reason why an attention cannot give each query of a chunk a mask of its own; None: it can."""
    way = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
    if way in _MASKED:
        return None
    return (
        f"attention {way} takes no mask, which several tokens at once need where each reads what it would alone "
        f"(residual=sliding, assisted generation); load the model with attn_implementation={' or '.join(_MASKED[:2])}"
    )


def says_candidates(model: nn.Module) -> bool:
    """Whether the model takes `logits_to_keep`, which tells candidates from the prompt before them."""
    return "logits_to_keep" in _signature(type(model).forward).parameters


def _tell_logits_to_keep(_model: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, WatchfulCache):
        cache.receive_logits_to_keep(kwargs.get("logits_to_keep"))


def _observe(module: Any, cache: WatchfulCache, index: int) -> None:
    """Call the cache's `observe` with the attention of this forward of `module`, for layer `index`."""
    seen = []

    def see(caller: Any, query: Tensor, key: Tensor, _value: Tensor, arguments: dict[str, Any]) -> None:
        if caller is module:
            seen.append(True)
            cache.observe(index, Attended.of(module, query, key, arguments))

    undo = hook_interface(module, see)

    def finish(_module: Any, _args: Any, output: Any) -> None:
        undo()
        handle.remove()
        if not seen and output is not None:
            raise Unsupported(f"model: {type(module).__name__} attends in a way that kvq cannot see")

    handle = module.register_forward_hook(finish, always_call=True)


def _tell_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    if not isinstance(cache, WatchfulCache):
        return
    if isinstance(mask, Tensor) and mask.ndim != 2:
        raise Unsupported(
            f"attention_mask: of {mask.ndim} dimensions, which hides from the cache who attends to whom; leave it out"
        )
    cache.receive_tokens(
        kwargs.get("input_ids", args[0] if args else None), padding_of(mask) if mask is not None else None
    )


def padding_of(mask: Tensor) -> list[int] | None:
    """How many columns on the left of each sequence are padding, by a mask `[batch, columns]`; None: there is none.

    Raises:
        Unsupported: a mask that hides other tokens.
    """
    if bool(mask.all()):
        return None
    seen = mask.bool()
    first = seen.int().argmax(1)
    if not torch.equal(seen, torch.arange(seen.shape[1], device=seen.device) >= first[:, None]):
        raise Unsupported(
            "attention_mask: hides tokens that a cache would keep; only padding on the left of every sequence is left "
            "out (padding_side=left)"
        )
    if not bool(seen.any(1).all()):
        raise Unsupported(
            "attention_mask: a sequence of nothing but padding; every sequence needs a token in each forward"
        )
    return [int(count) for count in first]


def check_distances(module: Any, index: int, arguments: dict[str, Any], seen: int, shuffled: bool) -> None:
    """Raise `Unsupported` for an attention that goes by how far back a token stands, which the layer does not keep."""
    if arguments.get("alibi") is not None:
        raise Unsupported(
            f"model: {type(module).__name__} weighs tokens by their distance (ALiBi), which the method does not keep"
        )
    window = window_of(module.config, index)
    if shuffled and window is not None and seen > window:
        raise Unsupported(
            f"model: {type(module).__name__} sees {window} tokens back, which the method does not keep; {seen} came"
        )


def check_window(module: Any, arguments: dict[str, Any], columns: int, window: int) -> None:
    """Raise `Unsupported` where a model does not attend as its window says: what has left it is no longer there."""
    mask = arguments.get("attention_mask")
    way = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
    if isinstance(mask, Tensor) and mask.shape[-1] != columns:
        given = f"masks {mask.shape[-1]} tokens"
    elif mask is None and way in _MASKED and columns >= window:
        given = "has no mask"
    else:
        return
    raise Unsupported(f"model: {type(module).__name__} {given}, where its window of {window} leaves {columns}")


def layer_number(module: Any, arguments: dict[str, Any]) -> int:
    """The number of the layer that an attention works for: an argument where layers share a module (Zamba)."""
    given = arguments.get("layer_idx")
    return int(module.layer_idx if given is None else given)


_STEP = "expand_kv"

States = tuple[Tensor, Tensor]


class Expansion:
    """The step of an attention that expands the latent; what a cache has expanded already, it returns once."""

    def __init__(self, step: Callable[[Tensor, Tensor], States]) -> None:
        self._step = step
        self._ready: States | None = None

    def __call__(self, latent: Tensor, rotated: Tensor) -> States:
        ready, self._ready = self._ready, None
        return self._step(latent, rotated) if ready is None else ready

    def of(self, latent: Tensor, rotated: Tensor) -> States:
        """Keys and values `[batch, heads, tokens, channels]` of new tokens.

        Raises:
            Unsupported: what was read before has not been asked for.
        """
        if self._ready is not None:
            self._ready = None
            raise Unsupported("cache.mla=expanded: the model's attention does not expand what a cache returns")
        return self._step(latent, rotated)

    def put(self, read: States) -> None:
        """Set what the next expansion returns."""
        self._ready = read


def expansions(attentions: Sequence[nn.Module], layers: Sequence[int]) -> Mapping[int, weakref.ref[Expansion]]:
    """The expansion step of each attention, by layer, installed once; it does not affect other caches.

    Raises:
        Unsupported: an attention without such a step.
    """
    found = {}
    for module in attentions:
        given: Any = getattr(module, _STEP, None)
        index = layer_number(module, {})
        if index not in layers:
            continue
        if given is None:
            raise Unsupported(
                f"cache.mla=expanded: model: {type(module).__name__} has no step that expands the latent alone; use "
                "cache.mla=latent"
            )
        if not isinstance(given, Expansion):
            given = Expansion(given)
            setattr(module, _STEP, given)
        found[index] = weakref.ref(given)  # a cache holds no model
    return found
