"""The settings of the tasks; `kvq.config` puts them where Hydra finds them."""

from __future__ import annotations

import enum
import string
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from omegaconf import MISSING

from kvq.config.diagnostics import SCHEMAS as DIAGNOSTICS
from kvq.config.diagnostics import SPEED, Prefill, ReadingConfig, TaskConfig
from kvq.config.limits import (
    Count,
    Names,
    Natural,
    PathName,
    Resamples,
    Seed,
    Several,
    Share,
    Text,
    among,
    between,
    check_limits,
    each,
    each_once,
)
from kvq.errors import MAX_DIGITS, ConfigError, at_least, check_path

Windows = enum.StrEnum("Windows", "sliding disjoint")
"""`sliding`: a window every `stride` tokens, new tokens scored; `disjoint`: no overlap, the remainder dropped."""

Scoring = enum.StrEnum("Scoring", "generation parallel continuation")
"""When keys and values are quantized while a window is scored.

`generation`: by the residual policy, as in decoding, causal; `parallel`: everything at once; `continuation`: the
prompt at once, and all later tokens stay in full precision.
"""

NiahMode = enum.StrEnum("NiahMode", "single distractors")
"""`single`: one needle; `distractors`: further needles of the same form, of which one is asked for (nsn)."""


@dataclass
class BootstrapConfig:
    """Block bootstrap over windows: `block` consecutive windows are drawn together."""

    resamples: Resamples = 2000
    block: Count = 2
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_limits("task.bootstrap", self)


@dataclass
class PplConfig(TaskConfig):
    """Perplexity: windows of `context` tokens, every `stride` when sliding; `prompt`: tokens before a continuation.

    `bos`: whether each window begins with the begin-of-text token, which counts among its tokens and is not scored;
    None: if the model was trained with it. `stretch`: loss and KL are reported for each so many positions too.
    """

    name: str = "ppl"
    version: ClassVar[int] = 1
    later: ClassVar[tuple[str, ...]] = ("prompt", "stretch")  # a prompt belongs to one scoring
    windows: Windows = Windows.sliding
    context: Several = 2048
    stride: int = 512
    scoring: Scoring = Scoring.generation
    prompt: int | None = None
    bos: bool | None = None
    max_windows: Count | None = None
    batch_size: Count = 4
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    stretch: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scoring is not Scoring.continuation:
            if self.prompt is not None:
                raise ConfigError(f"task.prompt={self.prompt}: belongs to task.scoring=continuation")
        elif self.prompt is None or not 2 <= self.prompt < self.context:
            given = "null" if self.prompt is None else self.prompt
            raise ConfigError(f"task.prompt={given}: 2 to task.context - 1 ({self.context - 1}), then scored")
        elif self.windows is Windows.sliding:
            raise ConfigError("task.windows=sliding: task.scoring=continuation cuts disjoint windows")
        if self.windows is Windows.sliding and not 1 <= self.stride <= self.context:
            raise ConfigError(f"task.stride={self.stride}: 1 to task.context ({self.context})")


@dataclass
class ItemsConfig(ReadingConfig):
    """Settings of every task that scores items.

    Attributes:
        batch_size: prompts that go through the model together; None: as `kvq.tasks.items` chooses.
        noise_floor: the full-precision run is repeated in another batch order, and its flips are recorded.
        margin: largest fall of the score that still counts as "not worse".
        resamples: of the paired bootstrap over items.
    """

    name: str = "items"
    version: ClassVar[int] = 1
    batch_size: Count | None = None
    noise_floor: bool = True
    margin: Share = 0.05
    resamples: Resamples = 2000


@dataclass
class NiahConfig(ItemsConfig):
    """Needles in a haystack: `repeats` items at each of `depths` (0 to 1) of prompts of `lengths` tokens.

    `needles` in all, the one that is asked for included (null: 1, or 5 with distractors), with values of `digits`
    digits. `needle` and `question` are templates over {key} and {value}; null: those of the embedded model. `answer` is
    the value of a needle whose template has none. `chat_template`: haystack and question are a user's message in the
    tokenizer's chat template, which counts among the `lengths`.
    """

    name: str = "niah"
    later: ClassVar[tuple[str, ...]] = ("chat_template",)
    mode: NiahMode = NiahMode.single
    lengths: Annotated[list[int], each(2)] = field(default_factory=lambda: [256, 512, 1024, 2048])
    depths: Annotated[list[float], each_once] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    repeats: Count = 10
    needles: int | None = None
    digits: Annotated[int, between(1, MAX_DIGITS)] = 6
    needle: str | None = None
    question: str | None = None
    answer: str | None = None
    chat_template: bool = False
    max_new_tokens: Count | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(f"task.depths={self.depths}: each 0 (start of the haystack) to 1 (its end)")
        at_least("task.needles", self.needles, 1 if self.mode is NiahMode.single else 2)
        if self.mode is NiahMode.single and self.needles not in (None, 1):
            raise ConfigError(f"task.needles={self.needles}: task.mode=single plants one; task.mode=distractors more")
        self._check_templates()

    def _check_templates(self) -> None:
        """Raise `ConfigError` for needle, question and answer templates that do not fit together."""
        if (self.needle is None) != (self.question is None):
            raise ConfigError("task.needle and task.question: give both templates, or neither")
        known = {"needle": _fields("needle", self.needle), "question": _fields("question", self.question)}
        if "value" in known["question"]:
            raise ConfigError(f"task.question={self.question!r}: gives the value away; it may have {{key}}")
        if self.needle is not None and ("value" in known["needle"]) == (self.answer is not None):
            raise ConfigError("task.answer: the value of a task.needle without {value}, and of no other")
        if self.answer is not None and self.answer not in (self.needle or ""):
            raise ConfigError(f"task.answer={self.answer!r}: is not in task.needle")
        if self.mode is NiahMode.distractors and self.needle is not None:
            missing = [f"task.{name}" for name, found in known.items() if "key" not in found]
            if missing or self.answer is not None:
                raise ConfigError("task.mode=distractors: task.needle has {key} and {value}, task.question {key}")

    @property
    def planted(self) -> int:
        """Needles in one haystack."""
        return self.needles or (1 if self.mode is NiahMode.single else 5)


