"""What the codecs, the residual and the plain settings of a method exclude and need: a table, and which rows hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvq.config import residual
from kvq.kernels import joint_of
from kvq.methods.policies import CHOOSES_TOKENS, Capabilities, Policy


@dataclass(frozen=True)
class Trait(Policy):
    """A row of the table. Attributes: as `Policy`."""

    setting: str
    does: str
    excludes: Capabilities
    needs: Capabilities = frozenset()


_TABLES: Capabilities = frozenset({"uncalibrated", "two_codecs", "expanded_latent"})
_BACKEND = Trait(
    "backend",
    "quantizes anew what it decoded (decode mode)",
    CHOOSES_TOKENS | {"two_codecs", "all_at_once", "prompt_at_once", "quantized_prefill", "sides_apart"},
)
_BY_LAYER = Trait("bits_by_layer", "gives layers bits of their own", frozenset({"one_width", "two_codecs"}))
_WHOLE_LAYERS = Trait("full_precision_layers", "keeps layers in full precision", frozenset({"all_layers"}))
_CALIBRATED = Trait("calibration", "fits tables to states", _TABLES)
_FITTED_FIRST = Trait("a codec", "fits tables to the first tokens", frozenset({"all_at_once"}))
_BY_POSITION = Trait("a codec", "undoes rotary embeddings", frozenset({"any_position", "expanded_latent"}))
_SINKS = Trait("sink_tokens", "keeps the first tokens in full precision", frozenset({"all_tokens", "own_tokens"}))
_AT_ONCE = Trait("residual=none", "quantizes all tokens at once", frozenset({"no_prompt", "chunked_prompt"}))
_SIDES_DIFFER = Trait("residual or bits", "differ for keys and values", frozenset({"sides_alike"}))
_JOINS_SIDES = Trait(
    "value",
    "is stored with the keys",
    frozenset({"codecs_alone", "two_codecs", "expanded_latent", "sides_apart"}),
    frozenset({"codecs_alone", "same_stages", "one_width", "all_layers", "sides_alike"}),
)


def traits_of(method: Any) -> Iterator[Policy]:
    """The rows that hold for a `kvq.methods.method.Method`."""
    codecs = {side: codec for side in ("key", "value") if (codec := getattr(method, side)) is not None}
    bits, kept = method.bits, method.residual
    joined = _JOINS_SIDES
    if method.joins_sides and (method.key is None or joint_of(method.key) is None):
        joined = replace(joined, excludes=joined.excludes | {"packed_attention"})
    holds = {
        _BACKEND: method.backend is not None,
        _BY_LAYER: bool(method.by_layer),
        _WHOLE_LAYERS: any(method.full_precision_layers.values()),
        _SINKS: method.sink_tokens > 0,
        joined: method.joins_sides,
        _CALIBRATED: method.is_calibrated,
        _FITTED_FIRST: method.fits_first_tokens,
        _BY_POSITION: any(codec.uses_rope for codec in codecs.values()),
        _AT_ONCE: any(getattr(kept, side).policy is residual.Policy.none for side in codecs),
        _SIDES_DIFFER: kept.key != kept.value or (bits is not None and bits.key != bits.value),
    }
    return (trait for trait, here in holds.items() if here)
