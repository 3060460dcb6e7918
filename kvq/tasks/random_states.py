"""`task=random_states`: errors of a method's keys and values on drawn states of a known distribution.

What kvquant-plus-plus measures on states of its own making (sections 2.2, 3.2, 3.4 and 9.6). No model is read.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, bind_codec, calibrated_parts, fit_codec
from kvq.config.diagnostics import RandomStatesConfig
from kvq.diagnostics.drawn import Known, attended, stream, walk
from kvq.diagnostics.fidelity import relative_mse
from kvq.errors import Unsupported
from kvq.methods.method import Method
from kvq.methods.tiers import AdaptiveTiers, TierStore
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.known_states import SIDES, Fitted, Found, against, check_known, fingerprint_of, measurement
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.stepwise import check_layers_alike


def drawn(task: RandomStatesConfig, draw: int) -> Known:
    """The states of one draw; each part has a generator of its own, and none is a rotation's."""
    shape = (task.heads, task.tokens, task.head_dim)
    key, value = (walk(task.states, shape, stream(task.seed, draw, part), task.drift, task.jumps) for part in (0, 1))
    queries = torch.randn(1, task.heads, task.queries + 1, task.head_dim, generator=stream(task.seed, draw, 2))
    ranking, others = task.sharpness * queries[:, :, :1], task.sharpness * queries[:, :, 1:2]
    return Known(key, value, attended(ranking, key), attended(others, key), queries[:, :, 1:])


def ready(codec: Codec | None, task: RandomStatesConfig, draw: int, side: str) -> Fitted | None:
    """The codec, its tables or codebooks fitted to `task.fit_tokens` tokens that are drawn apart."""
    if codec is None:
        return None
    shape = (task.heads, task.fit_tokens, task.head_dim)
    apart = walk(task.states, shape, stream(task.seed, draw, 3 + SIDES.index(side)), task.drift, task.jumps)
    if calibrated_parts(codec):
        tables = fit_codec(codec, apart[0], None, None, task.seed)
        codec = bind_codec(codec, tables, task.heads, task.head_dim)
    if not codec.fits_first_tokens:
        return Fitted(codec)
    first = codec.encode(apart)
    return Fitted(codec.behind(first), first)


def moved(codec: Codec, x: Float[Tensor, "1 heads tokens dim"]) -> dict[str, float]:
    """Relative errors of keys in the first tier, then in the second, then in the first, each from what was decoded."""
    store, found = TierStore(codec, False), {}
    for name, tier, states in (("tier", 0, x), ("demoted", 1, x[:, :, :0]), ("promoted", 0, x[:, :, :0])):
        store.revise(states, torch.full(x.shape[:3], tier, dtype=torch.uint8))
        found[f"key_{name}_error"] = float(relative_mse(x, store.past(None)).mean())
    return found


@torch.no_grad()
def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors and bits of the method's codecs, draw by draw; full precision has none."""
    task: RandomStatesConfig = inputs.config.task
    found, other = Found(), against(inputs, task.head_dim)
    for draw in range(0 if method.is_full_precision else task.draws):
        known = drawn(task, draw)
        if isinstance(method.plan, AdaptiveTiers):
            assert method.key is not None
            found.add(draw, known, {}, {})
            found.note(draw, moved(method.key, known.key))
            continue
        own = {side: ready(getattr(method, side), task, draw, side) for side in SIDES}
        beside = {} if other is None else {side: ready(getattr(other, side), task, draw, side) for side in SIDES}
        found.add(draw, known, own, beside)
    return measurement(found.rows())


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for more than codecs, parts that a model fits, or a head dim that the method cannot do."""
    task: RandomStatesConfig = inputs.config.task
    check_known(inputs, method, (AdaptiveTiers,), apart=True)
    if method.by_layer:
        check_layers_alike(method, task.name)
    for side in SIDES:
        codec = getattr(method, side)
        if codec is None:
            continue
        codec.check(task.head_dim)
        for name, part in calibrated_parts(codec).items():
            if part.learned or part.wants_gradients or part.wants_moments:
                needed = "queries" if part.wants_moments else "loss"
                raise Unsupported(f"task={task.name}: {side} of {method.name}: '{name}' needs a model's {needed}")


def fingerprint(inputs: Inputs) -> str:
    """No text: the settings name the tensors."""
    return fingerprint_of(inputs, "drawn states")


TASK = Task(check, measure, fingerprint)
