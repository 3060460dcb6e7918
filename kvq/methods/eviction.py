"""Eviction: which tokens a layer forgets, so that those it keeps fit a budget."""

from __future__ import annotations

import abc
import enum
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from kvq.codecs.quantizers import choice
from kvq.errors import ConfigError

Scores = Float[Tensor, "batch kv_heads tokens"]
Weights = Float[Tensor, "batch kv_heads shared rows tokens"]


class When(enum.Enum):
    """`prompt`: once, behind the prompt; `always`: behind every forward, so that the budget holds at all times."""

    prompt = "prompt"
    always = "always"


class Pool(enum.Enum):
    """How SnapKV smooths scores over neighbouring tokens."""

    avg = "avg"
    max = "max"


class Eviction(abc.ABC):
    """Chooses the tokens that a layer keeps, the same number for every KV head.

    Args:
        budget: below 1 a share of the tokens seen (under `when=prompt`: of the prompt's), else a number of tokens. All
            methods keep equally many at one budget, so their caches are equal to the byte.
        least: a share of the tokens never means fewer than this.
        when: see `When`.

    Raises:
        ConfigError: a budget that is not positive or leaves no room for what the method always keeps.
    """

    observes = True
    """Needs the attention weights."""

    def __init__(self, budget: float | int, least: int, when: When | str) -> None:
        if not budget > 0 or (budget >= 1 and budget != int(budget)):
            raise ConfigError(f"budget={budget}: a share of the tokens (below 1) or a whole number of tokens")
        if least < 1:
            raise ConfigError(f"least={least}: at least 1")
        self.budget, self.least, self.when = budget, least, choice(When, when, "when")

    def _needs(self, tokens: int, what: str) -> None:
        setting, given = ("budget", self.budget) if self.budget >= 1 else ("least", self.least)
        if given < tokens:
            raise ConfigError(f"{setting}={given}: {what} alone are {tokens - 1} tokens; at least {tokens}")

    def allowed(self, seen: int) -> int:
        """Tokens that may be kept of `seen`."""
        kept = int(self.budget) if self.budget >= 1 else max(int(self.budget * seen), self.least)
        return min(kept, seen)

    def recent_rows(self, queries: int) -> int | None:
        """How many of the newest queries are asked whom they attend to; None: all."""
        return None

    @abc.abstractmethod
    def keep(self, scores: Scores, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        """The tokens to keep, ascending; `scores` are sums of weights over queries, means over query heads."""


def _top(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count, -1).indices


def _range(scores: Tensor, start: int, end: int) -> Tensor:
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
        self, budget: float | int = 0.25, least: int = 64, when: When | str = When.always, sinks: int = 4
    ) -> None:
        super().__init__(budget, least, when)
        if sinks < 0:
            raise ConfigError(f"sinks={sinks}: at least 0")
        self._needs(sinks + 1, "sinks")
        self.sinks = sinks

    @override
    def keep(self, scores: Scores, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        tokens = scores.shape[-1]
        return torch.cat([_range(scores, 0, self.sinks), _range(scores, tokens - allowed + self.sinks, tokens)], -1)


class HeavyHitters(Eviction):
    """Keeps the tokens that were attended to most since they came, and the newest ones, half and half.

    Args:
        budget, least, when: see `Eviction`.
        recent: share of the kept tokens that are simply the newest.

    Source: H2O (arXiv 2306.14048), algorithm 1.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, budget: float | int = 0.25, least: int = 64, when: When | str = When.always, recent: float | int = 0.5
    ) -> None:
        super().__init__(budget, least, when)
        if not 0 <= recent <= 1:
            raise ConfigError(f"recent={recent}: a share, 0 to 1")
        self.recent = recent

    @override
    def keep(self, scores: Scores, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        tokens = scores.shape[-1]
        newest = int(self.recent * allowed)
        heavy = _top(scores[..., : tokens - newest], allowed - newest)
        return torch.cat([heavy.sort(-1).values, _range(scores, tokens - newest, tokens)], -1)


class SnapKV(Eviction):
    """Keeps what the last tokens of the prompt attend to, smoothed over neighbours, and those last tokens.

    Args:
        budget, least: see `Eviction`; it evicts once, behind the prompt.
        window: last tokens of the prompt, whose queries are asked.
        kernel: tokens over which scores are pooled, odd.
        pool: `avg` or `max`.

    Source: SnapKV (arXiv 2404.14469), section 4; scores are means over the query heads of a KV head, the released code
    repeats KV heads and keeps tokens per query head.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        budget: float | int = 0.25,
        least: int = 64,
        window: int = 32,
        kernel: int = 5,
        pool: Pool | str = Pool.avg,
    ) -> None:
        super().__init__(budget, least, When.prompt)
        if window < 1:
            raise ConfigError(f"window={window}: at least 1")
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"kernel={kernel}: an odd number of tokens")
        self._needs(window + 1, "the window's")
        self.window, self.kernel, self.pool = window, kernel, choice(Pool, pool, "pool")

    @override
    def recent_rows(self, queries: int) -> int | None:
        return min(self.window, queries)

    @override
    def keep(self, scores: Scores, allowed: int) -> Int[Tensor, "batch kv_heads kept"]:
        tokens = scores.shape[-1]
        before = scores[..., : tokens - self.window]
        half = self.kernel // 2
        if self.pool is Pool.avg:
            before = torch.nn.functional.avg_pool1d(before, self.kernel, 1, half)
        else:
            before = torch.nn.functional.max_pool1d(before, self.kernel, 1, half)
        chosen = _top(before, allowed - self.window)
        return torch.cat([chosen.sort(-1).values, _range(scores, tokens - self.window, tokens)], -1)
