"""Eviction: policies that choose which tokens of a layer stay within a budget, and the layer that drops the others."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.cache.layer import KVCacheLayer
from kvq.cache.observe import Attended
from kvq.cache.side import CacheSide
from kvq.codecs import Growable
from kvq.codecs.quantizers import checked_choice
from kvq.errors import ConfigError, Unsupported, at_least, require
from kvq.methods.mixed_precision import AttendedLayer
from kvq.methods.policies import CHOOSES_TOKENS, Policy
from kvq.models.layers import kv_layers_of

Scores = Float[Tensor, "batch kv_heads tokens"]
States = Float[Tensor, "batch kv_heads tokens dim"]
When = Literal["prompt", "always"]
"""`prompt`: once, after the prompt; `always`: after every forward, so that the budget holds at all times."""
Pool = Literal["avg", "max"]
"""How SnapKV smooths scores over neighbouring tokens."""


class Seen(NamedTuple):
    """What a policy chooses from: the tokens of a layer, in the order in which they came.

    Attributes:
        keys, values: as they were appended; keys after RoPE.
        scores: attention weights that each token received, summed over queries, mean over the query heads of a KV
            head; zeros where the policy does not observe.
    """

    keys: States
    values: States
    scores: Scores


class Eviction(Policy, abc.ABC):
    """Chooses the tokens that a layer keeps, the same number for every KV head.

    Args:
        budget: below 1 a share of the tokens seen (under `when=prompt`: of the prompt's), else a number of tokens. All
            methods keep equally many at one budget, so their caches are equal to the byte.
        least: a share of the tokens never means fewer than this.
        when: see `When`.
    """

    setting = "eviction"
    does = "evicts tokens"
    needs = frozenset({"own_tokens", "any_position"})
    excludes = CHOOSES_TOKENS | {"two_codecs", "all_at_once", "latent", "sides_apart"}
    observes = True
    """Needs the attention weights."""

    def __init__(self, budget: float | int, least: int, when: When | str) -> None:
        if not budget > 0 or (budget >= 1 and budget != int(budget)):
            raise ConfigError(f"budget={budget}: a share of the tokens (below 1) or a whole number of tokens")
        at_least("least", least, 1)
        self.budget, self.least = budget, least
        self.when: When = checked_choice(When, when, "when")
        self.excludes |= {"no_prompt", "chunked_prompt"} if self.when == "prompt" else {"several_tokens"}

    def _require_tokens(self, tokens: int, what: str) -> None:
        """Raise `ConfigError` where the budget (or `least`) is below `tokens`, of which `what` are all but one."""
        setting, given = ("budget", self.budget) if self.budget >= 1 else ("least", self.least)
        if given < tokens:
            raise ConfigError(f"{setting}={given}: {what} alone are {tokens - 1} tokens; at least {tokens}")

    def allowed(self, seen: int) -> int:
        """How many of `seen` tokens may be kept."""
        kept = int(self.budget) if self.budget >= 1 else max(int(self.budget * seen), self.least)
        return min(kept, seen)

    def recent_rows(self, queries: int) -> int | None:
        """Number of the newest of `queries` queries whose attention weights are summed; None: all."""
        return None

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """A layer that evicts; `like`, which keeps its window's tokens, where it has a window and others have none."""
        if like.window is not None and any(one.window is None for one in kv_layers_of(config)):
            return like
        if self.when == "always" and (like.key.codec is not None or like.value.codec is not None):
            raise ConfigError("method.eviction.when=always: tokens cannot leave quantized blocks; use prompt")
        if getattr(config, "num_kv_shared_layers", None):
            raise Unsupported("method.eviction: layers of this model read the keys and values of earlier ones")
        return self.make_layer(like)

    def make_layer(self, like: KVCacheLayer) -> EvictingLayer:
        """The layer that evicts, over sides as those of `like`."""
        return EvictingLayer(like.key, like.value, self)

    @abc.abstractmethod
    def keep(self, seen: Seen, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        """Indices of the `allowed` tokens to keep, ascending."""


def _index_range(scores: Tensor, start: int, end: int) -> Tensor:
    """Indices `start` to `end` - 1, repeated over the leading dimensions of the scores."""
    return torch.arange(start, end, device=scores.device).expand(*scores.shape[:-1], -1)


class StreamingLLM(Eviction):
    """Keeps the first tokens (attention sinks) and the newest ones, at the positions they had.

    Args:
        budget, least, when: see `Eviction`.
        sinks: first tokens.

    Source: StreamingLLM (arXiv 2309.17453), section 3.2; its released code moves kept keys to new positions.
    """

    version: ClassVar[int] = 1
    observes = False

    def __init__(
        self, budget: float | int = 0.25, least: int = 64, when: When | str = "always", sinks: int = 4
    ) -> None:
        super().__init__(budget, least, when)
        at_least("sinks", sinks, 0)
        self._require_tokens(sinks + 1, "sinks")
        self.sinks = sinks

    def keep(self, seen: Seen, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        scores, tokens = seen.scores, seen.scores.shape[-1]
        sinks = _index_range(scores, 0, self.sinks)
        return torch.cat([sinks, _index_range(scores, tokens - allowed + self.sinks, tokens)], -1)


class HeavyHitters(Eviction):
    """Keeps the tokens with the largest sums of attention weights since they were added, and the newest ones.

    Args:
        budget, least, when: see `Eviction`.
        recent: share of the kept tokens that are the newest, whatever attention they received.

    Source: H2O (arXiv 2306.14048), algorithm 1.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, budget: float | int = 0.25, least: int = 64, when: When | str = "always", recent: float | int = 0.5
    ) -> None:
        super().__init__(budget, least, when)
        require(0 <= recent <= 1, "recent", recent, "a share, 0 to 1")
        self.recent = recent

    def keep(self, seen: Seen, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        scores, tokens = seen.scores, seen.scores.shape[-1]
        newest = int(self.recent * allowed)
        heavy = scores[..., : tokens - newest].topk(allowed - newest, -1).indices
        return torch.cat([heavy.sort(-1).values, _index_range(scores, tokens - newest, tokens)], -1)


class SnapKV(Eviction):
    """Keeps the last tokens of the prompt and the tokens that these attend to, smoothed over neighbours.

    Args:
        budget, least: see `Eviction`; it evicts once, after the prompt.
        window: last tokens of the prompt, whose attention weights are summed.
        kernel: tokens over which scores are pooled, odd.
        pool: `avg` or `max`.

    Source: SnapKV (arXiv 2404.14469), section 4; scores are means over the query heads of a KV head, the released code
    repeats KV heads and keeps tokens per query head.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, budget: float | int = 0.25, least: int = 64, window: int = 32, kernel: int = 5, pool: Pool | str = "avg"
    ) -> None:
        super().__init__(budget, least, "prompt")
        at_least("window", window, 1)
        require(kernel >= 1 and kernel % 2 != 0, "kernel", kernel, "an odd number of tokens")
        self._require_tokens(window + 1, "the window's")
        self.window, self.kernel = window, kernel
        self.pool: Pool = checked_choice(Pool, pool, "pool")

    def recent_rows(self, queries: int) -> int | None:
        return min(self.window, queries)

    def keep(self, seen: Seen, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        scores, tokens = seen.scores, seen.scores.shape[-1]
        before = scores[..., : tokens - self.window]
        pooled = getattr(torch.nn.functional, f"{self.pool}_pool1d")
        chosen = pooled(before, self.kernel, 1, self.kernel // 2).topk(allowed - self.window, -1).indices
        return torch.cat([chosen.sort(-1).values, _index_range(scores, tokens - self.window, tokens)], -1)


class EvictingLayer(AttendedLayer):
    """Keys and values of one layer, of which `eviction` keeps a budget; each KV head keeps tokens of its own.

    Kept keys keep the rotation of their original positions. Under `when=prompt` the first forward, which is the whole
    prompt, attends to all tokens; those that stay are then appended to the sides, which may quantize them.
    """

    keeps_order = False
    no_padding_reason = "evicts tokens, other columns in each sequence"
    irreversible = "tokens that were evicted cannot come back"
    setting = "method.eviction"

    def __init__(self, key: CacheSide, value: CacheSide, eviction: Eviction) -> None:
        super().__init__(key, value)
        self.eviction = eviction
        self._prompt: tuple[Tensor, Tensor] | None = None

    @property
    def observes(self) -> bool:
        return self.eviction.observes and (self.eviction.when == "always" or not self.get_seq_length())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `KVCacheLayer.update`; tokens are evicted after the attention that reads the result."""
        if self.eviction.when == "always":
            out = super().update(key_states, value_states, *args, **kwargs)
            if not self.eviction.observes:
                self._evict()
            return out
        if self.get_seq_length():
            return super().update(key_states, value_states, *args, **kwargs)
        if self.token_by_token or key_states.shape[2] == 1:
            raise Unsupported(
                "method.eviction: tokens are evicted once, after a prompt that is read at once (task.prefill=whole)"
            )
        self.lazy_initialization(key_states, value_states)
        self._prompt = (key_states, value_states)
        if not self.eviction.observes:
            self._append_kept()
        return key_states, value_states

    def observe(self, attended: Attended) -> None:
        """Add the attention weights of a forward to the sums, then evict."""
        count = attended.query.shape[2]
        if (rows := self.eviction.recent_rows(count)) is None:
            new = sum(weights.sum(-2).mean(2) for weights in attended.chunks())
        else:
            new = attended.weights(torch.arange(count - rows, count, device=attended.query.device)).sum(-2).mean(2)
        assert isinstance(new, Tensor)
        self._add_received(new)
        if self.eviction.when == "prompt":
            self._append_kept()
            self._received = None
        elif (kept := self._evict()) is not None:
            self._received = self._scores(new).gather(-1, kept)

    def _scores(self, keys: States) -> Scores:
        """What the policy chooses by (`Seen.scores`) for the cached `keys`."""
        return keys.new_zeros(keys.shape[:3]) if self._received is None else self._received

    def _choose_kept(self, keys: Tensor, values: Tensor) -> Tensor | None:
        """Indices of the tokens to keep, `[batch, heads, kept]`, ascending; None: all. Counts the rest in `evicted`."""
        tokens = keys.shape[2]
        allowed = self.eviction.allowed(tokens + self.evicted)
        if allowed >= tokens:
            return None
        self.evicted += tokens - allowed
        return self.eviction.keep(Seen(keys, values, self._scores(keys)), allowed)

    def _evict(self) -> Tensor | None:
        """Remove the tokens beyond the budget from both sides (in full precision); as `_choose_kept`."""
        assert self.key._full is not None
        assert self.value._full is not None
        kept = self._choose_kept(self.key._full.view, self.value._full.view)
        if kept is not None:
            self.key._full, self.value._full = (
                Growable(_gather_tokens(full.view, kept)) for full in (self.key._full, self.value._full)
            )
        return kept

    def _append_kept(self) -> None:
        """Choose the prompt's tokens to keep, and append these to both sides."""
        assert self._prompt is not None
        states, self._prompt = self._prompt, None
        kept = self._choose_kept(*states)
        for side, given in zip((self.key, self.value), states, strict=True):
            side.append(given if kept is None else _gather_tokens(given, kept))

    def reset(self) -> None:
        super().reset()
        self._prompt = None


def _gather_tokens(states: Tensor, kept: Tensor) -> Tensor:
    """Tokens of `[batch, heads, tokens, dim]` at indices `[batch, heads, kept]`."""
    return states.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))