def _fields(setting: str, template: str | None) -> set[str]:
    """Names of the fields in braces of a template; `ConfigError` for any but {key} and {value} without a format."""
    try:
        parts = [part[1:] for part in string.Formatter().parse(template or "") if part[1] is not None]
    except ValueError as error:
        raise ConfigError(f"task.{setting}={template!r}: {error}") from error
    if any(part not in (("key", "", None), ("value", "", None)) for part in parts):  # a width could fill the memory
        raise ConfigError(f"task.{setting}={template!r}: {{key}} and {{value}} are filled in, without a format")
    return {str(name) for name, _, _ in parts}


@dataclass
class LongbenchConfig(ItemsConfig):
    """LongBench: at most `limit` items of each of `subsets`; with `buckets`, scores by the length of the context too.

    Prompts longer than `max_length` tokens (null: what the model takes, less the answer) lose their middle.
    `chat_template` holds for the subsets that the benchmark does not exempt.
    """

    version: ClassVar[int] = 2
    name: str = "longbench"
    subsets: Names = field(default_factory=list)
    buckets: bool = False
    limit: Count | None = None
    max_length: Several | None = None
    chat_template: bool = False


@dataclass
class LmEvalConfig(ItemsConfig):
    """Tasks of lm-eval, by name or as local YAML files.

    Attributes:
        include_path: a folder of further task files.
        metric: the per-item metric that counts (null: each task's first).
        num_fewshot: examples before each item (null: each task's own).
        limit: at most this many items of each task.
        generation: what to change in the tasks' generation settings, such as {temperature: 0.6, do_sample: true}.
        repeats: answers drawn for each item under sampling; its score is their mean (pass@1).
        metadata: what a task's own code asks for, such as {max_seq_lengths: [4096]} for RULER.
        allow_code: tasks may run the code that the model writes.
    """

    name: str = "lm_eval"
    prefill: Prefill = Prefill.chunked
    tasks: list[str] = MISSING
    include_path: PathName | None = None
    metric: str | None = None
    num_fewshot: Natural | None = None
    limit: Count | None = None
    chat_template: bool = False
    generation: Any = None
    repeats: Count = 1
    metadata: Any = None
    allow_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"task.tasks={self.tasks}: a list of one or more, each once, such as task.tasks=[gsm8k]")
        for name in self.tasks:
            check_path("task.tasks", name)
        for setting in ("generation", "metadata"):
            if not isinstance(getattr(self, setting), dict | None):
                raise ConfigError(f"task.{setting}={getattr(self, setting)}: a mapping, or null")
        if self.repeats > 1 and not (self.generation or {}).get("do_sample"):
            raise ConfigError(f"task.repeats={self.repeats}: greedy answers repeat; set task.generation.do_sample=true")


@dataclass
class MultimodalConfig(ItemsConfig):
    """Questions about images or sound: `limit` items of `benchmark`, one at a time, answers of `max_new_tokens`."""

    name: str = "multimodal"
    benchmark: Annotated[str, among(("ocrbench", "mmau_pro"))] = "ocrbench"
    limit: Count | None = None
    max_new_tokens: Count = 100
    batch_size: Count | None = 1
    noise_floor: bool = False


@dataclass
class GenerateConfig(ReadingConfig):
    """A prompt that full precision and each method continue greedily, up to the model's end of text.

    Attributes:
        prompt: the text; None: that of `prompt_file` (UTF-8), or the one that suits the embedded models.
        ngram: tokens of the n-grams whose repetitions are counted.
        chat_template: whether the prompt is a user's message in the tokenizer's chat template.
    """

    name: str = "generate"
    version: ClassVar[int] = 1
    later: ClassVar[tuple[str, ...]] = ("prompt", "chat_template")
    prompt: Text | None = None
    prompt_file: Text | None = None
    max_new_tokens: Count = 128
    ngram: Count = 4
    chat_template: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError(f"task.prompt_file={self.prompt_file}: or task.prompt, not both")


_SCORED = (PplConfig, NiahConfig, LongbenchConfig, LmEvalConfig, MultimodalConfig, GenerateConfig)
SCHEMAS: dict[str, type[TaskConfig]] = {**{kind.name: kind for kind in _SCORED}, **DIAGNOSTICS, **SPEED}
TIMED = tuple(f"task={name}" for name in SPEED)


def is_timed(task: object) -> bool:
    """Whether a task measures time, so that machine and attention are part of its key."""
    return getattr(task, "timed", False)
