"""`task=random_states`, `task=model_states`: errors of the codecs of one or two methods on known states.

Random states are drawn as kvquant-plus-plus does (sections 2.2, 3.2, 3.4 and 9.6). Of a model's states, layer by layer,
the last query ranks the tokens, the queries after it are held out (sections 3.1-3.3). A draw or layer is one block.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, HuffmanCodec, LowRankCorrection, Packed, bind_codec, calibrated_parts, fit_codec
from kvq.codecs.split import PlannedCodec, TokenSplit
from kvq.config.diagnostics import Drawn, KnownStatesConfig, ModelStatesConfig, RandomStatesConfig
from kvq.diagnostics import relative_mse, weighted_mse
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.methods.mixed_precision import Saliency
from kvq.methods.tiers import AdaptiveTiers, TierStore
from kvq.models.inputs import Inputs
from kvq.results import run_key
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.results.record import versions_of_method
from kvq.tasks.measurement import Baseline, LayerStates, Measurement, Task, averaged, capture, windows_of

_STREAM = 3_141_592_653  # rotations, sketches and starts have small seeds: no state is drawn from the same generator
_DRAWS = 1000
SIDES = ("key", "value")
COMPARED = ("key_mse", "key_ranking_error", "key_held_out_error", "value_mse")
"""Errors that are compared with the other method's."""
_OTHER = "_of_the_other"
States = Float[Tensor, "1 heads tokens dim"]
Fitted = tuple[Codec, Packed | None]
"""A codec as it encodes the states of one place, and what the sequence stores already (its codebooks)."""


@dataclass(frozen=True)
class Known:
    """States of a draw or layer, weights of the `ranking` query and of `held_out` ones, `queries` of products."""

    key: Float[Tensor, "1 heads tokens dim"]
    value: Float[Tensor, "1 heads tokens dim"]
    ranking: Float[Tensor, "1 heads tokens"]
    held_out: Float[Tensor, "1 heads tokens"]
    queries: Float[Tensor, "1 heads queries dim"]


def generator_of(seed: int, draw: int, part: int = 0) -> torch.Generator:
    """The random generator of one part (keys, values, queries, ...) of a draw."""
    return torch.Generator().manual_seed(_STREAM + (seed * _DRAWS + draw) * 8 + part)


def draw_walk(
    kind: Drawn,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    drift: float = 0.0,
    jumps: Collection[int] = (),
) -> Float[Tensor, "1 heads tokens dim"]:
    """Draw `(heads, tokens, dim)` states, drifting and anew at `jumps` (kvquant-plus-plus, 2.2.9, 3.2, 9.6)."""
    heads, tokens, dim = shape
    steps = torch.randn(1, heads, tokens, dim, generator=generator)
    if kind is Drawn.sphere:
        return torch.nn.functional.normalize(steps, dim=-1)
    if kind is Drawn.gaussian:
        return steps
    starts = [0, *sorted(at for at in jumps if 0 < at < tokens), tokens]
    pieces = []
    for start, end in itertools.pairwise(starts):
        piece = steps[:, :, start:end].clone()
        piece[:, :, 1:] *= drift
        pieces.append(piece.cumsum(2))
    return torch.cat(pieces, 2)


def mean_attention(
    query: Float[Tensor, "1 heads queries dim"], key: Float[Tensor, "1 heads tokens dim"], scaling: float | None = None
) -> Float[Tensor, "1 heads tokens"]:
    """Attention weights over the tokens, as a mean over the head's queries, which all see all tokens."""
    scale = 1 / math.sqrt(key.shape[-1]) if scaling is None else scaling
    return torch.softmax(query @ key.mT * scale, -1).mean(2)


