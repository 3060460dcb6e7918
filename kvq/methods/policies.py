"""Policies: the parts of a method besides its codecs, with the capabilities that each needs and excludes.

A policy excludes capabilities: a method with `method.eviction` cannot encode all tokens at once. Tasks, kinds of
attention and other policies need capabilities. `Method.check_needs` compares the two and words every refusal, so a new
policy is checked against all that exist by the two sets that it states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvq.cache.layer import KVCacheLayer, Layer
from kvq.cache.side import CacheSide
from kvq.codecs import Codec, Hadamard, RandomizedHadamard
from kvq.config.method import Policy as ResidualPolicy
from kvq.config.method import Residual, ResidualSide
from kvq.errors import ConfigError, Unsupported
from kvq.kernels.linear_chain import find_joint_transform

Capability = str
"""One of `NEEDED`."""
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
    "decoded_at_once": "that a query reads tokens of its own forward decoded",
    "packed_attention": "codes that attention reads; use cache.attention=dense",
    "latent": "keys as a cache holds them, which here is the latent that the model expands",
    "own_window": "tokens that leave with a layer's window",
    "several_tokens": "several tokens in a forward",
    "sides_apart": "each side of each layer quantized by itself",
}
"""Each capability as the end of an error: what is needed, and what to use if the method does not have it."""

CHOOSES_TOKENS: Final[Capabilities] = frozenset({"codecs_alone", "own_tokens", "packed_attention"})
"""Excluded by each policy that chooses tokens by their content."""
_MARK = "kvq_rotated"  # attribute of a text configuration while the weights rotate values
MOST_BITS = 8  # that `GqaCompensation` raises codecs to


class Policy:
    """A part of a method besides its codecs, such as the eviction of tokens; each hook's default changes nothing.

    Attributes:
        setting: the setting of `method` that configures it; names it in errors.
        does: a phrase for errors, such as `evicts tokens`.
        needs: capabilities that no other policy of the method may exclude.
        excludes: capabilities that a method with this policy lacks.
    """

    setting: str
    does: str
    needs: Capabilities = frozenset()
    excludes: Capabilities = frozenset()

    def check_residual(self, name: str, residual: Residual) -> None:
        """Raise `ConfigError` for a residual that the policy does not support; `name`: of the method, for errors."""

    def for_model(self, method: Any, config: Any) -> Any:
        """`method` (a `kvq.methods.method.Method`), adapted to a model with this transformers text configuration."""
        return method

    def bind_tokenizer(self, tokenizer: Any) -> Policy:
        """A copy with data from a model's tokenizer, such as token ids; the policy itself where it needs none."""
        return self

    def codec(self, codec: Codec | None, side: str, layer: int) -> Codec | None:
        """The codec of `side` (`key` or `value`) in a layer, in place of `codec`, that of all layers."""
        return codec

    def wrap_side(self, like: CacheSide, side: str, layer: int, layers: int) -> CacheSide:
        """The cache side that replaces `like`, the quantized `key` or `value` side of layer `layer` (of `layers`)."""
        return like

    def build_layer(self, residual: ResidualSide, label: str) -> Layer:
        """An empty layer of another library's cache, if `setting` is `backend`; `label`: names the layer in errors."""
        raise NotImplementedError

    def wrap_layer(self, like: KVCacheLayer, layer: int, config: Any) -> KVCacheLayer:
        """The cache layer to use in place of `like`, for layer `layer` of a model with this text configuration."""
        return like


@dataclass(frozen=True)
class Trait(Policy):
    """Capabilities that a codec, the residual or a plain setting excludes and needs. Attributes: as `Policy`."""

    setting: str
    does: str
    excludes: Capabilities
    needs: Capabilities = frozenset()


_BY_LAYER = Trait("bits_by_layer", "gives layers bits of their own", frozenset({"one_width", "two_codecs"}))
_WHOLE_LAYERS = Trait("full_precision_layers", "keeps layers in full precision", frozenset({"all_layers"}))
_CALIBRATED = Trait("calibration", "fits tables to states", frozenset({"uncalibrated", "two_codecs"}))
_BY_POSITION = Trait("a codec", "undoes rotary embeddings", frozenset({"any_position"}))
_SINKS = Trait("sink_tokens", "keeps the first tokens in full precision", frozenset({"all_tokens", "own_tokens"}))
_AT_ONCE = Trait("residual=none", "quantizes all tokens at once", frozenset({"no_prompt", "chunked_prompt"}))
_SIDES_DIFFER = Trait("residual or bits", "differ for keys and values", frozenset({"sides_alike"}))
_JOINS_SIDES = Trait(
    "value",
    "is stored with the keys",
    frozenset({"codecs_alone", "two_codecs", "sides_apart"}),
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
        _BY_LAYER: bool(method.by_layer),
        _WHOLE_LAYERS: any(method.full_precision_layers.values()),
        _SINKS: method.sink_tokens > 0,
        joined: method.joins_sides,
        _CALIBRATED: method.needs_calibration,
        Trait("a codec", "fits tables to the first tokens", frozenset({"all_at_once"})): method.fits_first_tokens,
        _BY_POSITION: any(codec.uses_rope for codec in codecs.values()),
        _AT_ONCE: any(getattr(kept, side).policy is ResidualPolicy.none for side in codecs),
        _SIDES_DIFFER: kept.key != kept.value or (bits is not None and bits.key != bits.value),
    }
    return (trait for trait, here in holds.items() if here)


