"""Errors of the codecs of one or two methods on known states; what two tasks share.

All tokens of a draw or of a layer are one block, whatever the residual.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvq.codecs import Codec, HuffmanCodec, LowRankCorrection, Packed
from kvq.codecs.split import PlannedCodec, TokenSplit
from kvq.config.diagnostics import KnownStatesConfig
from kvq.diagnostics.drawn import Known
from kvq.diagnostics.fidelity import relative_mse, weighted_mse
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.methods.plan import MixedPrecision, Saliency
from kvq.models.inputs import Inputs
from kvq.results import run_key
from kvq.results.metrics import units_of
from kvq.results.versions import versions_of_method
from kvq.tasks.measurement import Measurement
from kvq.tasks.stepwise import check_codecs_alone

SIDES = ("key", "value")
COMPARED = ("key_mse", "key_ranking_error", "key_held_out_error", "value_mse")
"""Errors that are compared with the other method's."""
_BESIDE = "_beside"
States = Float[Tensor, "1 heads tokens dim"]


@dataclass(frozen=True)
class Fitted:
    """A codec as it encodes the states of one place. `before`: what the sequence stores already (its codebooks)."""

    codec: Codec
    before: Packed | None = None


def check_known(
    inputs: Inputs, method: Method, plans: tuple[type[MixedPrecision], ...] = (), apart: bool = False
) -> None:
    """Raise `Unsupported` for a method with more than codecs and the rank of one query.

    Args:
        inputs: of the run.
        method: the method.
        plans: further policies that the task has a place for.
        apart: whether the task has tokens to which codebooks are fitted.
    """
    name = inputs.config.task.name
    plan = method.plan
    by_one_query = isinstance(plan, Saliency) and not plan.recent and not plan.random
    known = replace(method, plan=None) if by_one_query or isinstance(plan, plans) else method
    check_codecs_alone(known, name, apart)
    for side in SIDES:
        codec = getattr(method, side)
        if codec is not None and codec.uses_rope:
            raise Unsupported(
                f"task={name}: its states have no positions, which {side}s of {method.name} are turned by"
            )
    other = against(inputs, 64)
    if other is not None and (other.is_full_precision or other.plan is not None or other.is_calibrated):
        raise Unsupported(f"task.against={other.name}: a method of codecs alone that is not calibrated")


def against(inputs: Inputs, head_dim: int) -> Method | None:
    """The method that errors are compared with: `task.against` at `task.against_bits`, by default the run's own."""
    task: KnownStatesConfig = inputs.config.task
    if task.against is None:
        return None
    return build_method(task.against, inputs.config.bits if task.against_bits is None else task.against_bits, head_dim)


def fingerprint_of(inputs: Inputs, states: str) -> str:
    """What is measured: the states and, by its settings and versions, the other method."""
    other = against(inputs, 64)
    if other is None:
        return states
    parts = {"settings": other.settings, "versions": versions_of_method(other.settings)}
    return f"{states}, against {run_key(parts)[:16]}"


def encoded(fitted: Fitted, x: States, ranking: Float[Tensor, "1 heads tokens"]) -> Packed:
    """The states encoded as one block; by the ranking query's weights where the codec has salient tokens."""
    codec, context = fitted.codec, contextlib.nullcontext()
    if isinstance(codec, PlannedCodec):
        assert isinstance(codec.quantizer, TokenSplit)
        context = codec.planned(codec.quantizer.salient(ranking))  # type: ignore[assignment]
    with context:
        return codec.encode(x)


def errors_of(side: str, known: Known, x_hat: States) -> dict[str, float]:
    """Errors of one side. MSE per channel, relative, of inner products with queries, and weighted by attention."""
    x: States = getattr(known, side)
    rest = (x_hat - x).double()
    found = {"mse": float(rest.square().mean()), "rel_mse": float(relative_mse(x, x_hat).mean())}
    if side == "key":
        found["ip_error"] = float((known.queries.double() @ rest.mT).square().mean())
        for name in ("ranking", "held_out"):
            found[f"{name}_error"] = float(weighted_mse(x, x_hat, getattr(known, name)).mean())
    return {f"{side}_{name}": value for name, value in found.items()}


def costs_of(side: str, fitted: Fitted, packed: Packed) -> dict[str, float]:
    """Bits per element, those of the sequence where it stores more; a Huffman code's rate; a correction's share."""
    held = [packed] if fitted.before is None else [fitted.before, packed]
    found = {
        f"{side}_bits": 8 * sum(p.nbytes for p in held) / sum(p.batch * p.heads * p.tokens * p.head_dim for p in held)
    }
    if side == "value":
        return found
    if isinstance(fitted.codec, HuffmanCodec):
        rate = fitted.codec.rate(packed)
        bits = next(iter(fitted.codec.quantizer.indices.values()))
        found |= {"index_bits": rate.coded / rate.indices, "index_entropy": rate.entropy / rate.indices}
        found["index_saved"] = 1 - found["index_bits"] / bits
    if isinstance(fitted.codec.quantizer, LowRankCorrection):
        factors = sum(packed.parts[name].numel() for name in ("left", "right"))
        found["correction_share"] = factors / (packed.batch * packed.heads * packed.tokens * packed.head_dim)
    return found


@dataclass
class Found:
    """Numbers by place, each a mean over what was added."""

    _sums: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    _counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(
        self, place: int, known: Known, fitted: Mapping[str, Fitted | None], other: Mapping[str, Fitted | None]
    ) -> None:
        """Measure one place; `other`: the codecs of the method that it is compared with."""
        numbers = self._sums[place]
        for side, own in fitted.items():
            if own is None:
                continue
            x: States = getattr(known, side)
            packed = encoded(own, x, known.ranking)
            found = errors_of(side, known, own.codec.decode(packed)) | costs_of(side, own, packed)
            beside = other.get(side)
            if beside is not None:
                decoded = beside.codec.decode(encoded(beside, x, known.ranking))
                theirs = errors_of(side, known, decoded)
                found |= {f"{name}{_BESIDE}": value for name, value in theirs.items() if name in COMPARED}
            for name, value in found.items():
                numbers[name] += value
        self._counts[place] += 1

    def note(self, place: int, numbers: Mapping[str, float]) -> None:
        """Further numbers of a place."""
        for name, value in numbers.items():
            self._sums[place][name] += value

    def rows(self) -> list[dict[str, Any]]:
        """A row for each place: its means, and by what share errors are below the other method's."""
        out = []
        for place in sorted(self._sums):
            row = {name: value / self._counts[place] for name, value in self._sums[place].items()}
            for name in COMPARED:
                if (beside := row.pop(f"{name}{_BESIDE}", None)) is not None:
                    row[f"{name}_reduction"] = 0.0 if row[name] == beside == 0 else 1 - row[name] / beside
            out.append({"kind": "states", "place": place, **row})
        return out


def measurement(rows: list[dict[str, Any]]) -> Measurement:
    """Means over places; of reductions also the least and the most."""
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
