"""A method: codecs, residual and policies, and the cache layers made of them."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from kvq.cache.files import digest
from kvq.cache.layer import KVCacheLayer, Layer
from kvq.cache.packed import packed_layer
from kvq.cache.padded import JoinedLayer
from kvq.cache.side import CacheSide
from kvq.codecs import Codec, ComponentQuantizer, FisherTransform, StoredWithKeys, calibrated_parts
from kvq.config.bits import Bits, mean_label
from kvq.config.method import Policy as ResidualPolicy
from kvq.config.method import PrefillBlock, Residual, ResidualSide
from kvq.errors import ConfigError, Unsupported
from kvq.kernels import build_linear_chain
from kvq.methods.kept_keys import layer_indices, make_side, packed_side_of
from kvq.methods.policies import NEEDED, Capability, MergedRotation, Policy, method_traits
from kvq.models.layers import KvLayer


@dataclass(frozen=True)
class Method:
    """A codec for keys and one for values (None = full precision), and when tokens leave full precision.

    Attributes:
        bits: None for a fixed-rate method.
        full_precision_layers: `key` and `value` -> layers whose keys or values stay in full precision.
        sink_tokens: number of first tokens that stay in full precision.
        bound: `key` and `value` -> codecs of each layer with their tables (`kvq.calibration.files.bind_tables`); empty
            for a method without calibration.
        policies: further parts, such as those that evict tokens, change the bits or codec of some, keep some in full
            precision, or rotate states by the model's weights.
        by_layer: a method per layer where their bits differ, else empty; `key`, `value`, `bits` are those of the first.
        settings: the configuration that it was built from, as JSON data (`kvq.config.identity.canonical_method`); empty
            for a method that was constructed without `build_method`.
    """

    name: str
    key: Codec | None
    value: Codec | None
    residual: Residual
    bits: Bits | None
    full_precision_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sink_tokens: int = 0
    bound: Mapping[str, Sequence[Codec | None]] = field(default_factory=dict)
    policies: tuple[Policy, ...] = ()
    by_layer: Sequence[Method] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def joins_sides(self) -> bool:
        """Whether the key codec stores keys and values of a token together."""
        return isinstance(self.value, StoredWithKeys)

    def check_joined(self) -> None:
        """Raise `ConfigError` where values stored with keys lack a key codec for both, or a stage does not fit."""
        codecs = [self.key, self.value]
        codecs += [policy.codec(None, side, 0) for policy in self.policies for side in ("key", "value")]
        for codec in filter(None, codecs):
            both = self.joins_sides and codec is self.key
            for stage_name, stage in codec.stages:
                if getattr(stage, "before_values", False) != both and stage.uses_rope:
                    raise ConfigError(f"{stage_name}.before_values={not both}: true where values are stored with keys")
        if self.joins_sides and self.key is None:
            raise ConfigError(f"method={self.name}: values are stored with the keys, which need a codec")
        parts = {} if self.key is None or not self.joins_sides else calibrated_parts(self.key)
        if not all(isinstance(part, FisherTransform | ComponentQuantizer) for part in parts.values()):
            raise ConfigError(f"method={self.name}: values are stored with the keys, and tables are of keys alone")

    def policy(self, setting: str) -> Any:
        """The policy of that name (`Policy.setting`), such as `"eviction"`; None: the method has none."""
        return next((policy for policy in self.policies if policy.setting == setting), None)

    @property
    def merged(self) -> MergedRotation | None:
        """The policy that rotates values or keys by the model's weights, in place of a codec stage (None: none)."""
        return self.policy("merge_rotation")

    def without_policies(self, *settings: str) -> Method:
        """The method without the policies of these names."""
        return replace(self, policies=tuple(one for one in self.policies if one.setting not in settings))

    @functools.cached_property
    def _policies_and_traits(self) -> tuple[Policy, ...]:
        """The policies, and a `Trait` for each codec, residual or setting that excludes or needs capabilities."""
        return *self.policies, *method_traits(self)

    def check_needs(self, asker: str, *needed: Capability, asking: Policy | None = None) -> None:
        """Raise `Unsupported` where the method lacks a capability that `asker`, such as `task=error`, needs.

        `asking`: the policy of this method that needs it; it may exclude the capability itself.
        """
        for policy in self._policies_and_traits:
            for capability in needed:
                if policy is not asking and capability in policy.excludes:
                    refused = f"{policy.setting} of {self.name} {policy.does}; needs {NEEDED[capability]}"
                    raise Unsupported(f"{asker}: {refused}")

    def check_pairs(self) -> None:
        """Raise `Unsupported` where one policy of the method excludes what another needs."""
        for policy in self._policies_and_traits:
            self.check_needs(f"method={self.name} ({policy.setting})", *sorted(policy.needs), asking=policy)

    def has(self, capability: Capability) -> bool:
        """Whether no part of the method (a policy, codec, residual or setting) excludes a capability."""
        return not any(capability in policy.excludes for policy in self._policies_and_traits)

    def check_layers(self, layers: int) -> None:
        """Raise `ConfigError` if `by_layer` is for another number of layers than `layers`, that of the model."""
        if self.by_layer and len(self.by_layer) != layers:
            raise ConfigError(f"method.bits_by_layer: {len(self.by_layer)} numbers for {layers} layers; one for each")

    def codec(self, side: str, layer: int, layers: int) -> Codec | None:
        """The codec of `key` or `value` in one of `layers` layers; None where that layer stays in full precision.

        Raises:
            Unsupported: a calibrated method without a calibration, or with that of another number of layers.
        """
        codec = None if layer in self.full_precision_indices(side, layers) else self.codec_of(side, layer)
        if codec is None or not calibrated_parts(codec):
            return codec
        if side not in self.bound:
            raise Unsupported(
                f"method={self.name}: not calibrated; `python run.py method={self.name} model=...` calibrates it, and "
                "kvq.bind_calibration(method, model, file) takes the file that this leaves in results/calibration"
            )
        if len(self.bound[side]) != layers:
            raise Unsupported(f"calibration of method={self.name}: for {len(self.bound[side])} layers, not {layers}")
        return self.bound[side][layer]

    def full_precision_indices(self, side: str, layers: int) -> set[int]:
        """Indices of the layers whose keys (or values) stay in full precision, in a model with `layers` layers."""
        return layer_indices(self.full_precision_layers.get(side, ()), layers)

    def codec_of(self, side: str, layer: int) -> Codec | None:
        """The codec of `key` or `value` for a layer, whether or not that layer stays in full precision."""
        if self.by_layer:
            return self.by_layer[layer].codec_of(side, layer)
        codec: Codec | None = getattr(self, side)
        for policy in self.policies:
            codec = policy.codec(codec, side, layer)
        return codec

    @property
    def label(self) -> str:
        """Name and bits, such as `kivi 2`; the mean over layers where these have bits of their own."""
        bits = [method.bits for method in self.by_layer or (self,) if method.bits is not None]
        return f"{self.name} {mean_label(bits) if bits else ''}".strip()

    def identity(self, layers: int) -> dict[str, Any]:
        """All that determines how the states of a model with `layers` layers are stored, as JSON data.

        These are settings, residual, ids of tokens with full-precision keys, and a hash of the calibration tables.

        Raises:
            Unsupported: a method without settings, or a calibrated one without tables.
        """
        if not self.settings:
            raise Unsupported(f"method={self.name}: put together by hand, so nothing names it; use kvq.build_method")
        ids = getattr(self.policy("kept_keys"), "ids", None)
        return {
            **self.settings,
            "residual": asdict(self.residual),
            "kept_ids": None if ids is None else list(ids),
            "tables": digest(self._tables(layers)) if self.needs_calibration else None,
        }

    def _tables(self, layers: int) -> dict[str, Tensor]:
        """The calibration tables of all layers, by `side.layer.part.table`."""
        tables: dict[str, Tensor] = {}
        for side, layer in itertools.product(("key", "value"), range(layers)):
            codec = self.codec(side, layer, layers)
            if codec is not None and codec.joins_layers and layer:
                continue  # it is the codec of the first layer
            for name, part in ({} if codec is None else calibrated_parts(codec)).items():
                tables |= {f"{side}.{layer}.{name}.{table}": tensor for table, tensor in part.tables.items()}
        return tables

    @property
    def needs_calibration(self) -> bool:
        """Whether a part of its codecs has tables that calibration fits, whether or not these are bound already."""
        return any(codec is not None and calibrated_parts(codec) for codec in (self.key, self.value))

    @property
    def fits_first_tokens(self) -> bool:
        """Whether a codec has tables that are fitted to the first tokens of each sequence."""
        return any(codec is not None and codec.fits_first_tokens for codec in (self.key, self.value))

    @property
    def is_full_precision(self) -> bool:
        """Whether neither keys nor values are quantized, and none are evicted."""
        return not (self.key or self.value or self.replaces_layers or self.policy("eviction"))

    @property
    def replaces_layers(self) -> bool:
        """Whether a policy (`backend`) builds the cache layers, without codecs."""
        return self.policy("backend") is not None

    def check_packed(self) -> None:
        """Raise `Unsupported` where attention cannot read the method's codes."""
        self.check_needs("cache.attention=packed", "packed_attention")
        alike = self.residual.key == self.residual.value and not any(self.full_precision_layers.values())
        if self.sink_tokens and not (alike and self.key is not None and self.value is not None):
            raise Unsupported(
                f"cache.attention=packed: method={self.name} has sink_tokens, and keys that are packed at other times "
                "than values; use cache.attention=dense"
            )
        for method in (self, *self.by_layer):
            for codec in filter(None, (method.key, None if self.joins_sides else method.value)):
                build_linear_chain(codec)

    def layers(
        self, config: Any, held: Sequence[KvLayer], keep_decoded: bool = False, packed: bool = False
    ) -> Sequence[Layer]:
        """An empty cache layer for each attention of a model that computes keys and values.

        Args:
            config: the model's transformers text configuration.
            held: index, head dims and window of each of these attentions.
            keep_decoded: as in `KVCache`.
            packed: build layers that return codes, for attention that reads them.

        Raises:
            ConfigError: kept keys without token ids, bits for another number of layers, parts that do not fit together.
            Unsupported: a head dim, or attention on codes, that the method does not support.
        """
        self.check_layers(len(held))
        self.check_pairs()
        if getattr(config, "kv_lora_rank", None):
            self.check_needs("model", "latent")
        adapted = self.for_model(config)
        for policy in self.policies:
            adapted = policy.for_model(adapted, config)
        if adapted is not self:
            return adapted.layers(config, held, keep_decoded, packed)
        if packed:
            self.check_packed()
        for place, one in enumerate(held):
            for side, head_dim in (("key", one.head_dim), ("value", one.value_dim)):
                if (codec := self.codec_of(side, place)) is not None:
                    codec.check(head_dim)
        if self.replaces_layers:
            return [
                method.policy("backend").build_layer(self.residual.key, f"layer {one.index}")
                for method, one in zip(self.by_layer or [self] * len(held), held, strict=True)
            ]
        # Policies that choose tokens go by all of them; a model's own mask then hides those outside of its window.
        if not self.has("own_window"):
            held = [replace(one, window=None) for one in held]
        layers = [self._build_layer(place, held, keep_decoded) for place in range(len(held))]
        if packed:
            return [packed_layer(layer, packed_side_of) for layer in layers]
        for policy in self.policies:
            layers = [policy.wrap_layer(layer, index, config) for index, layer in enumerate(layers)]
        return layers

    @property
    def depends_on_model(self) -> bool:
        """Whether some stage of its codecs depends on the architecture of the model."""
        stages = [stage for codec in (self.key, self.value) if codec is not None for _, stage in codec.stages]
        return any(stage.depends_on_model for stage in stages)

    def for_model(self, config: Any) -> Method:
        """A copy whose stages are adapted to a model with this transformers text configuration (`Stage.for_model`)."""
        if not self.depends_on_model:
            return self
        return self.map_codecs(lambda one: one.with_stages((name, part.for_model(config)) for name, part in one.stages))

    def map_codecs(self, change: Callable[[Codec], Codec]) -> Method:
        """A copy with `change` made to each codec, also to those of single layers (`by_layer`, `bound`)."""
        bound = {side: [codec and change(codec) for codec in codecs] for side, codecs in self.bound.items()}
        by_layer = tuple(one.map_codecs(change) for one in self.by_layer)
        key, value = (codec and change(codec) for codec in (self.key, self.value))
        return replace(self, key=key, value=value, bound=bound, by_layer=by_layer)

    def _build_layer(self, place: int, held: Sequence[KvLayer], keep_decoded: bool) -> KVCacheLayer:
        """Build the empty cache layer of attention `held[place]`.

        Raises:
            Unsupported: one codec is to store keys and values together, and their head dims differ.
        """
        one, key = held[place], self._build_side("key", place, held, keep_decoded)
        if not self.joins_sides or key.codec is None:  # without one, a layer with a window, kept in full precision
            value = self._build_side("value", place, held, keep_decoded)
            return KVCacheLayer(key, value, one.window)
        if one.head_dim != one.value_dim:
            raise Unsupported(f"method={self.name}: keys of {one.head_dim} channels a head, values of {one.value_dim}")
        key.label = f"layer {one.index} keys and values"
        return JoinedLayer(key, one.window)

    def residual_in_window(self, codec: Codec | None, residual: ResidualSide) -> ResidualSide:
        """The residual of keys or values in a layer with sliding-window attention.

        Where tokens outside of the window can be dropped from the codec's store, the prompt is encoded in blocks.
        """
        drops = not (codec is None or codec.stores_lists or self.sink_tokens or residual.policy is ResidualPolicy.none)
        return replace(residual, prefill_block=PrefillBlock.size) if drops else residual

    def _build_side(self, side: str, place: int, held: Sequence[KvLayer], keep_decoded: bool) -> CacheSide:
        """The empty `key` or `value` side of layer `held[place]`, replaced by the first policy that replaces it."""
        residual, count = getattr(self.residual, side), len(held)
        codec = self.codec(side, place, count)
        label = f"layer {held[place].index} {side}s"
        like = make_side(codec, residual, label, keep_decoded, self.sink_tokens)
        for policy in self.policies if codec is not None else ():
            if (wrapped := policy.wrap_side(like, side, place, count)) is not like:
                return wrapped
        if held[place].window is not None:
            residual = self.residual_in_window(codec, residual)
        return make_side(codec, residual, label, keep_decoded, self.sink_tokens)


def bind_kept_keys(method: Method, tokenizer: Any) -> Method:
    """The method with the ids of the tokens whose keys it keeps; unchanged where it keeps none.

    Args:
        tokenizer: of the model that it will run on.

    Raises:
        ConfigError: a text that is not one token.
    """
    bound = tuple(policy.bind_tokenizer(tokenizer) for policy in method.policies)
    return method if all(map(operator.is_, bound, method.policies)) else replace(method, policies=bound)
