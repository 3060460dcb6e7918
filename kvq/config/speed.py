"""The settings of the tasks that measure time; `kvq.config.tasks` hands them on.

`version` of a task is raised when its figures would mean something else: records of the one before are stale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from kvq.config.limits import Count, Counts, Natural, no_twice
from kvq.config.task import TaskConfig


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
        decode_steps: tokens decoded once more, with the time of attention on codes split into its steps, and by the
            method without its token norms.
    """

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


SCHEMAS = {kind.name: kind for kind in (LatencyConfig, ThroughputConfig)}