def check_known(inputs: Inputs, method: Method, drawn: bool) -> None:
    """Raise `Unsupported` for policies but tokens ranked by one query (`drawn`: tiers too), and `task.against`."""
    policy = method.policy("token_policy")
    by_one_query = isinstance(policy, Saliency) and not policy.recent and not policy.random
    measured = by_one_query or (drawn and isinstance(policy, AdaptiveTiers))
    known = method.without_policies("token_policy") if measured else method
    task = f"task={inputs.config.task.name}"
    known.check_needs(task, "codecs_alone", "any_position", *(() if drawn else ("all_at_once",)))
    if (other := other_method(inputs, 64)) is not None:
        other.check_needs(f"task.against={other.name}", "codecs_alone", "uncalibrated")
        if other.is_full_precision:
            raise Unsupported(f"task.against={other.name}: full precision has no error to compare with")


def other_method(inputs: Inputs, head_dim: int) -> Method | None:
    """The method that errors are compared with: `task.against` at `task.against_bits` (None: at the run's bits)."""
    task: KnownStatesConfig = inputs.config.task
    if task.against is None:
        return None
    return build_method(task.against, inputs.config.bits if task.against_bits is None else task.against_bits, head_dim)


def fingerprint_of(inputs: Inputs, states: str) -> str:
    """What names a run's data: `states`, and a hash of settings and versions of `task.against`, if that is set."""
    other = other_method(inputs, 64)
    if other is None:
        return states
    parts = {"settings": other.settings, "versions": versions_of_method(other.settings)}
    return f"{states}, against {run_key(parts)[:16]}"


def encode_block(codec: Codec, x: States, ranking: Float[Tensor, "1 heads tokens"]) -> Packed:
    """Encode states as one block; a codec with salient tokens chooses them by the weights `ranking`."""
    if not isinstance(codec, PlannedCodec):
        return codec.encode(x)
    assert isinstance(codec.quantizer, TokenSplit)
    with codec.planned(codec.quantizer.salient(ranking)):
        return codec.encode(x)


def errors_of(side: str, known: Known, x_hat: States) -> dict[str, float]:
    """A side's MSE and relative MSE; of keys also of inner products with queries, and weighted by attention."""
    x: States = getattr(known, side)
    rest = (x_hat - x).double()
    found = {"mse": float(rest.square().mean()), "rel_mse": float(relative_mse(x, x_hat).mean())}
    if side == "key":
        found["ip_error"] = float((known.queries.double() @ rest.mT).square().mean())
        for name in ("ranking", "held_out"):
            found[f"{name}_error"] = float(weighted_mse(x, x_hat, getattr(known, name)).mean())
    return {f"{side}_{name}": value for name, value in found.items()}


def costs_of(side: str, codec: Codec, packed: Packed, before: Packed | None) -> dict[str, float]:
    """Bits per element, with codebooks stored before; of keys also a Huffman code's rate, a correction's share."""
    stored = [packed] if before is None else [before, packed]
    elements = sum(one.batch * one.heads * one.tokens * one.head_dim for one in stored)
    found = {f"{side}_bits": 8 * sum(one.nbytes for one in stored) / elements}
    if side == "value":
        return found
    if isinstance(codec, HuffmanCodec):
        rate, bits = codec.rate(packed), next(iter(codec.quantizer.index_bits.values()))
        found |= {"index_bits": rate.coded / rate.indices, "index_entropy": rate.entropy / rate.indices}
        found["index_saved"] = 1 - found["index_bits"] / bits
    if isinstance(codec.quantizer, LowRankCorrection):
        factors = sum(packed.parts[name].numel() for name in ("left", "right"))
        found["correction_share"] = factors / (packed.batch * packed.heads * packed.tokens * packed.head_dim)
    return found


def numbers_of(known: Known, fitted: Mapping[str, Fitted], other: Mapping[str, Fitted]) -> dict[str, float]:
    """Errors and bits of codecs by side; `other`: codecs that they are compared with."""
    numbers: dict[str, float] = {}
    for side, (codec, before) in fitted.items():
        x: States = getattr(known, side)
        packed = encode_block(codec, x, known.ranking)
        numbers |= errors_of(side, known, codec.decode(packed)) | costs_of(side, codec, packed, before)
        if side in other:
            compared = other[side][0]
            theirs = errors_of(side, known, compared.decode(encode_block(compared, x, known.ranking)))
            numbers |= {f"{name}{_OTHER}": value for name, value in theirs.items() if name in COMPARED}
    return numbers


