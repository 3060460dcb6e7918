"""Hooks on a model's forward: they announce tokens and padding to the cache, and each attention before it attends.

They are on every part of a model that can be called with a cache. A cache takes no states that no hook announced.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from kvq.cache.observe import Attended, hook_attention_functions, scaling_of
from kvq.errors import Unsupported
from kvq.models.layers import window_of
from kvq.models.load import base_of

_CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")
_MASKED = ("eager", "sdpa", "kvq_eager", "kvq_sdpa")
"""Attention implementations that take any mask."""


class WatchfulCache(Cache):
    """A cache whose `before_attention` runs before each attention (a forward pre-hook).

    `KVCache`, which derives from it, has what the hooks call: `before_attention`, `receive_tokens`, `receive_hidden`,
    `observes` and `observe`.
    """

    wants_hidden = False
    """Whether the hooks call `receive_hidden`."""
    recording = False
    """Whether each forward can be undone; its last tokens may be candidates, which attend as if fed one by one."""

    def bind_model(self, model: nn.Module, stacks: Sequence[nn.Module]) -> None:
        """Accept states only from forwards of `stacks`, the parts of a model that take a cache."""
        self._model = weakref.ref(model)
        self._stacks = [weakref.ref(stack) for stack in stacks]
        self._stack: nn.Module | None = None
        self._attending: int | None = None
        self._held_before = 0
        self.starts: set[bool] = set()
        """For all forwards so far, as a set: whether the cache held tokens before it; shared with forks."""

    def begin_forward(self, stack: nn.Module) -> bool:
        """Note that a forward of `stack` begins; return False if it is nested in another one or of another model."""
        inside = self._stack is not None and self._stack is not stack
        if inside or not any(known() is stack for known in self._stacks):
            return False
        self._stack, self._held_before = stack, self.get_seq_length()
        self.starts.add(self._held_before > 0)
        return True

    def end_forward(self, stack: nn.Module, done: bool) -> None:
        """Note that the forward of `stack` ends; raise `Unsupported` if it is complete (`done`) but cached no token."""
        if self._stack is not stack:
            return
        self._stack = self._attending = None
        if done and self.get_seq_length() == self._held_before:
            raise Unsupported(
                f"model: {type(stack).__name__} ignores the cache that it is given (a model that is no decoder, or "
                "gradient checkpointing)"
            )

    def expect_states(self, index: int) -> None:
        """Note that the attention of layer `index` runs next; raise `Unsupported` outside of a forward."""
        self._check_announced(self._stack is not None)
        self._attending = index

    def check_expected(self, index: int) -> None:
        """Raise `Unsupported` for states of layer `index` unless `expect_states` named it last."""
        attending, self._attending = self._attending, None
        self._check_announced(attending == index)

    def _check_announced(self, announced: bool) -> None:
        """Raise `Unsupported`, with advice, unless a hook `announced` the states that are to be cached."""
        if not announced:
            built = self._model()
            name = "a model that is gone" if built is None else type(built).__name__
            raise Unsupported(
                f"KVCache: built for {name}, but what runs announces neither tokens nor padding to it (another model, "
                "a copy, `forward` called past its hooks); build it for the model that runs: kvq.KVCache(model, method)"
            )


def register_hooks(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Register the hooks on a model, once, and return its stacks and attentions; other caches are not affected."""
    parts, attending = stacks(model), attentions(base_of(model))
    name = type(model).__name__
    if not parts:
        raise Unsupported(f"model: {name} takes no past_key_values, so that no cache can keep its keys and values")
    if not attending:
        raise Unsupported(
            f"model: {name} has no attention that takes hidden_states, attention_mask and past_key_values, by which a "
            "cache follows it"
        )
    if not any(getattr(module, "is_causal", True) for module in attending):
        raise Unsupported(f"model: {name} reads later tokens too; a decoder has config.is_decoder=True")
    layers = [module for module in model.modules() if any(child in attending for child in module.children())]
    hooks: Any = ((parts, _begin_forward), (attending, _prepare_attention), (layers, _pass_hidden))
    for module, hook in ((module, hook) for modules, hook in hooks for module in modules):
        if hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hook, with_kwargs=True)
            if hook is _begin_forward:
                module.register_forward_hook(_end_forward, with_kwargs=True, always_call=True)
    return parts, attending


