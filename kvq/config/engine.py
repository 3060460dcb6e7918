"""Settings of engines: programs other than transformers that compute a model's logits. No torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.config.carried import carried_gguf
from kvq.config.limits import DISTRIBUTION, file_hash
from kvq.errors import ConfigError, DataError, not_empty

EngineName = enum.StrEnum("EngineName", "llamacpp mlx")
"""Programs that compute logits in the place of transformers."""

EngineWeights = enum.StrEnum("EngineWeights", "float16 float32")
"""Dtype of the matrices of the GGUF file that is written of a model."""


@dataclass
class EngineConfig:
    """A program that computes the logits (`name` None: transformers), with the format that the method is a preset of.

    `file`: a GGUF file of the model (llama.cpp); None: one is written of the weights, in `weights`. `flash_attention`:
    llama.cpp's fused attention, without which it takes no quantized values. `compare`: the preset is scored in PyTorch
    on the same windows too.
    """

    name: EngineName | None = None
    file: str | None = None
    weights: EngineWeights = EngineWeights.float32
    flash_attention: bool = True
    compare: bool = True

    def __post_init__(self) -> None:
        not_empty("task.engine.file", self.file)
        if not self and self.file is not None:
            raise ConfigError(f"task.engine.file={self.file}: needs task.engine.name=llamacpp")
        if self.name is EngineName.mlx and (self.file is not None or self.weights is not EngineWeights.float32):
            given = "weights" if self.file is None else "file"
            raise ConfigError(
                f"task.engine.{given}={getattr(self, given)}: of llamacpp; mlx takes the model's own weights"
            )

    def __bool__(self) -> bool:
        return self.name is not None

    @property
    def path(self) -> Path | None:
        """Where `file` lies."""
        if self.file is None:
            return None
        if self.file.startswith(DISTRIBUTION):
            return carried_gguf("task.engine.file", self.file)
        path = Path(self.file).expanduser()
        if not path.is_file():
            raise DataError(f"task.engine.file={self.file}: no such file")
        return path

    def canonical(self) -> dict[str, Any]:
        """The settings that decide numbers: of `file` the sha256 (hex), and then no dtype of weights."""
        settings = {name: value for name, value in vars(self).items() if value is not None}
        if (path := self.path) is not None:
            del settings["weights"]
            settings["file"] = file_hash(path)
        return settings
