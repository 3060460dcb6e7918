"""Which protocols a method with more than codecs and a residual supports, and where its chunks end.

Token by token (eviction), only after a prompt, up to each flush (transformers' caches), or not at all.
"""

from __future__ import annotations

import itertools
from typing import Any

from kvq.config import Scoring
from kvq.config.diagnostics import DiagnosticConfig
from kvq.errors import Unsupported
from kvq.methods.eviction import When
from kvq.methods.method import Method
from kvq.tasks.scoring import generation_bounds


def steps(method: Method) -> bool:
    """Whether what a token reads depends on the forwards before it, so that each token needs its own forward."""
    return method.eviction is not None and method.eviction.when is When.always


def scoring_bounds(method: Method, length: int, chunk: int | None = None) -> list[tuple[int, int]]:
    """As `generation_bounds`; token by token, or up to each flush of transformers' caches, where a method needs it.

    Raises:
        Unsupported: as `generation_bounds`; eviction after a prompt, where there is no prompt.
    """
    if method.eviction is not None and method.eviction.when is When.prompt:
        raise Unsupported(
            f"task.scoring=generation: {method.name} evicts once, after a prompt; use task.scoring=continuation "
            "task.prompt=..., or a task with prompts"
        )
    if steps(method):
        return [(at, at + 1) for at in range(length)]
    return generation_bounds(method, length, chunk) if method.backend is None else _flushes(method, length, chunk)


def _flushes(method: Method, length: int, chunk: int | None) -> list[tuple[int, int]]:
    """Chunks for transformers' caches: the first token is quantized alone, then every `size` tokens."""
    size = max(method.residual.key.size, 1)
    starts = [0, *range(1, length, size), length]
    cuts = {cut for start, end in itertools.pairwise(starts) for cut in range(start, end, chunk or size)}
    return list(itertools.pairwise(sorted(cuts | {length})))


def check_codecs_alone(method: Method, task: str, apart: bool = False) -> None:
    """Raise `Unsupported` for a method with more than codecs, in a task that applies codecs without a cache.

    `apart`: the task has tokens to which a method is fitted, and others.
    """
    if any(part is not None for part in (method.plan, method.eviction, method.kept_keys, method.sink_detection)):
        raise Unsupported(f"task={task}: tries codecs alone; {method.name} also chooses tokens in a cache")
    if method.merged is not None:
        raise Unsupported(f"task={task}: tries codecs alone; states of {method.name} are rotated by a model's weights")
    if method.gqa is not None:
        raise Unsupported(
            f"task={task}: tries codecs alone; {method.name} adds bits by the query heads of a cache's model"
        )
    if method.fits_first_tokens and not apart:
        raise Unsupported(
            f"task={task}: tries codecs on tokens that {method.name} would be fitted to; none are held out"
        )


def check_layers_alike(method: Method, task: str) -> None:
    """Raise `Unsupported` for a method whose layers have codecs of their own, in a task that tries one for all."""
    if method.first_layers is not None:
        raise Unsupported(f"task={task}: takes every layer alike; the first layers of {method.name} have other codecs")
    if method.by_layer:
        raise Unsupported(f"task={task}: takes every layer alike; method.bits_by_layer gives layers bits of their own")


def check_at_once(method: Method, scoring: Scoring) -> None:
    """Raise `Unsupported` for a method that cannot be scored with all tokens at once."""
    if method.eviction is not None and scoring is Scoring.parallel:
        raise Unsupported("task.scoring=parallel: eviction has an order; use task.scoring=generation or continuation")
    if method.plan is not None and scoring is not Scoring.generation:
        raise Unsupported(
            f"task.scoring={scoring}: {method.name} chooses tokens as they leave full precision; use generation"
        )
    if method.fits_first_tokens and scoring is Scoring.parallel:
        raise Unsupported(
            f"task.scoring=parallel: {method.name} is fitted to the first tokens, here all; use generation"
        )


def check_sinks(task: Any, method: Method) -> None:
    """Raise `Unsupported` for first tokens in full precision in a task that fills no cache."""
    if method.sink_tokens and not getattr(task, "reads_weights", True):
        raise Unsupported(f"method.sink_tokens={method.sink_tokens}: task={task.name} counts no sinks")


def check_decode_mode(task: Any, method: Method) -> None:
    """Raise `Unsupported` for a method with a backend in a task that needs a codec or quantizes all tokens at once."""
    if method.backend is None:
        return
    if isinstance(task, DiagnosticConfig):
        raise Unsupported(f"task={task.name}: method={method.name} has no codec of kvq's to look into")
    scoring = getattr(task, "scoring", Scoring.generation)
    if scoring is not Scoring.generation:
        raise Unsupported(
            f"scoring={scoring}: method={method.name} quantizes anew what it decoded (decode mode); use "
            "task.scoring=generation"
        )
