"""The settings of this package's tasks. No torch here: composing a configuration needs them, and no task."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from kvq.config.diagnostics import CaptureConfig, ReadingConfig, TaskConfig
from kvq.config.limits import Count, Natural, PathName, Positive, Seed, Several, between
from kvq.config.tasks import ItemsConfig, Scoring
from kvq.errors import ConfigError, within


@dataclass
class ConversationConfig(ReadingConfig):
    """Conversations of several turns on one cache, and continuations that share a first turn.

    Attributes:
        conversations: passages of the text, spread evenly over it.
        turns: of each; a turn is `user` tokens that are read as a prompt, then `answer` tokens that are scored one by
            one, as if the model wrote them.
        branches: last turns of other conversations that continue each first turn, from a fork and from a new cache.
    """

    name: str = "conversation"
    version: ClassVar[int] = 1
    conversations: Several = 8
    turns: Count = 5
    user: Several = 128
    answer: Count = 64
    branches: Natural = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branches >= self.conversations:
            raise ConfigError(
                f"task.branches={self.branches}: each is of another conversation, of which there are "
                f"task.conversations={self.conversations}; give at most {self.conversations - 1}"
            )

    @property
    def turn(self) -> int:
        """Number of tokens in a turn."""
        return self.user + self.answer

    @property
    def context(self) -> int:
        """Number of tokens in a conversation."""
        return self.turns * self.turn


LimitHeads = enum.StrEnum("LimitHeads", "joint apart both")
"""Which states of a token are coded together: keys or values of all KV heads, of each head, or keys with values."""


@dataclass
class LimitConfig(CaptureConfig):
    """The limit of per-token Gaussian coding in the loss's metric.

    Attributes:
        heads: see `LimitHeads`.
        ridge: added to the diagonal of the Fisher information, as a share of its mean.
        left_out: first tokens of each window that do not count.
        rates: mean bits per component for each of which the limit of the loss is a metric.
    """

    name: str = "limit"
    version: ClassVar[int] = 1
    windows: Count = 8
    heads: LimitHeads = LimitHeads.joint
    ridge: Positive = 0.01
    left_out: int = 1
    rates: list[float] = field(default_factory=lambda: [0.75, 1.25, 2.25, 3.0])

    def __post_init__(self) -> None:
        super().__post_init__()
        within("task.left_out", self.left_out, 0, self.context - 1)
        if any(not 0 < rate <= 16 for rate in self.rates):
            raise ConfigError(f"task.rates={self.rates}: bits, above 0 and up to 16")


@dataclass
class PassagesConfig(ReadingConfig):
    """Settings of every task that continues passages of a text.

    Attributes:
        prompts: passages, spread evenly over the text.
        context: tokens of each.
        new_tokens: longest continuation; it ends earlier at the model's end of text.
    """

    prompts: Several = 16
    context: Several = 512
    new_tokens: Count = 64


@dataclass
class TrajectoryConfig(PassagesConfig):
    """Greedy continuations of passages of a text, compared with those of full precision.

    Attributes:
        temperature: of sampling, from uniform numbers that all methods share; None: greedy.
        free: the method also writes texts freely; without, it only reads full precision's text, in a fifth of the time,
            and its first difference is the first step at which it would choose another token.
        draw: seed of the uniform numbers.
    """

    name: str = "trajectory"
    version: ClassVar[int] = 1
    later: ClassVar[tuple[str, ...]] = ("temperature", "draw", "free")
    of_methods: ClassVar[tuple[str, ...]] = ("free",)
    temperature: Positive | None = None
    free: bool = True
    draw: Seed = 0


@dataclass
class DriftConfig(TrajectoryConfig):
    """Long sampled continuations of a few passages: whether the distance to full precision grows with what is written.

    Attributes:
        new_tokens: long enough to be cut into `parts`.
        parts: number of parts of each text; distances are averaged in each.
    """

    name: str = "drift"
    version: ClassVar[int] = 1
    prompts: Several = 4
    new_tokens: Several = 1024
    temperature: Positive | None = 1.0
    parts: Several = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_tokens < self.parts:
            raise ConfigError(f"task.parts={self.parts}: of texts of task.new_tokens={self.new_tokens}")


Coder = enum.StrEnum("Coder", "bytes exponents")
"""How a file's numbers are split before they are compressed: byte by byte, or bfloat16 by its exponents."""


