"""The settings of the diagnostic tasks; `kvq.config.tasks` hands them on.

`version` of a task is raised when its numbers would change: records of the one before are stale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from kvq.config.task import TaskConfig
from kvq.errors import ConfigError, at_least, check_seed


class Arms(enum.StrEnum):
    """Which stages of a method are applied: every prefix of their order, or every subset of them."""

    prefixes = "prefixes"
    subsets = "subsets"


@dataclass
class DiagnosticConfig(TaskConfig):
    """What every diagnostic has."""

    reads_cache: ClassVar[bool] = False
    """False: the task encodes states without a cache, so its records do not depend on the cache's version."""

    name: str = "diagnostic"
    version: ClassVar[int] = 1


@dataclass
class CaptureConfig(DiagnosticConfig):
    """Diagnostics of a forward: `windows` disjoint windows of `context` tokens; `bos`: as `task=ppl` has it."""

    context: int = 2048
    windows: int = 4
    bos: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.context", self.context, 2)
        at_least("task.windows", self.windows, 1)


@dataclass
class TniConfig(CaptureConfig):
    """Token-norm imbalance.

    Attributes:
        sink_below: a token has a low norm below this fraction of its head's median norm.
        positions: token positions kept for figures: the first 16, the others spread evenly on a logarithmic scale.
    """

    name: str = "tni"
    sink_below: float = 0.5
    positions: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.positions", self.positions, 16)
        if not 0 < self.sink_below < 1:
            raise ConfigError(f"task.sink_below={self.sink_below}: above 0 and below 1")


@dataclass
class DistributionConfig(CaptureConfig):
    """Closeness of channels to N(0, 1).

    Attributes:
        chunk: tokens that share a channel mean; null: the whole window.
        alpha: Lemma 1's probability of lying outside its range.
        hanson_wright: the constant c of the lemma, which the paper leaves open.
        signs: seeds of randomized Hadamard transforms over which the lemma is checked.
        codebooks: of 1 and 2 bits, whose cosines are compared with synthetic data; those that have the bits.
        vectors: tokens kept for t-SNE, of layer `vector_layer`.
    """

    name: str = "distribution"
    windows: int = 2
    chunk: int | None = 64
    alpha: float = 0.05
    hanson_wright: float = 0.125
    signs: int = 8
    codebooks: list[str] = field(default_factory=lambda: ["finetuned", "kmeans"])
    vectors: int = 200
    vector_layer: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.chunk", self.chunk, 2)
        at_least("task.signs", self.signs, 1)
        at_least("task.vectors", self.vectors, 0)
        at_least("task.vector_layer", self.vector_layer, 0)
        if not 0 < self.alpha < 1:
            raise ConfigError(f"task.alpha={self.alpha}: above 0 and below 1")
        if not self.hanson_wright > 0:
            raise ConfigError(f"task.hanson_wright={self.hanson_wright}: above 0")


@dataclass
class ErrorConfig(CaptureConfig):
    """Errors of keys, values and attention, for a method's stages in part and whole, by `bins` of positions."""

    name: str = "error"
    context: int = 1024
    windows: int = 2
    arms: Arms = Arms.prefixes
    bins: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.bins", self.bins, 1)


@dataclass
class MemoryConfig(DiagnosticConfig):
    """Bytes of the cache after prompts of `lengths` tokens: stored up to `measured`, beyond it from the layout."""

    reads_weights: ClassVar[bool] = False
    reads_cache: ClassVar[bool] = True
    name: str = "memory"
    lengths: list[int] = field(default_factory=lambda: [1024, 4096, 32768, 131072])
    measured: int = 32768

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise ConfigError(f"task.lengths={self.lengths}: a list of one or more, each once")
        at_least("task.lengths", min(self.lengths), 1)
        at_least("task.measured", self.measured, 0)


@dataclass
class SyntheticConfig(DiagnosticConfig):
    """Synthetic keys: the first `sinks` tokens are `lowness` times smaller, `outlier_channels` have mean `outliers`.

    `outlier_spread`: deviation of that mean over tokens, relative to it. `sink_outliers`: whether sinks have the
    outlier channels too; `repeats`: number of draws, with seeds from `seed` on.
    """

    reads_weights: ClassVar[bool] = False
    name: str = "synthetic"
    tokens: int = 128
    head_dim: int = 128
    sinks: int = 1
    lowness: list[float] = field(default_factory=lambda: [1.0, 2.0, 5.0, 10.0, 20.0, 50.0])
    outlier_channels: int = 4
    outliers: list[float] = field(default_factory=lambda: [0.0, 2.0, 5.0, 10.0, 20.0])
    outlier_spread: float = 0.0
    sink_outliers: bool = False
    repeats: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.tokens", self.tokens, 2)
        at_least("task.head_dim", self.head_dim, 1)
        at_least("task.sinks", self.sinks, 0)
        at_least("task.outlier_channels", self.outlier_channels, 0)
        at_least("task.outlier_spread", self.outlier_spread, 0)
        at_least("task.repeats", self.repeats, 1)
        check_seed("task.seed", self.seed)
        if self.sinks >= self.tokens or self.outlier_channels > self.head_dim:
            raise ConfigError(
                f"task.sinks={self.sinks}, task.outlier_channels={self.outlier_channels}: fewer than "
                f"task.tokens={self.tokens}, and at most task.head_dim={self.head_dim}"
            )
        for setting, least in (("lowness", 1), ("outliers", 0)):
            given = getattr(self, setting)
            if not given or len(set(given)) < len(given):
                raise ConfigError(f"task.{setting}={given}: a list of one or more, each once")
            at_least(f"task.{setting}", min(given), least)


SCHEMAS = {kind.name: kind for kind in (TniConfig, DistributionConfig, ErrorConfig, MemoryConfig, SyntheticConfig)}
