"""Access to the queries and keys of an attention, for methods that choose tokens by their attention weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvq.errors import Unsupported

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
QUERY_CHUNK = 128
"""Queries whose attention weights exist at once."""

See = Callable[[Any, Tensor, Tensor, Tensor, dict[str, Any]], None]


class HookedFunctions:
    """A model's attention functions, which also pass their arguments to `see`."""

    def __init__(self, functions: Any, see: See) -> None:
        self._functions, self._see = functions, see

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The attention function of this name, which calls `see` first."""
        original = self._functions.get_interface(name, default)

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._see(module, query, key, value, {**kwargs, "attention_mask": args[0]} if args else kwargs)
            return original(module, query, key, value, *args, **kwargs)

        return attend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self.get_interface(name, self._functions[name])


def hook_attention_functions(module: nn.Module, see: See) -> Callable[[], None]:
    """Make the attention functions of `module`'s model family call `see` first; return a function that undoes this."""
    source = sys.modules[type(module).__module__]
    functions = getattr(source, INTERFACE, None)
    if functions is None:
        raise Unsupported(
            f"model: {type(module).__name__} attends outside of transformers' attention interface, where its queries "
            "cannot be seen"
        )
    setattr(source, INTERFACE, HookedFunctions(functions, see))
    return lambda: setattr(source, INTERFACE, functions)


def scaling_of(module: nn.Module, query: Tensor, arguments: dict[str, Any], *unknown: str) -> float:
    """The scale of an attention's logits; `Unsupported` if its `arguments` have a term that kvq cannot compute.

    `unknown`: names of such terms, besides `s_aux` and `position_bias`.
    """
    for name in ("s_aux", "position_bias", *unknown):
        if arguments.get(name) is not None:
            raise Unsupported(
                f"model: {type(module).__name__} attends with {name}, which is followed where the model's own "
                "attention runs (cache.attention=dense, methods that need no attention weights)"
            )
    scaling = arguments.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)


@dataclass(frozen=True)
class Attended:
    """Queries of one forward of a layer and the keys that they read; the last key is that of the last query.

    `mask`: the model's attention mask (None: causal); boolean, or added to the logits.
    """

    query: Float[Tensor, "batch heads queries dim"]
    key: Float[Tensor, "batch kv_heads tokens dim"]
    mask: Tensor | None
    scaling: float
    softcap: float | None

    def weights(self, rows: Tensor) -> Float[Tensor, "batch kv_heads shared rows tokens"]:
        """Attention weights of the queries with index `rows`; `shared`: the query heads of a KV head."""
        tokens, queries = self.key.shape[2], self.query.shape[2]
        picked = self.query.index_select(2, rows)
        logits = picked @ self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], 1).mT * self.scaling
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.mask is None:
            at = rows[:, None] + tokens - queries
            logits = logits.masked_fill(torch.arange(tokens, device=rows.device) > at, -math.inf)
        else:
            mask = self.mask[..., :tokens].index_select(-2, rows)
            hidden = ~mask if mask.dtype is torch.bool else mask <= torch.finfo(mask.dtype).min / 2
            added = logits if mask.dtype is torch.bool else logits + mask
            logits = added.masked_fill(hidden, -math.inf)
        return torch.softmax(logits, -1).unflatten(1, (self.key.shape[1], -1))

    def chunks(self) -> Iterator[Float[Tensor, "batch kv_heads shared rows tokens"]]:
        """Yield the attention weights of all queries, `QUERY_CHUNK` queries at a time, as `weights` does."""
        for rows in torch.arange(self.query.shape[2], device=self.query.device).split(QUERY_CHUNK):
            yield self.weights(rows)