def measurement(found: Mapping[int, list[dict[str, float]]]) -> Measurement:
    """Rows of means by place (draw, layer), with reductions of error; metrics: means over places, extremes."""
    added = ({"kind": "states", "place": place, **one} for place in sorted(found) for one in found[place])
    rows = averaged(added, "kind", "place")
    for row in rows:
        for name in COMPARED:
            if (theirs := row.pop(f"{name}{_OTHER}", None)) is not None:
                row[f"{name}_reduction"] = 0.0 if row[name] == theirs == 0 else 1 - row[name] / theirs
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in ("kind", "place")]
    metrics: dict[str, float] = {"places": float(len(rows))}
    for name in names:
        values = [row[name] for row in rows if name in row]
        metrics[name] = sum(values) / len(values)
        if name.endswith("_reduction"):
            metrics |= {f"{name}_least": min(values), f"{name}_most": max(values)}
    sides = [metrics[f"{side}_bits"] for side in SIDES if f"{side}_bits" in metrics]
    if sides:
        metrics["bits_per_element"] = sum(sides) / len(sides)
    return Measurement(metrics, units_of(metrics, dict.fromkeys(("key_rel_mse", "value_rel_mse"), "1")), rows)


def draw_states(task: RandomStatesConfig, draw: int) -> Known:
    """Draw keys, values and queries; each has a generator of its own, different from those of rotations."""
    shape = (task.heads, task.tokens, task.head_dim)
    key, value = (
        draw_walk(task.states, shape, generator_of(task.seed, draw, part), task.drift, task.jumps) for part in (0, 1)
    )
    queries = torch.randn(1, task.heads, task.queries + 1, task.head_dim, generator=generator_of(task.seed, draw, 2))
    ranking, others = task.sharpness * queries[:, :, :1], task.sharpness * queries[:, :, 1:2]
    return Known(key, value, mean_attention(ranking, key), mean_attention(others, key), queries[:, :, 1:])


def codecs_of(method: Method | None) -> dict[str, Codec]:
    """The codecs of a method by side, where it has them."""
    return {side: codec for side in SIDES if (codec := getattr(method, side, None)) is not None}


def fit_codecs(method: Method | None, task: RandomStatesConfig, draw: int) -> dict[str, Fitted]:
    """A method's codecs with tables or codebooks fitted to `task.fit_tokens` other tokens of the same kind."""
    shape, fitted = (task.heads, task.fit_tokens, task.head_dim), dict[str, Fitted]()
    for side, codec in codecs_of(method).items():
        generator = generator_of(task.seed, draw, 3 + SIDES.index(side))
        apart = draw_walk(task.states, shape, generator, task.drift, task.jumps)
        if calibrated_parts(codec):
            tables = fit_codec(codec, apart[0], None, None, task.seed)
            codec = bind_codec(codec, tables, task.heads, task.head_dim)
        first = codec.encode(apart) if codec.fits_first_tokens else None
        fitted[side] = (codec, None) if first is None else (codec.for_later_tokens(first), first)
    return fitted


def recoding_errors(codec: Codec, x: Float[Tensor, "1 heads tokens dim"]) -> dict[str, float]:
    """Relative MSE of keys encoded in the first tier, then recoded in the second, then in the first again."""
    store, found = TierStore(codec, False), {}
    for name, tier, states in (("tier", 0, x), ("demoted", 1, x[:, :, :0]), ("promoted", 0, x[:, :, :0])):
        store.revise(states, torch.full(x.shape[:3], tier, dtype=torch.uint8))
        found[f"key_{name}_error"] = float(relative_mse(x, store.past(None)).mean())
    return found