def stacks(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that take tokens, a mask and a cache: the LM with its head, the base model, a decoder.

    Modules that also take `decoder_input_ids` are left out: their `attention_mask` belongs to the encoder.
    """
    wanted, left_out = (("input_ids", "inputs_embeds"), _CACHE_NAMES, ("attention_mask",)), ("decoder_input_ids",)
    return [module for module in model.modules() if _takes(module, *wanted) and not _takes(module, left_out)]


def _takes(module: nn.Module, *groups: Sequence[str]) -> bool:
    """Whether a module's `forward` has, for each group of names, a parameter of one of them."""
    names = signature(type(module).forward).parameters
    return all(any(name in names for name in group) for group in groups)


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attentions of a model: the innermost modules that take hidden states, a mask and a cache, and have an index.

    Modules with a convolution are left out, as they keep a recurrent state (Zamba 2).
    """
    candidates = {
        module: None  # in the order of the model
        for module in model.modules()
        if layer_of(module) is not None
        and _takes(module, ("attention_mask", "mask"), _CACHE_NAMES, ("hidden_states",))
        and not any(isinstance(part, nn.Conv1d) for part in module.modules())
    }
    return [module for module in candidates if not any(part in candidates for part in list(module.modules())[1:])]


@functools.cache
def signature(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a module's `forward`, cached."""
    return inspect.signature(forward)


def named_arguments(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Map the arguments of a call of `module` to the parameter names of its `forward`, `**kwargs` included."""
    known = signature(type(module).forward)
    bound = known.bind(module, *args, **kwargs).arguments
    del bound["self"]
    for parameter in known.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound


@contextmanager
def call_before(modules: Sequence[nn.Module], tell: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Within the context, call `tell(module, arguments)` before a forward of these modules; arguments are by name."""

    def show(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tell(module, named_arguments(module, args, kwargs))

    hooks = [module.register_forward_pre_hook(show, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first of a forward's arguments that is a `WatchfulCache`; None: none is."""
    items = (*kwargs.values(), *args)
    caches = (item.self_attention_cache if isinstance(item, EncoderDecoderCache) else item for item in items)
    return next((item for item in caches if isinstance(item, WatchfulCache)), None)


@torch.compiler.disable
def _begin_forward(stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook of a stack: tell its cache that a forward begins, and the token ids and padding."""
    cache = _cache_of(args, kwargs)
    if cache is None or not cache.begin_forward(stack):
        return
    arguments = named_arguments(stack, args, kwargs)
    if any(value is cache for value in arguments.values()) and arguments.get("encoder_hidden_states") is not None:
        raise Unsupported(
            f"model: {type(stack).__name__} attends to an encoder, whose keys and values need a cache of their own: "
            "past_key_values=EncoderDecoderCache(kvq.KVCache(model, method), DynamicCache())"
        )
    mask = arguments.get("attention_mask")
    padding = None if mask is None else padding_of(mask)
    cache.receive_tokens(arguments.get("input_ids"), padding, arguments.get("logits_to_keep"))


@torch.compiler.disable
def _end_forward(stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Hook of a stack: tell its cache that the forward ends."""
    if (cache := _cache_of(args, kwargs)) is not None:
        cache.end_forward(stack, done=output is not None)


@torch.compiler.disable
def _pass_hidden(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook of a layer: pass its hidden states to a cache that wants them."""
    cache = _cache_of(args, kwargs)
    if cache is not None and cache.wants_hidden:
        attention = next(child for child in layer.children() if layer_of(child) is not None)
        arguments = named_arguments(layer, args, kwargs)
        cache.receive_hidden(layer_number(attention, arguments), arguments["hidden_states"])


@torch.compiler.disable
def _prepare_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Pre-hook of an attention: announce it to its cache, and replace its mask by one over the cache's columns."""
    cache = _cache_of(args, kwargs)
    if cache is None:
        return None
    arguments = named_arguments(module, args, kwargs)
    if any(arguments.get(name) is not None for name in ("encoder_hidden_states", "key_value_states")):
        return None
    columns = cache.before_attention(module, arguments, arguments["hidden_states"])
    if cache.observes(index := layer_number(module, arguments)):
        _observe(module, cache, index)
    if columns is None and not cache.recording:
        return None
    if (reason := no_mask_reason(module)) is not None:
        raise Unsupported(f"model: {reason}")
    if _adds_bias(module, arguments):
        raise Unsupported(f"model: {type(module).__name__} adds a position_bias, which no mask can follow")
    if columns is None:
        return None
    arguments["attention_mask"] = columns.mask(arguments.get("attention_mask"))
    if arguments.get("alibi") is not None:
        arguments["alibi"] = torch.cat([arguments["alibi"], arguments["alibi"].index_select(-1, columns.copies)], -1)
    return (), arguments


def no_mask_reason(module: nn.Module) -> str | None:
    """The reason why an attention cannot give each query of a chunk a separate mask; None: it can."""
    way = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
    if way in _MASKED:
        return None
    return (
        f"attention {way} takes no mask, which several tokens at once need where each reads what it would alone "
        f"(residual=sliding, assisted generation); load the model with attn_implementation={' or '.join(_MASKED[:2])}"
    )


def masks_each_query(model: nn.Module) -> bool:
    """Whether every attention of a model can give each query of a forward a separate mask."""
    parts = attentions(base_of(model))
    return not any(no_mask_reason(part) or _takes(part, ("position_bias",)) or _adds_bias(part, {}) for part in parts)


def _adds_bias(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether an attention adds a bias by token distance: its argument `position_bias`, or one that it computes."""
    return arguments.get("position_bias") is not None or hasattr(module, "relative_attention_bias")


def _observe(module: Any, cache: Any, index: int) -> None:
    """Make the coming forward of an attention pass its queries and keys to the cache's `observe` for layer `index`."""
    seen = []

    def see(caller: Any, query: Tensor, key: Tensor, _value: Tensor, arguments: dict[str, Any]) -> None:
        if caller is module:
            seen.append(True)
            mask, scaling = arguments.get("attention_mask"), scaling_of(module, query, arguments)
            cache.observe(index, Attended(query, key, mask, scaling, arguments.get("softcap")))

    undo = hook_attention_functions(module, see)

    def finish(_module: Any, _args: Any, output: Any) -> None:
        undo()
        handle.remove()
        if not seen and output is not None:
            raise Unsupported(f"model: {type(module).__name__} attends in a way that kvq cannot see")

    handle = module.register_forward_hook(finish, always_call=True)


def padding_of(mask: Any) -> list[int] | None:
    """Columns of left padding of each sequence, from a mask `[batch, columns]`; None: there is none."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        form = f"of {mask.ndim} dimensions" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise Unsupported(
            f"attention_mask: {form}, which hides from the cache who attends to whom; give a tensor "
            "[batch, tokens] or leave it out"
        )
    if bool(mask.all()):
        return None
    seen = mask.bool()
    if not bool(seen.any(1).all()):
        raise Unsupported(
            "attention_mask: a sequence of nothing but padding so far; the first forward, of a prompt in parts "
            "(prefill_chunk_size) the first part, needs a token of every sequence"
        )
    first = seen.int().argmax(1)
    if not torch.equal(seen, torch.arange(seen.shape[1], device=seen.device) >= first[:, None]):
        raise Unsupported(
            "attention_mask: hides tokens that a cache would keep; only padding on the left of every sequence is left "
            "out (padding_side=left)"
        )
    return [int(count) for count in first]


def check_distances(module: Any, index: int, arguments: dict[str, Any], seen: int, shuffled: bool) -> None:
    """Raise `Unsupported` where an attention needs token distances, in a layer with evicted or reordered tokens.

    It does for a bias (ALiBi, position_bias), or for a window shorter than `seen` tokens out of order (`shuffled`).
    """
    if arguments.get("alibi") is not None or _adds_bias(module, arguments):
        raise Unsupported(
            f"model: {type(module).__name__} weighs tokens by their distance (ALiBi, position_bias), which the method "
            "does not keep"
        )
    window = window_of(module.config, index)
    if shuffled and window is not None and seen > window:
        raise Unsupported(f"model: {type(module).__name__} sees {window} tokens back, which are not kept; {seen} came")


def check_window(module: Any, arguments: dict[str, Any], columns: int, window: int) -> None:
    """Raise `Unsupported` unless the mask is as wide as the `columns` that the layer returns under a sliding window.

    A mask may be missing where the attention takes none, or while fewer columns than the window exist.
    """
    mask = arguments.get("attention_mask")
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
    if isinstance(mask, Tensor) and mask.shape[-1] != columns:
        problem = f"masks {mask.shape[-1]} tokens"
    elif mask is None and implementation in _MASKED and columns >= window:
        problem = "has no mask"
    else:
        return
    raise Unsupported(f"model: {type(module).__name__} {problem}, where its window of {window} leaves {columns}")


def layer_number(module: Any, arguments: dict[str, Any]) -> int:
    """The layer index of an attention: argument `layer_idx` where layers share a module (Zamba), else `layer_of`."""
    index = arguments.get("layer_idx")
    return int(layer_of(module) if index is None else index)


def layer_of(module: Any) -> Any:
    """The layer index that a module has as an attribute; None: it has none."""
    return getattr(module, "layer_idx", getattr(module, "layer_id", None))  # the latter GPT-Neo