@dataclass
class ReuseConfig(ReadingConfig):
    """Prefixes whose caches are stored in a file, compressed, read again and continued; rates are the first machine's.

    Attributes:
        windows: of the text, disjoint; `prefix` tokens of each are stored, the loss of `scored` tokens after is taken.
        level: of zstd, 1 to 22.
        coder: see `Coder`.
    """

    later: ClassVar[tuple[str, ...]] = ("coder",)
    name: str = "reuse"
    version: ClassVar[int] = 2
    windows: Count = 8
    prefix: Several = 768
    scored: Count = 256
    level: Annotated[int, between(1, 22)] = 3
    coder: Coder = Coder.bytes

    @property
    def context(self) -> int:
        """Number of tokens in a window: the stored prefix and the scored tokens after it."""
        return self.prefix + self.scored


@dataclass
class SensitivityConfig(TaskConfig):
    """Each side of each layer quantized alone, on `windows` disjoint windows of `context` tokens.

    Attributes:
        scoring, bos: as `task=ppl` has them.
        maps: random sets of sides and layers whose cost is compared with the sum of their parts.
        heads: also each KV head of each side of each layer alone.
        seed: of these sets.
    """

    later: ClassVar[tuple[str, ...]] = ("heads",)
    name: str = "sensitivity"
    version: ClassVar[int] = 1
    context: Several = 512
    windows: Count = 8
    bos: bool | None = None
    scoring: Scoring = Scoring.parallel
    batch_size: Count = 4
    maps: Natural = 20
    heads: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scoring is Scoring.continuation:
            raise ConfigError("task.scoring=continuation: task=sensitivity does generation or parallel")


Drafts = enum.StrEnum("Drafts", "method full")
"""Which model drafts: the one with a method's cache for one in full precision, or the other way round."""


@dataclass
class SpeculateConfig(PassagesConfig):
    """Speculative decoding with one model as draft and target, one of which reads a quantized cache.

    Attributes:
        length: tokens drafted before the target reads them.
        drafts: which of the two caches the draft reads, see `Drafts`.
    """

    name: str = "speculate"
    version: ClassVar[int] = 1
    prompts: Several = 8
    length: Count = 4
    drafts: Drafts = Drafts.method


@dataclass
class ToolsConfig(ItemsConfig):
    """Requests that are answered by a call of a function, written as JSON.

    Attributes:
        items: requests of the file at most, in its order.
        shots: answered requests of the file in front; their functions are offered too.
        padding: tokens of the dataset's text between functions and request.
        path: a file of requests of the Berkeley Function Calling Leaderboard.
        answers: the file of its answers (`possible_answer`).
        max_new_tokens: longest answer; it ends earlier after its first JSON object.
        chat_template: whether the prompt is a user's message in the tokenizer's chat template.
        seed: of shots and places in the text.
    """

    name: str = "tools"
    version: ClassVar[int] = 2
    items: Count = 76
    shots: Natural = 4
    padding: Natural = 256
    path: PathName | None = None
    answers: PathName | None = None
    max_new_tokens: Count = 96
    chat_template: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is None) != (self.answers is None):
            given, other = ("path", "answers") if self.answers is None else ("answers", "path")
            raise ConfigError(f"task.{given}={getattr(self, given)}: needs task.{other} too, of requests and answers")


_KINDS = ConversationConfig, DriftConfig, LimitConfig, ReuseConfig, SensitivityConfig, SpeculateConfig
SCHEMAS: dict[str, type[TaskConfig]] = {kind.name: kind for kind in (*_KINDS, ToolsConfig, TrajectoryConfig)}
