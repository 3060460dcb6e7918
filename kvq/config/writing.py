"""The settings of tasks that write texts, or go on from what a cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvq.config.limits import Count, Text
from kvq.config.task import ReadingConfig, TaskConfig
from kvq.errors import ConfigError


@dataclass
class GenerateConfig(ReadingConfig):
    """A prompt that full precision and each method continue greedily.

    Attributes:
        prompt: the text; None: that of `prompt_file`, or the one that suits the embedded models.
        prompt_file: a file with the text, in UTF-8.
        max_new_tokens: longest continuation; it ends earlier at the model's end of text.
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


SCHEMAS: dict[str, type[TaskConfig]] = {GenerateConfig.name: GenerateConfig}
