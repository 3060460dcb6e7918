"""The settings of the diagnostic tasks; `kvq.config.tasks` hands them on.

`version` of a task is raised when its numbers would change: records of the one before are stale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from kvq.config.task import TaskConfig
from kvq.errors import ConfigError, at_least, check_seed, within


class Drawn(enum.StrEnum):
    """`gaussian`: independent numbers; `sphere`: their directions; `drifting`: a walk of Gaussian steps."""

    gaussian = "gaussian"
    sphere = "sphere"
    drifting = "drifting"


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


class LimitHeads(enum.StrEnum):
    """Whether the KV heads of a token are coded together."""

    joint = "joint"
    apart = "apart"


@dataclass
class LimitConfig(CaptureConfig):
    """The limit of per-token Gaussian coding in the loss's metric.

    Attributes:
        heads: see `LimitHeads`.
        ridge: added to the diagonal of the Fisher information, as a share of its mean.
        left_out: first tokens of each window that do not count.
        rates: bits at which the loss is a metric.
    """

    name: str = "limit"
    windows: int = 8
    heads: LimitHeads = LimitHeads.joint
    ridge: float = 0.01
    left_out: int = 1
    rates: list[float] = field(default_factory=lambda: [0.75, 1.25, 2.25, 3.0])

    def __post_init__(self) -> None:
        super().__post_init__()
        within("task.left_out", self.left_out, 0, self.context - 1)
        if not self.ridge > 0:
            raise ConfigError(f"task.ridge={self.ridge}: above 0")
        if any(not 0 < rate <= 16 for rate in self.rates):
            raise ConfigError(f"task.rates={self.rates}: bits, above 0 and up to 16")


@dataclass
class ModalityConfig(DiagnosticConfig):
    """Token norms of text and of images in prompts with an image each.

    Attributes:
        limit: items, one prompt each; null: all.
        layers: layers whose norms by position are kept for figures, of the first prompt, evenly spread.
    """

    benchmark: ClassVar[str] = "ocrbench"
    """Whose items are read."""

    name: str = "modality"
    limit: int | None = 4
    layers: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.limit", self.limit, 1)
        at_least("task.layers", self.layers, 1)


@dataclass
class DistributionConfig(CaptureConfig):
    """Closeness of channels to N(0, 1).

    Attributes:
        chunk: tokens that share a channel mean; null: the whole window.
        alpha: Lemma 1's probability of lying outside its range.
        hanson_wright: the constant c of the lemma, which the paper leaves open.
        signs: seeds of randomized Hadamard transforms over which the lemma is checked.
        codebooks: of 1 and 2 bits, whose cosines are compared with synthetic data; those that have the bits.
        vectors: tokens kept for t-SNE, of layer `vector_layer` and of the first `vector_windows` windows alike.
        channel_ranges: least and largest covariance of each channel of the first layer are kept, for figures.
    """

    later: ClassVar[tuple[str, ...]] = ("vector_windows", "channel_ranges")
    name: str = "distribution"
    windows: int = 2
    chunk: int | None = 64
    alpha: float = 0.05
    hanson_wright: float = 0.125
    signs: int = 8
    codebooks: list[str] = field(default_factory=lambda: ["finetuned", "kmeans"])
    vectors: int = 200
    vector_layer: int = 0
    vector_windows: int = 1
    channel_ranges: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.chunk", self.chunk, 2)
        at_least("task.signs", self.signs, 1)
        at_least("task.vectors", self.vectors, 0)
        at_least("task.vector_layer", self.vector_layer, 0)
        within("task.vector_windows", self.vector_windows, 1, self.windows)
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


@dataclass
class KnownStatesConfig(DiagnosticConfig):
    """Errors of two methods on the same states, which are one block.

    Attributes:
        against: the other method; null: none.
        against_bits: of the other method; null: the run's.
    """

    against: str | None = None
    against_bits: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.against_bits", self.against_bits, 1)
        if self.against_bits is not None and self.against is None:
            raise ConfigError(f"task.against_bits={self.against_bits}: bits of task.against, which is null")


@dataclass
class RandomStatesConfig(KnownStatesConfig):
    """Drawn keys and values.

    Attributes:
        states: their distribution.
        tokens, heads, head_dim: of a draw.
        draws: number of draws.
        seed: of the draws, apart from those of rotations.
        drift: steps of drifting states, relative to their start; `jumps`: tokens at which they start anew.
        fit_tokens: tokens drawn apart, to which calibrated tables and codebooks of a sequence are fitted.
        queries: Gaussian queries whose products with keys are compared.
        sharpness: factor on the two queries whose attention weighs errors; one ranks tokens, the other is held out.
    """

    reads_weights: ClassVar[bool] = False
    calibrates_itself: ClassVar[bool] = True
    name: str = "random_states"
    states: Drawn = Drawn.gaussian
    tokens: int = 360
    heads: int = 2
    head_dim: int = 64
    draws: int = 8
    seed: int = 0
    drift: float = 0.15
    jumps: list[int] = field(default_factory=list)
    fit_tokens: int = 2048
    queries: int = 64
    sharpness: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, least in (
            *(("tokens", 2), ("heads", 1), ("head_dim", 3), ("draws", 1), ("drift", 0), ("fit_tokens", 2)),
            *(("queries", 1), ("sharpness", 0)),
        ):
            at_least(f"task.{setting}", getattr(self, setting), least)
        check_seed("task.seed", self.seed)
        if self.draws > 1000:
            raise ConfigError(f"task.draws={self.draws}: at most 1000")
        outside = [token for token in self.jumps if not 0 < token < self.tokens]
        if outside or (self.jumps and self.states is not Drawn.drifting):
            raise ConfigError(f"task.jumps={self.jumps}: tokens of drifting states, 1 to {self.tokens - 1}")


@dataclass
class ModelStatesConfig(KnownStatesConfig, CaptureConfig):
    """A block of a model's states: the tokens of each window but its last `held_out`, whose queries are held out.

    `layers`: those that are measured; null: all.
    """

    name: str = "model_states"
    context: int = 160
    held_out: int = 32
    layers: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.held_out", self.held_out, 1)
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ConfigError(f"task.layers={self.layers}: a list of layers from 0 on, or null for all")
        if self.held_out > self.context - 2:
            raise ConfigError(f"task.held_out={self.held_out}: at most task.context={self.context} less 2")


SCHEMAS = {
    kind.name: kind
    for kind in (
        *(TniConfig, ModalityConfig, DistributionConfig, ErrorConfig, MemoryConfig, SyntheticConfig),
        *(RandomStatesConfig, ModelStatesConfig, LimitConfig),
    )
}
