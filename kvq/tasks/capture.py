"""Queries, keys and values of a forward, layer by layer; only one layer is in memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache.hooks import attentions, named_arguments
from kvq.cache.observe import INTERFACE, Hooked
from kvq.cache.rotary import angles, styles_of
from kvq.codecs import Rope
from kvq.config.diagnostics import CaptureConfig
from kvq.config.residual import Policy, PrefillBlock, ResidualSide
from kvq.diagnostics.fidelity import Attention
from kvq.errors import DataError, Unsupported
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.inputs import Inputs
from kvq.models.layers import places_of
from kvq.models.placing import base_of
from kvq.tasks.stepwise import check_codecs_alone
from kvq.tasks.windows import cut_windows


@dataclass(frozen=True)
class Layer:
    """States of one layer for a batch of one window; keys and queries as attention reads them, after RoPE.

    `rope`: the rotations of the keys; None: no rotary embedding.
    """

    index: int
    query: Float[Tensor, "1 heads tokens dim"]
    key: Float[Tensor, "1 kv_heads tokens dim"]
    value: Float[Tensor, "1 kv_heads tokens dim"]
    attention: Attention
    rope: Rope | None


@torch.no_grad()
def capture(
    loaded: LoadedModel, tokens: Int[Tensor, " tokens"], visit: Callable[[Layer], None], **media: Tensor
) -> None:
    """Run `tokens` through the model without a cache and call `visit` before every attention.

    `media`: further inputs of the model, such as `pixel_values`.

    Raises:
        Unsupported: attentions that do not go through transformers' attention interface, or that attend in a way that
            is more than a softmax over earlier tokens.
        DataError: states that are not finite.
    """
    if getattr(loaded.text_config, "kv_lora_rank", None):
        raise Unsupported("model: its attention reads keys expanded from a latent; what a cache holds is the latent")
    base = base_of(loaded.model)
    modules = attentions(base)
    styles, places = styles_of(loaded.model), places_of(loaded.text_config)
    tables: dict[int, tuple[Tensor, Tensor] | None] = {}
    seen: set[int] = set()

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tables[module.layer_idx] = angles(module, named_arguments(module, args, kwargs))

    def see(module: Any, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> None:
        if not hasattr(module, "layer_idx"):  # it looks at an image
            return
        index = places.get(int(module.layer_idx))
        if index is None or index in seen:  # it reads the keys and values of an earlier layer
            return
        if not bool(torch.isfinite(key).all() and torch.isfinite(value).all()):
            raise DataError(f"layer {index}: NaN or infinite keys or values; check the model's weights and the dtypes")
        seen.add(index)
        style, table = styles[index][0], tables.get(index)
        rope = None if style is None or table is None else style.rope(table[0][:1], table[1][:1])
        visit(Layer(index, query, key, value, _attention_of(module, query, given), rope))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    sources = {sys.modules[type(module).__module__] for module in modules}
    held = {source: getattr(source, INTERFACE) for source in sources if hasattr(source, INTERFACE)}
    try:
        for source, functions in held.items():
            setattr(source, INTERFACE, Hooked(functions, see))
        base(input_ids=tokens[None].to(loaded.device), use_cache=False, **media)
    finally:
        for source, functions in held.items():
            setattr(source, INTERFACE, functions)
        for hook in hooks:
            hook.remove()
    if len(seen) < len(styles):
        raise Unsupported(
            f"model: {type(loaded.model).__name__} has attentions outside of transformers' attention interface, whose "
            "queries cannot be seen"
        )


def _attention_of(module: Any, query: Tensor, given: dict[str, Any]) -> Attention:
    for name in ("s_aux", "position_bias"):
        if given.get(name) is not None:
            raise Unsupported(f"model: {type(module).__name__} attends with {name}, which diagnostics do not follow")
    scaling = given.get("scaling")
    return Attention(
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        given.get("sliding_window"),
        given.get("softcap"),
    )


def windows_of(inputs: Inputs) -> list[Int[Tensor, " tokens"]]:
    """The first disjoint windows of `task.context` tokens, at most `task.windows`.

    Raises:
        DataError: a text shorter than one window.
    """
    task: CaptureConfig = inputs.config.task
    cut = cut_windows(inputs.tokens.streams, task.context, None, task.windows, inputs.bos)
    return [window.tokens for window in cut]


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method with more than codecs."""
    check_codecs_alone(method, inputs.config.task.name)
    inputs.check_context(inputs.config.task.context)


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the text."""
    return inputs.tokens.fingerprint


def block_of(side: ResidualSide) -> int | None:
    """Tokens per block; None: all tokens, as in a prefill that is one block."""
    if side.prefill_block is PrefillBlock.whole:
        return None
    return 1 if side.policy is Policy.block and not side.size else side.size
