"""What a chain of keys or of values alone cannot say: which tokens of a layer a method treats apart, seeing both."""

from __future__ import annotations

import enum
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

from kvq.codecs.quantizers import choice
from kvq.config.residual import Policy, Residual
from kvq.errors import ConfigError


class MixedPrecision:
    """Chooses tokens of a layer as they leave full precision. Its blocks depend on more than their own tokens."""

    def check(self, name: str, residual: Residual) -> None:
        """Raise `ConfigError` where keys and values do not leave full precision together."""
        key = residual.key
        if key != residual.value or key.policy is not Policy.block or key.size < 2:
            raise ConfigError(
                f"residual: method={name} plans keys and values together, so both have policy=block and one size, at "
                "least 2"
            )


class OutlierTokens(MixedPrecision):
    """A pool of full-precision tokens per KV head: those whose keys have the smallest sum of magnitudes.

    Each time a block leaves, the pool and the block compete; who loses is quantized as the block.

    Args:
        pool: tokens.
        exempt_layers: first layers, which have no pool.

    Raises:
        ConfigError: an empty pool, or a negative number of layers.

    Source: OTT (arXiv 2505.10938).
    """

    version: ClassVar[int] = 1

    def __init__(self, pool: int = 3, exempt_layers: int = 2) -> None:
        if pool < 1:
            raise ConfigError(f"pool={pool}: at least 1 token")
        if exempt_layers < 0:
            raise ConfigError(f"exempt_layers={exempt_layers}: at least 0")
        self.pool, self.exempt_layers = pool, exempt_layers

    @override
    def check(self, name: str, residual: Residual) -> None:
        super().check(name, residual)
        if self.pool >= residual.key.size:
            raise ConfigError(f"method.plan.pool={self.pool}: below residual.size ({residual.key.size})")


class Asked(enum.Enum):
    """What the attention that a token receives is divided by: the probes that see it, or the positions from it on."""

    probes = "probes"
    later = "later"


class Decoding(enum.Enum):
    """Which queries of the blocks behind the first are asked: shares of them, or the last one alone."""

    shares = "shares"
    last = "last"


class Saliency(MixedPrecision):
    """The tokens that probe queries attend to: the last ones of a block and some at random.

    Args:
        recent: share of a block's queries that are its last.
        random: share of them drawn from the others.
        seed: of the draw; the method's own.
        divide_by: `probes` gives the mean weight from the probes that see a token; `later` is the released code's.
        decoding: `shares` asks as many queries of every block; `last` asks the last one alone of the blocks behind the
            first, which is the prompt where it is read at once (the released code).

    Raises:
        ConfigError: shares that are negative, sum to more than 1 or to nothing; an unknown `divide_by` or `decoding`.

    Source: ZipCache (arXiv 2405.14256), sections 4.3 and 4.4.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        recent: float | int = 0.05,
        random: float | int = 0.05,
        seed: int = 0,
        divide_by: Asked | str = Asked.probes,
        decoding: Decoding | str = Decoding.shares,
    ) -> None:
        if min(recent, random) < 0 or not 0 < recent + random <= 1:
            raise ConfigError(f"recent={recent}, random={random}: shares, together above 0 and at most 1")
        self.recent, self.random, self.seed = recent, random, seed
        self.divide_by = choice(Asked, divide_by, "divide_by")
        self.decoding = choice(Decoding, decoding, "decoding")

    def _last_alone(self, start: int) -> bool:
        return self.decoding is Decoding.last and start > 0

    def probes(self, start: int, length: int) -> Int[Tensor, " probes"]:
        """Positions within a block of `length` tokens, begun at token `start`, whose queries are asked; ascending.

        The last one always is.
        """
        if self._last_alone(start):
            return torch.tensor([length - 1])
        last = max(round(self.recent * length), 1)
        others = min(round(self.random * length), length - last)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + start)
        drawn = torch.randperm(length - last, generator=generator)[:others]
        return torch.cat([drawn.sort().values, torch.arange(length - last, length)])

    def divisors(self, start: int, length: int) -> Int[Tensor, " tokens"]:
        """What the weights that a block's tokens receive from its probes, summed, are divided by; at least 1."""
        if self.divide_by is Asked.later and not self._last_alone(start):
            return torch.arange(length, 0, -1)
        probes = self.probes(start, length)
        return (probes[:, None] >= torch.arange(length)).sum(0)
