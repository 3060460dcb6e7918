"""`task=engine`: `task=ppl` with the log-probabilities of an engine, or of transformers for llama.cpp's files of them.

A run in transformers (`task.engine.name=null`) is the same as under `task=ppl`: it has its key and its record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvq.config import PplConfig, Scoring, Windows
from kvq.config.limits import Text
from kvq.errors import ConfigError
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.files import Journal
from kvq.tasks import ppl
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq_engines.agreement import run_engine
from kvq_engines.formats import EngineConfig, format_for
from kvq_engines.kld import LogitsWriter

_CLASSES = {"llamacpp": "LlamaCpp", "mlx": "Mlx", "onnxruntime": "OnnxRuntime"}


@dataclass
class EnginePplConfig(PplConfig):
    """Perplexity in an engine: settings of `task=ppl`, whose records these are too.

    Attributes:
        engine: the program that computes the logits.
        save_logits: a file for the log-probabilities in llama.cpp's format (`kvq_engines.kld`).
    """

    outputs: ClassVar[tuple[str, ...]] = ("save_logits",)
    windows: Windows = Windows.disjoint
    context: int = 1024
    engine: EngineConfig = field(default_factory=EngineConfig)
    save_logits: Text | None = None

    @classmethod
    def versioned_parts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The class that runs the engine."""
        return (_CLASSES[settings["engine"]["name"]],) if "engine" in settings else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine and self.scoring is not Scoring.generation:
            raise ConfigError(f"task.scoring={self.scoring}: an engine quantizes as it generates; use generation")
        if self.save_logits is not None and (
            self.windows is not Windows.disjoint or self.scoring is Scoring.continuation
        ):
            raise ConfigError(
                f"task.save_logits={self.save_logits}: llama.cpp's files hold disjoint windows; task.windows=disjoint"
            )


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method that the engine has no cache for, `ConfigError` for too long a window."""
    if not inputs.config.task.engine:
        ppl.check(inputs, method)
        return
    inputs.check_context()
    format_for(inputs, method)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Perplexity from the engine's log-probabilities, as `kvq.tasks.ppl.measure`, and its agreement with the preset."""
    task: EnginePplConfig = inputs.config.task
    with _writer(inputs) as writer:
        if not task.engine:
            return ppl.measurement(ppl.in_transformers(inputs, method, journal, writer), task, baseline)
        windows = ppl.ppl_windows(inputs.tokens.streams, task, inputs.bos)
        result = ppl.empty_result(windows, task)
        found, build = run_engine(inputs, method, windows, result, writer)
    more = found.metrics(result.samples(), task) if task.engine.compare else {}
    return ppl.measurement(result, task, baseline, more, build)


@contextlib.contextmanager
def _writer(inputs: Inputs) -> Iterator[ppl.Writer | None]:
    """Writes `task.save_logits`, which is there once the context ends without an error; None: nothing to write."""
    task: EnginePplConfig = inputs.config.task
    if task.save_logits is None:
        yield None
        return
    windows = ppl.ppl_windows(inputs.tokens.streams, task, inputs.bos)
    tokens = torch.stack([window.tokens for window in windows])
    writer = LogitsWriter(Path(task.save_logits), tokens, inputs.model.text_config.vocab_size)
    yield writer.write
    writer.close()


TASK = Task(check, measure, settings=EnginePplConfig, texts=ppl.TASK.texts)
