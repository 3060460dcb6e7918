"""Policies: what a method does beside its codecs, what each of them needs and excludes, and the one check of both.

A policy excludes capabilities: a method with `method.eviction` cannot encode all tokens at once. Tasks, kinds of
attention and other policies need capabilities. `check_needs` compares the two and words every refusal, so a new policy
is checked against all that exist by the two sets that it states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from kvq.cache.layer import KVCacheLayer
from kvq.cache.side import CacheSide
from kvq.codecs import Codec
from kvq.config.residual import Policy as ResidualPolicy
from kvq.config.residual import Residual
from kvq.errors import Unsupported
from kvq.kernels.linear_chain import find_joint_transform

Capability = Literal[
    "codecs_alone",
    "two_codecs",
    "same_stages",
    "one_width",
    "fixed_bits",
    "uncalibrated",
    "any_position",
    "sides_alike",
    "all_layers",
    "all_tokens",
    "own_tokens",
    "all_at_once",
    "prompt_at_once",
    "no_prompt",
    "chunked_prompt",
    "quantized_prefill",
    "decoded_at_once",
    "packed_attention",
    "latent",
    "expanded_latent",
    "own_window",
    "several_tokens",
    "sides_apart",
]
Capabilities = frozenset[Capability]

NEEDED: Final[Mapping[Capability, str]] = {
    "codecs_alone": "codecs that encode states by themselves, without a cache",
    "two_codecs": "a past that is one codec's keys and one codec's values",
    "same_stages": "codecs with the same stages in all layers",
    "one_width": "the same bits in all layers",
    "fixed_bits": "bits that do not depend on the model",
    "uncalibrated": "a method that is not calibrated",
    "any_position": "states that do not depend on their positions",
    "sides_alike": "keys and values of the same bits and residual",
    "all_layers": "all layers quantized",
    "all_tokens": "all tokens quantized",
    "own_tokens": "that nothing else chooses tokens or keeps them",
    "all_at_once": "all tokens encoded at once; use task.scoring=generation",
    "prompt_at_once": "a prompt encoded at once; use task.scoring=generation",
    "no_prompt": "tokens one by one from the first on; use task.scoring=parallel, or continuation with a task.prompt",
    "chunked_prompt": "a prompt in chunks; use task.prefill=whole",
    "quantized_prefill": "a prompt that its own queries read decoded",
    "decoded_at_once": "that a query reads tokens of its own forward decoded",
    "packed_attention": "codes that attention reads; use cache.attention=dense",
    "latent": "keys as a cache holds them, which here is the latent that the model expands",
    "expanded_latent": "keys and values of heads alone; use cache.mla=latent",
    "own_window": "tokens that leave with a layer's window",
    "several_tokens": "several tokens in a forward",
    "sides_apart": "each side of each layer quantized by itself",
}
"""What each capability is, and what to do where a method lacks it, as the end of a refusal."""

CHOOSES_TOKENS: Final[Capabilities] = frozenset({"codecs_alone", "own_tokens", "packed_attention"})
"""Excluded by each policy that chooses tokens by what they are."""


class Policy:
    """One thing that a method does beside a codec for keys and one for values.

    Attributes:
        setting: its name in `method`, for errors.
        does: a phrase for errors, such as `evicts tokens`.
        needs: capabilities that no other policy of the method may exclude.
        excludes: capabilities that a method with this policy lacks.
    """

    setting: str
    does: str
    needs: Capabilities = frozenset()
    excludes: Capabilities = frozenset()

    def check_residual(self, name: str, residual: Residual) -> None:
        """Raise `ConfigError` for a residual that the policy of a method of this name cannot do."""

    def for_model(self, method: Any, config: Any) -> Any:
        """The `kvq.methods.method.Method` as a model with this text configuration needs it.

        Raises:
            Unsupported: a model that the policy cannot do.
        """
        return method

    def bind_tokenizer(self, tokenizer: Any) -> Policy:
        """A copy with what it needs from a model's tokenizer, such as token ids; itself where it needs nothing."""
        return self

    def codec(self, codec: Codec | None, side: str, layer: int) -> Codec | None:
        """The codec of `key` or `value` in a layer, in the place of that of all layers."""
        return codec

    def wrap_side(self, like: CacheSide, side: str, layer: int, layers: int) -> CacheSide:
        """Quantized keys or values (`side`) of layer `layer` of `layers`, in the place of those of one codec alone."""
        return like

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """Layer `layer` of a cache of a model with this text configuration, in the place of its two sides alone."""
        return like


def check_needs(name: str, policies: Iterable[Policy], asker: str, *needed: Capability) -> None:
    """Raise `Unsupported` where a policy of a method excludes what the asker needs.

    Args:
        asker: the setting that needs the capabilities, such as `task=error`.
    """
    for policy in policies:
        for capability in needed:
            if capability in policy.excludes:
                raise Unsupported(f"{asker}: {policy.setting} of {name} {policy.does}; needs {NEEDED[capability]}")


def check_pairs(name: str, policies: Iterable[Policy]) -> None:
    """Raise `Unsupported` where one policy of a method excludes what another needs."""
    found = list(policies)
    for policy in found:
        others = [other for other in found if other is not policy]
        check_needs(name, others, f"method={name} ({policy.setting})", *sorted(policy.needs))


@dataclass(frozen=True)
class Trait(Policy):
    """What a codec, the residual or a plain setting excludes and needs. Attributes: as `Policy`."""

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


def method_traits(method: Any) -> Iterator[Policy]:
    """What the codecs, residual and settings of a `kvq.methods.method.Method` exclude and need, as `Trait`s."""
    codecs = {side: codec for side in ("key", "value") if (codec := getattr(method, side)) is not None}
    bits, kept = method.bits, method.residual
    joined = _JOINS_SIDES
    if method.joins_sides and (method.key is None or find_joint_transform(method.key) is None):
        joined = replace(joined, excludes=joined.excludes | {"packed_attention"})
    holds = {
        _BACKEND: method.backend is not None,
        _BY_LAYER: bool(method.by_layer),
        _WHOLE_LAYERS: any(method.full_precision_layers.values()),
        _SINKS: method.sink_tokens > 0,
        joined: method.joins_sides,
        _CALIBRATED: method.needs_calibration,
        _FITTED_FIRST: method.fits_first_tokens,
        _BY_POSITION: any(codec.uses_rope for codec in codecs.values()),
        _AT_ONCE: any(getattr(kept, side).policy is ResidualPolicy.none for side in codecs),
        _SIDES_DIFFER: kept.key != kept.value or (bits is not None and bits.key != bits.value),
    }
    return (trait for trait, here in holds.items() if here)
