"""A layer that forgets: tokens beyond a budget leave for good, and attention sees those that are left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.cache.side import CacheSide
from kvq.codecs import Growable
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import Method
from kvq.methods.eviction import Eviction, When


def check_eviction(method: Method, config: Any) -> None:
    """Refuse what eviction cannot do.

    Args:
        config: a transformers text configuration.

    Raises:
        ConfigError: eviction behind every forward from quantized blocks.
        Unsupported: codecs that need the positions of tokens; layers that read others' keys and values.
    """
    assert method.eviction is not None
    codecs = [codec for codec in (method.key, method.value) if codec is not None]
    if codecs and method.eviction.when is When.always:
        raise ConfigError("method.eviction.when=always: tokens cannot leave quantized blocks; use prompt")
    if any(codec.uses_rope for codec in codecs):
        raise Unsupported("method.eviction: the codec turns keys back by their positions, which KV heads do not share")
    if getattr(config, "num_kv_shared_layers", None):
        raise Unsupported("method.eviction: layers of this model read the keys and values of earlier ones")


def check_distances(module: Any, arguments: dict[str, Any], seen: int, shuffled: bool) -> None:
    """Raise `Unsupported` for an attention that goes by how far back a token stands, which the layer does not keep."""
    if arguments.get("alibi") is not None:
        raise Unsupported(
            f"model: {type(module).__name__} weighs tokens by their distance (ALiBi), which the method does not keep"
        )
    window = _window(module)
    if shuffled and window is not None and seen > window:
        raise Unsupported(
            f"model: {type(module).__name__} sees {window} tokens back, which the method does not keep; {seen} came"
        )


def _window(module: Any) -> int | None:
    config = module.config
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return None
    window: int | None = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    return window


class EvictingLayer(KVCacheLayer):
    """Keys and values of one layer, of which only a budget stays; each KV head keeps tokens of its own.

    Kept keys stay turned by the positions they had. Behind a prompt (the first forward, of all its tokens) attention
    has seen everything; what is left goes into the sides, and is quantized there if the method says so. Scores that a
    method keeps per token are not part of what attention reads and are not counted as storage.
    """

    keeps_order = False
    lasting = "tokens that were evicted cannot come back"

    def __init__(self, key: CacheSide, value: CacheSide, quantized_prefill: bool, eviction: Eviction) -> None:
        super().__init__(key, value, quantized_prefill)
        self.eviction = eviction
        self._scores: Tensor | None = None
        self._prompt: tuple[Tensor, Tensor] | None = None

    @property
    @override
    def observes(self) -> bool:
        """The next attention is to be shown to `observe`."""
        return self.eviction.observes and (self.eviction.when is When.always or not self.get_seq_length())

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `KVCacheLayer.update`; tokens leave behind the attention that this feeds.

        Raises:
            Unsupported: a prompt token by token for a method that evicts once, behind it.
        """
        if self.eviction.when is When.always:
            out = super().update(key_states, value_states, *args, **kwargs)
            if not self.eviction.observes:
                self._evict()
            return out
        if self.get_seq_length():
            return super().update(key_states, value_states, *args, **kwargs)
        if self.one_by_one or key_states.shape[2] == 1:
            raise Unsupported(
                "method.eviction: tokens leave once, behind a prompt that is read at once (task.prefill=whole)"
            )
        self.lazy_initialization(key_states, value_states)
        self._prompt = (key_states, value_states)
        if not self.eviction.observes:
            self._settle()
        return key_states, value_states

    @override
    def observe(self, attended: Attended) -> None:
        """Score the tokens by the weights of these queries, then let those beyond the budget go."""
        rows = self.eviction.recent_rows(attended.query.shape[2])
        if rows is None:
            new = sum(weights.sum(-2).mean(2) for weights in attended.chunks())
        else:
            count = attended.query.shape[2]
            new = attended.weights(torch.arange(count - rows, count, device=attended.query.device)).sum(-2).mean(2)
        assert isinstance(new, Tensor)
        if self._scores is not None:
            new = new + torch.nn.functional.pad(self._scores, (0, new.shape[-1] - self._scores.shape[-1]))
        self._scores = new
        if self.eviction.when is When.always:
            self._evict()
        else:
            self._settle()
            self._scores = None

    def _chosen(self, states: Tensor) -> Tensor | None:
        """Indices of the tokens of `states` that stay; None: all."""
        tokens = states.shape[2]
        allowed = self.eviction.allowed(tokens + self.evicted)
        if allowed >= tokens:
            return None
        scores = states.new_zeros(*states.shape[:2], tokens) if self._scores is None else self._scores
        self.evicted += tokens - allowed
        return self.eviction.keep(scores, allowed)

    def _evict(self) -> None:
        assert self.key._full is not None
        kept = self._chosen(self.key._full.view)
        if kept is None:
            return
        for side in (self.key, self.value):
            assert side._full is not None
            side._full = Growable(_rows(side._full.view, kept))
        if self._scores is not None:
            self._scores = self._scores.gather(-1, kept)

    def _settle(self) -> None:
        """Hand what is left of the prompt to the sides."""
        assert self._prompt is not None
        states, self._prompt = self._prompt, None
        kept = self._chosen(states[0])
        for side, given in zip((self.key, self.value), states, strict=True):
            side.append(given if kept is None else _rows(given, kept), self.quantized_prefill)

    @override
    def reset(self) -> None:
        super().reset()
        self._scores = self._prompt = None

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._scores is not None:
            self._scores = self._scores.index_select(0, indices.to(self._scores.device))

    @override
    def check_crop(self, tokens_to_remove: int) -> None:
        raise Unsupported(f"method.eviction: {self.lasting} (fork() the cache before)")


def _rows(states: Tensor, kept: Tensor) -> Tensor:
    return states.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))
