"""The base classes of the settings of all tasks, and the settings of tasks that score no text: diagnostics and time."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from omegaconf import MISSING

from kvq.config.limits import (
    Count,
    Counts,
    Natural,
    Positive,
    Seed,
    Several,
    Share,
    between,
    check_limits,
    each,
    least,
    no_twice,
)
from kvq.errors import ConfigError, within

Prefill = enum.StrEnum("Prefill", "whole chunked")
"""How a prompt is read, up to its last token, which always reads the quantized cache as a decoded token does.

`whole`: in one forward at full precision, then quantized, as the papers generate; `chunked`: as if its tokens came
one by one, so that they read the quantized cache too.
"""

Drawn = enum.StrEnum("Drawn", "gaussian sphere drifting")
"""`gaussian`: independent numbers; `sphere`: their directions; `drifting`: a walk of Gaussian steps."""
Arms = enum.StrEnum("Arms", "prefixes subsets")
"""Which stages of a method are applied: every prefix of their order, or every subset of them."""

References = enum.StrEnum("References", "preallocated dynamic")
"""The references that are timed together with a method.

`preallocated`: `torch.nn.functional.scaled_dot_product_attention` over a cache of the full size in the model's
dtype, the queries that share a head as rows of one; `dynamic`: transformers' DynamicCache and own attention.
"""

Regime = enum.StrEnum("Regime", "per_head per_layer compiled kept packed")
"""How a decoded token reads the packed past.

