"""Settings of the tasks that let the model go on: from one prompt, from passages, and from stored prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvq.config.task import Prefill, TaskConfig
from kvq.errors import ConfigError, at_least, not_empty, within


@dataclass
class GenerateConfig(TaskConfig):
    """A prompt that full precision and each method continue greedily.

    Attributes:
        prompt: the text; None: that of `prompt_file`, or the one that suits the embedded models.
        prompt_file: a file with the text, in UTF-8.
        max_new_tokens: longest continuation; it ends earlier at the model's end of text.
        prefill: how the prompt is read.
        bos: whether the prompt begins with the begin-of-text token; None: if the model was trained with it.
        ngram: tokens of the n-grams whose repetitions are counted.
        chat_template: whether the prompt is a user's message in the tokenizer's chat template.
    """

    name: str = "generate"
    version: ClassVar[int] = 1
    later: ClassVar[tuple[str, ...]] = ("prompt", "chat_template")
    prompt: str | None = None
    prompt_file: str | None = None
    max_new_tokens: int = 128
    prefill: Prefill = Prefill.whole
    bos: bool | None = None
    ngram: int = 4
    chat_template: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("task.prompt", self.prompt)
        not_empty("task.prompt_file", self.prompt_file)
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError(f"task.prompt_file={self.prompt_file}: or task.prompt, not both")
        at_least("task.max_new_tokens", self.max_new_tokens, 1)
        at_least("task.ngram", self.ngram, 1)


@dataclass
class TrajectoryConfig(TaskConfig):
    """Greedy continuations of passages of a text, compared with those of full precision.

    Attributes:
        prompts: passages, spread evenly over the text.
        context: tokens of each.
        new_tokens: longest continuation; it ends earlier at the model's end of text.
        prefill: how a passage is read.
        bos: whether a passage begins with the begin-of-text token; None: if the model was trained with it.
    """

    name: str = "trajectory"
    version: ClassVar[int] = 1
    prompts: int = 16
    context: int = 512
    new_tokens: int = 64
    prefill: Prefill = Prefill.whole
    bos: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.prompts", self.prompts, 2)
        at_least("task.context", self.context, 2)
        at_least("task.new_tokens", self.new_tokens, 1)


@dataclass
class ReuseConfig(TaskConfig):
    """Prefixes that are stored in a file, compressed, read again and gone on from.

    Attributes:
        windows: of the text, disjoint.
        prefix: tokens of each that are stored.
        scored: tokens after them, whose loss is taken.
        level: of zstd, 1 to 22.
        prefill: how a prefix is read.
        bos: whether a window begins with the begin-of-text token; None: if the model was trained with it.
    """

    name: str = "reuse"
    version: ClassVar[int] = 1
    windows: int = 8
    prefix: int = 768
    scored: int = 256
    level: int = 3
    prefill: Prefill = Prefill.whole
    bos: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.windows", self.windows, 1)
        at_least("task.prefix", self.prefix, 2)
        at_least("task.scored", self.scored, 1)
        within("task.level", self.level, 1, 22)

    @property
    def context(self) -> int:
        """Tokens of a window."""
        return self.prefix + self.scored


GENERATION: dict[str, type[TaskConfig]] = {
    "generate": GenerateConfig,
    "reuse": ReuseConfig,
    "trajectory": TrajectoryConfig,
}
