"""Hooks that read the queries, keys and values of each attention layer in a forward pass, or replace them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache.hooks import attentions, call_before
from kvq.cache.observe import INTERFACE, hook_attention_functions, scaling_of
from kvq.cache.rotary import angles, styles_of
from kvq.codecs import Rope
from kvq.config.diagnostics import CaptureConfig
from kvq.config.residual import Policy, PrefillBlock, ResidualSide
from kvq.diagnostics import AttentionRule
from kvq.errors import DataError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.models.layers import places_of
from kvq.models.load import LoadedModel
from kvq.models.placing import base_of
from kvq.tasks.scoring import cut_windows


@dataclass(frozen=True)
class LayerStates:
    """States of one layer for a window, as attention reads them; `rope`: rotations of the keys (None: no RoPE)."""

    index: int
    query: Float[Tensor, "1 heads tokens dim"]
    key: Float[Tensor, "1 kv_heads tokens dim"]
    value: Float[Tensor, "1 kv_heads tokens dim"]
    attention: AttentionRule
    rope: Rope | None


@torch.no_grad()
def capture(
    loaded: LoadedModel, tokens: Int[Tensor, " tokens"], visit: Callable[[LayerStates], None], **media: Tensor
) -> None:
    """Run `tokens` without a cache; call `visit` before every attention; `media`: further inputs of the model."""
    if getattr(loaded.text_config, "kv_lora_rank", None):
        raise Unsupported("model: its attention reads keys expanded from a latent; what a cache holds is the latent")
    base = base_of(loaded.model)
    modules = attentions(base)
    styles, places = styles_of(loaded.model), places_of(loaded.text_config)
    tables: dict[int, tuple[Tensor, Tensor] | None] = {}
    seen: set[int] = set()

    def keep(module: Any, arguments: dict[str, Any]) -> None:
        tables[module.layer_idx] = angles(module, arguments)

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
        rule = AttentionRule(scaling_of(module, query, given), given.get("sliding_window"), given.get("softcap"))
        visit(LayerStates(index, query, key, value, rule, rope))

    families = {type(module).__module__: module for module in modules}
    with ExitStack() as hooked:
        hooked.enter_context(call_before(modules, keep))
        for name, module in families.items():
            if hasattr(sys.modules[name], INTERFACE):
                hooked.callback(hook_attention_functions(module, see))
        base(input_ids=tokens[None].to(loaded.device), use_cache=False, **media)
    if len(seen) < len(styles):
        outside = "outside of transformers' attention interface, whose queries cannot be seen"
        raise Unsupported(f"model: {type(loaded.model).__name__} has attentions {outside}")


def windows_of(inputs: Inputs) -> list[Int[Tensor, " tokens"]]:
    """The first disjoint windows of `task.context` tokens, at most `task.windows`."""
    task: CaptureConfig = inputs.config.task
    cut = cut_windows(inputs.tokens.streams, task.context, None, task.windows, inputs.bos)
    return [window.tokens for window in cut]


def capture_windows(inputs: Inputs, visit: Callable[[LayerStates], None]) -> int:
    """`capture` each window of `windows_of`; returns how many there are."""
    windows = windows_of(inputs)
    for tokens in windows:
        capture(inputs.model, tokens, visit)
    return len(windows)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method with policies."""
    method.check_needs(f"task={inputs.config.task.name}", "codecs_alone", "all_at_once")
    inputs.check_context(inputs.config.task.context)


def block_of(side: ResidualSide) -> int | None:
    """Tokens per block; None: all tokens, as in a prefill that is one block."""
    if side.prefill_block is PrefillBlock.whole:
        return None
    return 1 if side.policy is Policy.block and not side.size else side.size
