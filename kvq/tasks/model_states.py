"""`task=model_states`: errors of a method's keys and values on a block of a model's states, layer by layer.

The last query of the block ranks its tokens; the queries behind it are held out (kvquant-plus-plus, sections 3.1-3.3).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec
from kvq.config.diagnostics import ModelStatesConfig
from kvq.diagnostics.drawn import Known, attended
from kvq.errors import ConfigError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import Inputs
from kvq.results.journal import Journal
from kvq.tasks.capture import Layer, capture, windows_of
from kvq.tasks.known_states import SIDES, Fitted, Found, against, check_known, fingerprint_of, measurement
from kvq.tasks.measurement import Baseline, Measurement, Task


def known_of(layer: Layer, held_out: int) -> Known:
    """A layer's states but those of the last `held_out` tokens, whose queries are held out.

    Query heads that share a KV head count as its queries. The weights are those among the block's tokens.
    """
    key, value = (x[:, :, :-held_out].float() for x in (layer.key, layer.value))
    heads = key.shape[1]

    def of(query: Float[Tensor, "1 query_heads queries dim"]) -> Float[Tensor, "1 heads shared dim"]:
        return query.float().unflatten(1, (heads, -1)).flatten(2, 3)

    queries, last = of(layer.query[:, :, -held_out:]), of(layer.query[:, :, -held_out - 1 : -held_out])
    scaling = layer.attention.scaling
    return Known(key, value, attended(last, key, scaling), attended(queries, key, scaling), queries)


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors and bits of the method's codecs by layer, means over windows; full precision has none."""
    task: ModelStatesConfig = inputs.config.task
    found, other = Found(), None
    seen: set[int] = set()

    def codec_of(side: str, layer: int) -> Fitted | None:
        codec: Codec | None = method.bound[side][layer] if side in method.bound else method.codec_of(side, layer)
        return None if codec is None else Fitted(codec)

    def visit(layer: Layer) -> None:
        nonlocal other
        seen.add(layer.index)
        if task.layers is not None and layer.index not in task.layers:
            return
        known = known_of(layer, task.held_out)
        other = other or against(inputs, known.key.shape[-1])
        beside = {} if other is None else {s: None if (c := getattr(other, s)) is None else Fitted(c) for s in SIDES}
        found.add(layer.index, known, {side: codec_of(side, layer.index) for side in SIDES}, beside)

    for tokens in [] if method.is_full_precision else windows_of(inputs):
        capture(inputs.model, tokens, visit)
        if outside := set(task.layers or ()) - seen:
            name = inputs.config.model.name
            raise ConfigError(f"task.layers={task.layers}: model={name} has no layer {min(outside)}; 0 to {max(seen)}")
    return measurement(found.rows())


def check(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method with more than codecs."""
    task: ModelStatesConfig = inputs.config.task
    inputs.check_context(task.context)
    check_known(inputs, method)
    if any(method.full_precision_layers.get(side) for side in SIDES):
        raise Unsupported(f"task={task.name}: {method.name} keeps layers in full precision, which have no error")


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the text, and of the method that errors are compared with."""
    return fingerprint_of(inputs, inputs.tokens.fingerprint)


TASK = Task(check, measure, fingerprint)