@torch.no_grad()
def measure_random(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors and bits of the method's codecs, one sample per draw; none for full precision."""
    task: RandomStatesConfig = inputs.config.task
    found, other = defaultdict[int, list[dict[str, float]]](list), other_method(inputs, task.head_dim)
    for draw in range(0 if method.is_full_precision else task.draws):
        known = draw_states(task, draw)
        if isinstance(method.policy("token_policy"), AdaptiveTiers):
            assert method.key is not None
            found[draw].append(recoding_errors(method.key, known.key))
            continue
        found[draw].append(numbers_of(known, fit_codecs(method, task, draw), fit_codecs(other, task, draw)))
    return measurement(found)


def check_random(inputs: Inputs, method: Method) -> None:
    """As `check_known`; also raise `Unsupported` for parts that need a model's loss or queries, and for head dims."""
    task: RandomStatesConfig = inputs.config.task
    check_known(inputs, method, drawn=True)
    for side, codec in codecs_of(method).items():
        codec.check(task.head_dim)
        for name, part in calibrated_parts(codec).items():
            if part.learned or part.wants_gradients or part.wants_moments:
                needed = "queries" if part.wants_moments else "loss"
                raise Unsupported(f"task={task.name}: {side} of {method.name}: '{name}' needs a model's {needed}")
    method.check_needs(f"task={task.name}", "one_width", "all_tokens")


def known_of(layer: LayerStates, held_out: int) -> Known:
    """A layer's states but the last `held_out` tokens, which only query; heads that share a KV head are its own."""
    key, value = (x[:, :, :-held_out].float() for x in (layer.key, layer.value))
    heads = key.shape[1]

    def of(query: Float[Tensor, "1 query_heads queries dim"]) -> Float[Tensor, "1 heads shared dim"]:
        return query.float().unflatten(1, (heads, -1)).flatten(2, 3)

    queries, last = of(layer.query[:, :, -held_out:]), of(layer.query[:, :, -held_out - 1 : -held_out])
    scaling = layer.attention.scaling
    return Known(key, value, mean_attention(last, key, scaling), mean_attention(queries, key, scaling), queries)


def measure_model(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Errors and bits of the method's codecs by layer, means over windows; full precision has none."""
    task: ModelStatesConfig = inputs.config.task
    found, other = defaultdict[int, list[dict[str, float]]](list), None
    seen: set[int] = set()

    def codec_of(side: str, layer: int) -> Codec | None:
        return method.bound[side][layer] if side in method.bound else method.codec_of(side, layer)

    def visit(layer: LayerStates) -> None:
        nonlocal other
        seen.add(layer.index)
        if task.layers is not None and layer.index not in task.layers:
            return
        known = known_of(layer, task.held_out)
        other = other or other_method(inputs, known.key.shape[-1])
        own = {side: (codec, None) for side in SIDES if (codec := codec_of(side, layer.index)) is not None}
        compared = {side: (codec, None) for side, codec in codecs_of(other).items()}
        found[layer.index].append(numbers_of(known, own, compared))

    for tokens in [] if method.is_full_precision else windows_of(inputs):
        capture(inputs.model, tokens, visit)
        if outside := set(task.layers or ()) - seen:
            name = inputs.config.model.name
            raise ConfigError(f"task.layers={task.layers}: model={name} has no layer {min(outside)}; 0 to {max(seen)}")
    return measurement(found)


def check_model(inputs: Inputs, method: Method) -> None:
    """Raise `ConfigError` for windows longer than the model takes, `Unsupported` for a method with policies."""
    inputs.check_context()
    check_known(inputs, method, drawn=False)
    method.check_needs("task=model_states", "all_layers", "all_tokens")


TASKS = {
    "random_states": Task(check_random, measure_random, lambda inputs: fingerprint_of(inputs, "drawn states")),
    "model_states": Task(check_model, measure_model, lambda inputs: fingerprint_of(inputs, inputs.tokens.fingerprint)),
}