`per_head`: decoded head by head in a Python loop; `per_layer`: a layer at once, as `cache.attention=dense` does;
`compiled`: the same with `torch.compile`; `kept`: decoded once and kept; `packed`: attention on codes.
"""


@dataclass
class TaskConfig:
    """The settings of a task. A subclass gives `name` its default, which is the task's name, and a `version`.

    `version` is raised when the task's scores would change: records of the one before are stale. Ranges that its
    annotations declare (`kvq.config.limits`) are checked. Class variables are no settings.
    """

    version: ClassVar[int]
    reads_weights: ClassVar[bool] = True
    """False: a model's shape is enough, and no weights are loaded."""
    reads_cache: ClassVar[bool] = True
    """False: the task encodes and decodes states itself, so that the version of the cache says nothing of it."""
    timed: ClassVar[bool] = False
    """The task measures time: how a token attends is part of what it measures, and the machine names its runs."""

    later: ClassVar[tuple[str, ...]] = ()
    """Settings that came after the first records: at their default they are no part of a run's key."""

    outputs: ClassVar[tuple[str, ...]] = ()
    """Settings that name a file which the run writes: no part of its key; a run with one is measured again."""

    of_methods: ClassVar[tuple[str, ...]] = ()
    """Settings of what a method does: they are no part of the key of full precision."""

    calibrates_itself: ClassVar[bool] = False
    """The task fits calibrated methods to states that it draws: they need no text."""

    name: str = MISSING

    @classmethod
    def versioned_parts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of further classes with a version that compute the numbers of a run with these canonical settings."""
        return ()

    def __post_init__(self) -> None:
        if self.name != type(self).name:
            raise ConfigError(f"task.name={self.name}: choose another task by task=..., not by its name")
        check_limits("task", self)


@dataclass
class ReadingConfig(TaskConfig):
    """Settings of every task that reads prompts (a passage, a prefix, what a user says).

    `bos`: whether a prompt or window begins with the begin-of-text token; None: if the model was trained with it.
    """

    prefill: Prefill = Prefill.whole
    bos: bool | None = None


@dataclass
class DiagnosticConfig(TaskConfig):
    """Settings of every diagnostic."""

    reads_cache: ClassVar[bool] = False

    name: str = "diagnostic"
    version: ClassVar[int] = 1


@dataclass
class CaptureConfig(DiagnosticConfig):
    """Diagnostics of a forward: `windows` disjoint windows of `context` tokens; `bos`: as `task=ppl` has it."""

    context: Several = 2048
    windows: Count = 4
    bos: bool | None = None


@dataclass
class TniConfig(CaptureConfig):
    """Token-norm imbalance.

    Attributes:
        sink_below: a token has a low norm below this fraction of its head's median norm.
        positions: token positions kept for figures: the first 16, the others spread evenly on a logarithmic scale.
        by_token: for each query head, so many tokens of the vocabulary that receive most attention, and metrics of them
            and of norms in front of a method's quantizer; 0: neither.
    """

    later: ClassVar[tuple[str, ...]] = ("by_token",)

    name: str = "tni"
    sink_below: Share = 0.5
    positions: Annotated[int, least(16)] = 64
    by_token: Natural = 0


@dataclass
class ModalityConfig(DiagnosticConfig):
    """Token norms of text, images and sound in prompts with media, at most `limit` (null: all).

    `layers`: so many, evenly spread, whose norms by position are kept for figures, of the first prompt.
    """

    benchmark: ClassVar[str] = "ocrbench"
    """Whose items are read."""

    name: str = "modality"
    limit: Count | None = 4
    layers: Count = 4


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
    windows: Count = 2
    chunk: Several | None = 64
    alpha: Share = 0.05
    hanson_wright: Positive = 0.125
    signs: Count = 8
    codebooks: list[str] = field(default_factory=lambda: ["finetuned", "kmeans"])
    vectors: Natural = 200
    vector_layer: Natural = 0
    vector_windows: int = 1
    channel_ranges: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        within("task.vector_windows", self.vector_windows, 1, self.windows)


@dataclass
class ErrorConfig(CaptureConfig):
    """Errors of keys, values and attention outputs after some or all stages of a method (`arms`).

    `bins`: intervals of positions for which errors are also averaged.
    """

    name: str = "error"
    context: Several = 1024
    windows: Count = 2
    arms: Arms = Arms.prefixes
    bins: Count = 8


@dataclass
class MemoryConfig(DiagnosticConfig):
    """Bytes of the cache after prompts of `lengths` tokens: stored up to `measured`, beyond it from the layout."""

    reads_weights: ClassVar[bool] = False
    reads_cache: ClassVar[bool] = True
    version: ClassVar[int] = 2
    name: str = "memory"
    lengths: Counts = field(default_factory=lambda: [1024, 4096, 32768, 131072])
    measured: Natural = 32768


@dataclass
class SyntheticConfig(DiagnosticConfig):
    """Synthetic keys: the first `sinks` tokens are `lowness` times smaller, `outlier_channels` have mean `outliers`.

    `outlier_spread`: deviation of that mean over tokens, relative to it. `sink_outliers`: whether sinks have the
    outlier channels too; `repeats`: number of draws, with seeds from `seed` on.
    """

    reads_weights: ClassVar[bool] = False
    name: str = "synthetic"
    tokens: Several = 128
    head_dim: Count = 128
    sinks: Natural = 1
    lowness: Annotated[list[float], each(1)] = field(default_factory=lambda: [1.0, 2.0, 5.0, 10.0, 20.0, 50.0])
    outlier_channels: Natural = 4
    outliers: Annotated[list[float], each(0)] = field(default_factory=lambda: [0.0, 2.0, 5.0, 10.0, 20.0])
    outlier_spread: Annotated[float, least(0)] = 0.0
    sink_outliers: bool = False
    repeats: Count = 8
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks >= self.tokens or self.outlier_channels > self.head_dim:
            raise ConfigError(
                f"task.sinks={self.sinks}, task.outlier_channels={self.outlier_channels}: fewer than "
                f"task.tokens={self.tokens}, and at most task.head_dim={self.head_dim}"
            )


@dataclass
class KnownStatesConfig(DiagnosticConfig):
    """Errors of two methods on the same states, which are one block.

    `against`: the other method (null: none), at `against_bits` (null: the run's).
    """

    against: str | None = None
    against_bits: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.against_bits is not None and self.against is None:
            raise ConfigError(f"task.against_bits={self.against_bits}: bits of task.against, which is null")


@dataclass
class RandomStatesConfig(KnownStatesConfig):
    """Drawn keys and values.

    Attributes:
        states: their distribution; `tokens`, `heads` and `head_dim` are of each of `draws` draws.
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
    tokens: Several = 360
    heads: Count = 2
    head_dim: Annotated[int, least(3)] = 64
    draws: Annotated[int, between(1, 1000)] = 8
    seed: Seed = 0
    drift: Annotated[float, least(0)] = 0.15
    jumps: list[int] = field(default_factory=list)
    fit_tokens: Several = 2048
    queries: Count = 64
    sharpness: Annotated[float, least(0)] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        outside = [token for token in self.jumps if not 0 < token < self.tokens]
        if outside or (self.jumps and self.states is not Drawn.drifting):
            raise ConfigError(f"task.jumps={self.jumps}: tokens of drifting states, 1 to {self.tokens - 1}")


@dataclass
class ModelStatesConfig(KnownStatesConfig, CaptureConfig):
    """A block of a model's states: the tokens of each window but its last `held_out`, whose queries are held out.

    `layers`: those that are measured; null: all.
    """

    name: str = "model_states"
    context: Several = 160
    held_out: Count = 32
    layers: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ConfigError(f"task.layers={self.layers}: a list of layers from 0 on, or null for all")
        if self.held_out > self.context - 2:
            raise ConfigError(f"task.held_out={self.held_out}: at most task.context={self.context} less 2")


@dataclass
class SpeedConfig(TaskConfig):
    """Settings of every task that measures time.

    Attributes:
        repeats: times that each cell is measured, in turn with its references; medians are recorded, and all samples.
        warmup: measurements that do not count.
        references: what is timed beside the method.
        new_tokens: tokens decoded in each measurement.
    """

    timed: ClassVar[bool] = True

    name: str = "speed"
    version: ClassVar[int] = 1
    repeats: Count = 5
    warmup: Natural = 1
    references: Annotated[list[References], no_twice] = field(
        default_factory=lambda: [References.preallocated, References.dynamic]
    )
    new_tokens: Count = 32


@dataclass
class LatencyConfig(SpeedConfig):
    """Seconds of a prefill and of a decoded token, for every one of `batches` at every one of `contexts` tokens.

    Attributes:
        regimes: ways to read the packed past that are timed as well, each with its overhead over the references.
        prefill_steps: a further prefill, whose time is split into the steps of the codecs.
        decode_steps: tokens decoded once more, with the time of attention on codes by steps, and without token norms.
    """

    later: ClassVar[tuple[str, ...]] = ("prefill_steps", "decode_steps")
    of_methods: ClassVar[tuple[str, ...]] = ("regimes", *later)
    name: str = "latency"
    batches: Counts = field(default_factory=lambda: [1])
    contexts: Counts = field(default_factory=lambda: [512, 1024])
    regimes: Annotated[list[Regime], no_twice] = field(default_factory=list)
    prefill_steps: bool = False
    decode_steps: bool = False


@dataclass
class ThroughputConfig(SpeedConfig):
    """Tokens per second of requests of `prompt` tokens in and `new_tokens` out, `batches` of them at a time.

    161 in and 338 out are the means of ShareGPT's conversations (vLLM, arXiv 2309.06180, section 6.2).
    """

    name: str = "throughput"
    batches: Counts = field(default_factory=lambda: [1, 4])
    prompt: Count = 161
    new_tokens: Count = 338


SCHEMAS = {
    kind.name: kind
    for kind in (
        *(TniConfig, ModalityConfig, DistributionConfig, ErrorConfig, MemoryConfig, SyntheticConfig),
        *(RandomStatesConfig, ModelStatesConfig),
    )
}
SPEED = {kind.name: kind for kind in (LatencyConfig, ThroughputConfig)}
