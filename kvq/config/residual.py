"""Residual policies as settings: what stays in full precision, and in what blocks the rest is quantized."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from kvq.errors import ConfigError

Policy = enum.StrEnum("Policy", "none block sliding")
"""When tokens leave full precision.

`none`: at once, in blocks of `size`. `block`: a buffer of `size` tokens is quantized whole each time it is full.
`sliding`: the newest `size` tokens stay; those before them leave as soon as a codec's group of them is complete
(one by one where each token has its own statistics, `size` at a time where a whole block shares them). `sliding` of
size 0 is how serving engines store: a token is quantized when it is written, and its own query reads it decoded.
"""

PrefillBlock = enum.StrEnum("PrefillBlock", "size whole")
"""How a prefill is cut: blocks of `size`, or the whole prefill as one block (nsn)."""


@dataclass
class ResidualSideConfig:
    """Settings of one side; None = not said here."""

    policy: Policy | None = None
    size: int | None = None
    prefill_block: PrefillBlock | None = None


@dataclass
class ResidualConfig(ResidualSideConfig):
    """Settings for both sides, and for keys or values only, which win."""

    key: ResidualSideConfig = field(default_factory=ResidualSideConfig)
    value: ResidualSideConfig = field(default_factory=ResidualSideConfig)


@dataclass(frozen=True)
class ResidualSide:
    """The residual of keys or values. `size` is in tokens; under `none` it is the codec's block."""

    policy: Policy
    size: int
    prefill_block: PrefillBlock

    def with_prefill_in_blocks(self) -> ResidualSide:
        """The same with a prompt quantized in blocks of `size` tokens, so that a window can drop whole blocks."""
        return self if self.policy is Policy.none else replace(self, prefill_block=PrefillBlock.size)

    def schedule(self, token_group: int | None) -> tuple[int, int]:
        """The number of newest tokens that always stay in full precision, and how many tokens leave together.

        Args:
            token_group: tokens that share statistics in the side's codec (None: the whole block); used by `sliding`.
        """
        if self.policy is Policy.sliding:
            return self.size, token_group or max(self.size, 1)
        return 0, max(self.size, 1)

    @property
    def keeps_nothing(self) -> bool:
        """Every token is quantized as it is written (`sliding` of size 0)."""
        return self.policy is Policy.sliding and self.size == 0

    def for_parallel_scoring(self) -> ResidualSide:
        """See `Residual.for_parallel_scoring`; `ConfigError` where `size` is 0, so that there is no block."""
        if self.keeps_nothing:
            return self
        if self.size == 0:
            raise ConfigError("residual.size=0: token by token, which scoring=parallel cannot be; give a block size")
        return replace(self, policy=Policy.none)


@dataclass(frozen=True)
class Residual:
    """The residuals of keys and of values."""

    key: ResidualSide
    value: ResidualSide

    def for_parallel_scoring(self) -> Residual:
        """The residual for scoring that quantizes a whole window at once: the same blocks, no recent tokens kept."""
        return Residual(self.key.for_parallel_scoring(), self.value.for_parallel_scoring())


def effective_residual(default: ResidualConfig, override: ResidualConfig) -> Residual:
    """The method's default under the run's override; in each, a side's own setting wins over the common one."""
    return Residual(key=_side("key", default, override), value=_side("value", default, override))


def _side(name: str, default: ResidualConfig, override: ResidualConfig) -> ResidualSide:
    """The residual of one side (`name`): settings of the override before the default's, the side's own first."""
    layers = [getattr(override, name), override, getattr(default, name), default]
    policy = next((layer.policy for layer in layers if layer.policy is not None), None)
    size = next((layer.size for layer in layers if layer.size is not None), None)
    prefill = next((layer.prefill_block for layer in layers if layer.prefill_block is not None), PrefillBlock.size)
    if policy is None:
        raise ConfigError(f"method.residual.policy: the method sets none for its {name}s; one of {', '.join(Policy)}")
    least = 1 if policy is Policy.none else 0
    if size is None or size < least:
        given = "null" if size is None else size
        raise ConfigError(f"residual.size={given} ({name}s): a number of tokens, at least {least} under {policy}")
    return ResidualSide(policy, size, prefill)


def leaving(held: int, kept: int, group: int, whole: bool) -> int:
    """Tokens that leave full precision of `held`: all but `kept`, in whole groups unless they become one block.

    `kept` and `group` are those of a residual's schedule.
    """
    gone = held - kept
    if gone < group:
        return 0
    return gone if whole else gone - gone % group