@dataclass(frozen=True)
class MergedRotation(Policy):
    """Rotates values by a model's weights instead of by the codec: v_proj writes rotated values, o_proj turns back.

    Source: QuaRot (arXiv 2404.00456), section 4; OScaR (arXiv 2605.19660), Algorithm 1.

    Attributes:
        rotation: the stage that the codec of values loses.
    """

    rotation: Hadamard | RandomizedHadamard
    version: ClassVar[int] = 1
    setting = "merge_rotation"
    does = "rotates states by the model's weights"
    needs = frozenset({"same_stages", "uncalibrated"})
    excludes = frozenset({"codecs_alone", "sides_apart"})

    @contextmanager
    def in_weights(self, model: nn.Module) -> Iterator[None]:
        """Rotate values in all layers while the context lasts; the same weights, bit for bit, come back after it.

        A second copy of the projections is held meanwhile.
        """
        text = model.config.get_text_config()  # type: ignore[union-attr, operator]
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        pairs = [pair for module in model.modules() if (pair := _projections(module)) is not None]
        if len(pairs) != text.num_hidden_layers:
            where = f"in {len(pairs)} of {text.num_hidden_layers} layers"
            raise Unsupported(f"method.merge_rotation: {type(model).__name__} has v_proj and o_proj {where}")
        matrices = {matrix for pair in pairs for matrix in pair}
        before = {part: part.detach().clone() for matrix in matrices for part in matrix.parameters(recurse=False)}
        try:
            expected = _logits(model)
            for values, output in pairs:
                rotation = self.rotation.matrix(head_dim, values.weight.double())
                _rotate_channels(values.weight.data.T, rotation)
                if values.bias is not None:
                    _rotate_channels(values.bias.data[None], rotation)
                _rotate_channels(output.weight.data, rotation)
            if not torch.allclose(_logits(model), expected, rtol=1e-2, atol=1e-2, equal_nan=True):
                raise Unsupported(f"method.merge_rotation: {type(model).__name__} does more with values than sum them")
            setattr(text, _MARK, True)
            yield
        finally:
            for part, original in before.items():
                part.data.copy_(original)
            if hasattr(text, _MARK):
                delattr(text, _MARK)

    def for_model(self, method: Any, config: Any) -> Any:
        """The method unchanged. Raises: Unsupported: outside of `in_weights`, where the weights do not rotate."""
        if not hasattr(config, _MARK):
            raise Unsupported(
                "method.merge_rotation: the weights do not rotate values; run the model and its cache within "
                "`with method.merged.in_weights(model):`"
            )
        return method


def check_unrotated(config: Any) -> None:
    """Raise `Unsupported` if the model of this text configuration is within `MergedRotation.in_weights`."""
    if hasattr(config, _MARK):
        raise Unsupported("quantize: an outer `with` rotates the model's weights (merge_rotation); leave it first")


def merged_rotation(name: str, codec: Codec | None) -> tuple[Codec, MergedRotation]:
    """The value codec without its first stage, a rotation, and the policy that rotates by the weights instead."""
    first = codec.stages[0][1] if codec is not None and codec.stages else None
    if codec is None or not isinstance(first, Hadamard) or not first.orthogonal:
        raise ConfigError(f"method.merge_rotation of {name}: values whose first stage is a Hadamard rotation")
    return codec.with_stages(codec.stages[1:]), MergedRotation(first)


def _projections(attention: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """The projections of values and of the output of an attention, where both are linear layers of plain weights."""
    projections = [getattr(attention, name, None) for name in ("v_proj", "o_proj", "out_proj")]
    plain = [part for part in projections if isinstance(part, nn.Linear) and part.weight.is_floating_point()]
    return (plain[0], plain[1]) if len(plain) == 2 and plain[0] is projections[0] else None


def _rotate_channels(rows: Float[Tensor, "rows channels"], rotation: Float[Tensor, "dim dim"]) -> None:
    """Multiply each head's channels in each row by the rotation, in place, computed in double precision."""
    heads = rows.double().unflatten(1, (-1, rotation.shape[0]))
    rows.copy_((heads @ rotation.to(rows.device)).flatten(1))


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """`[1, 16, vocabulary]`: the logits of the tokens with ids 0 to 15, to compare a model before and after."""
    embedding = model.get_input_embeddings().weight
    tokens = torch.arange(16, device=embedding.device)[None] % embedding.shape[0]
    return model(input_ids=tokens, use_cache=False).logits


@dataclass(frozen=True)
class GqaCompensation(Policy):
    """Raises the bits of codecs by ceil(log4 g) for g query heads of each KV head, up to 8 bits.

    Source: KVQuant++ (`gqa`), +⌈log₄ g⌉ bits, cap 8.
    """

    version: ClassVar[int] = 2
    setting = "gqa_compensation"
    does = "adds bits by the query heads of a model"
    needs = frozenset({"same_stages"})
    excludes = frozenset({"codecs_alone", "fixed_bits"})

    def extra_bits(self, config: Any) -> int:
        """Bits to add: ceil(log4 g) for g query heads per KV head of a model with this text configuration."""
        heads = int(config.num_attention_heads)
        shared = heads // int(getattr(config, "num_key_value_heads", None) or heads)
        return -(-(shared - 1).bit_length() // 2)  # ⌈log₄⌉ of it

    def for_model(self, method: Any, config: Any) -> Any:
        """The method with the bits of its codecs raised in every layer, and without this policy."""
        extra, others = self.extra_bits(config), method.without_policies(self.setting)
        return others.map_codecs(lambda codec: codec.with_more_bits(extra, MOST_BITS))
