"""The settings of the tasks that measure time; `kvq.config.tasks` hands them on.

`version` of a task is raised when its figures would mean something else: records of the one before are stale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from kvq.config.task import TaskConfig
from kvq.errors import ConfigError, at_least


class References(enum.StrEnum):
    """The references that are timed together with a method.

    `preallocated`: `torch.nn.functional.scaled_dot_product_attention` over a cache of the full size in the model's
    dtype, the queries that share a head as rows of one; `dynamic`: transformers' DynamicCache and the model's own
    attention.
    """

    preallocated = "preallocated"
    dynamic = "dynamic"


class Regime(enum.StrEnum):
    """How a decoded token reads the packed past.

    `per_head`: decoded head by head in a Python loop; `per_layer`: a layer at once, as `cache.attention=dense` does;
    `compiled`: the same with `torch.compile`; `kept`: decoded once and kept; `packed`: attention on codes.
    """

    per_head = "per_head"
    per_layer = "per_layer"
    compiled = "compiled"
    kept = "kept"
    packed = "packed"


def _each_once(setting: str, given: list[int]) -> None:
    if not given or len(set(given)) < len(given):
        raise ConfigError(f"task.{setting}={given}: a list of one or more, each once")
    at_least(f"task.{setting}", min(given), 1)


@dataclass
class SpeedConfig(TaskConfig):
    """What tasks of time have.

    Attributes:
        repeats: times that each cell is measured, in turn with its references; medians are recorded, and all samples.
        warmup: measurements that do not count.
        references: what is timed beside the method.
        new_tokens: tokens decoded in each measurement.
    """

    timed: ClassVar[bool] = True

    name: str = "speed"
    version: ClassVar[int] = 1
    repeats: int = 5
    warmup: int = 1
    references: list[References] = field(default_factory=lambda: [References.preallocated, References.dynamic])
    new_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.repeats", self.repeats, 1)
        at_least("task.warmup", self.warmup, 0)
        at_least("task.new_tokens", self.new_tokens, 1)
        if len(set(self.references)) < len(self.references):
            raise ConfigError(f"task.references={[str(name) for name in self.references]}: each once")


@dataclass
class LatencyConfig(SpeedConfig):
    """Seconds of a prefill and of a decoded token, for every one of `batches` at every one of `contexts` tokens.

    Attributes:
        regimes: ways to read the packed past that are timed as well, each with its overhead over the references.
        prefill_steps: a further prefill, whose time is split into the steps of the codecs.
        decode_steps: tokens decoded once more, with the time of attention on codes split into its steps, and by the
            method without its token norms.
    """

    name: str = "latency"
    batches: list[int] = field(default_factory=lambda: [1])
    contexts: list[int] = field(default_factory=lambda: [512, 1024])
    regimes: list[Regime] = field(default_factory=list)
    prefill_steps: bool = False
    decode_steps: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _each_once("batches", self.batches)
        _each_once("contexts", self.contexts)
        if len(set(self.regimes)) < len(self.regimes):
            raise ConfigError(f"task.regimes={[str(name) for name in self.regimes]}: each once")


@dataclass
class ThroughputConfig(SpeedConfig):
    """Tokens per second of requests of `prompt` tokens in and `new_tokens` out, `batches` of them at a time.

    161 in and 338 out are the means of ShareGPT's conversations (vLLM, arXiv 2309.06180, section 6.2).
    """

    name: str = "throughput"
    batches: list[int] = field(default_factory=lambda: [1, 4])
    prompt: int = 161
    new_tokens: int = 338

    def __post_init__(self) -> None:
        super().__post_init__()
        _each_once("batches", self.batches)
        at_least("task.prompt", self.prompt, 1)


SCHEMAS = {kind.name: kind for kind in (LatencyConfig, ThroughputConfig)}
